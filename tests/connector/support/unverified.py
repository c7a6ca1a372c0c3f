"""Switches the reader's verification of payloads off, in an engine (`preload`) or a service (run as a program).

Only for showing that verification is what stands between a flipped bit and wrong output.
"""

from __future__ import annotations

import sys

from kvstore.format import record

record.verify_payload = lambda *_: None

if __name__ == "__main__":
    from kvstore.cli.main import main

    sys.exit(main(sys.argv[1:]))
