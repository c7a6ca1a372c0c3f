"""`python -m connector.device`: the GPU that this Python sees, and which ways records can take on it, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from connector.device.paths import try_paths
from connector.device.streams import CudaStreams


def main() -> None:
    """Print the GPU's name, null if there is none, and each way that was tried."""
    if not torch.cuda.is_available():
        print(json.dumps({"gpu": None, "paths": []}))
        return
    paths = try_paths(CudaStreams(torch.device("cuda")))
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "paths": [asdict(path) for path in paths]}))


if __name__ == "__main__":
    main()
