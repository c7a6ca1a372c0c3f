"""`python -m kvstore.cli`: the `kvstore` command without an installation."""

from __future__ import annotations

import sys

from kvstore.cli.main import main

sys.exit(main())
