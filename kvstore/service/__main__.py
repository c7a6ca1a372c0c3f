"""`python -m kvstore.service`."""

from __future__ import annotations

import sys

from kvstore.service.main import main

sys.exit(main())
