"""`python -m kvstore.service.admin.openapi [FILE]`: the description of the interface, kept as `docs/openapi.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvstore.service.admin.app import make_routes

__all__ = ["description"]


def description() -> str:
    """The description as text, the same for equal releases."""
    return json.dumps(make_routes().openapi(), indent=2, sort_keys=True, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(description())
    else:
        sys.stdout.write(description())
