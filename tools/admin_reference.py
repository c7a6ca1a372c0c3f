"""Writes docs/openapi.json, the description of the administration interface, from its routes.

python tools/admin_reference.py            # prints it
python tools/admin_reference.py --write    # writes docs/openapi.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "openapi.json"
sys.path.insert(0, str(ROOT))

from kvstore.service.admin.app import make_routes  # noqa: E402


def description() -> str:
    """The description as text; it depends on the release alone."""
    return json.dumps(make_routes().openapi(), indent=2, sort_keys=True, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(description())
    else:
        sys.stdout.write(description())
