"""What `bench-ttft --without-amx` relies on: functions of torch that its releases may rename."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_torch_says_that_there_is_no_amx() -> None:
    """In an engine that imports the module torch says so, and has the functions that are replaced."""
    pytest.importorskip("torch")
    program = "import torch; (torch.cpu._is_amx_tile_supported, torch.cpu._init_amx); import benchmarks.without_amx"
    program += "; print(torch.cpu._is_amx_tile_supported(), torch.cpu._init_amx())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
