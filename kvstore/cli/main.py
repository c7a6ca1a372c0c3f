"""The `kvstore` command's start and end: Ctrl-C is one line, also while its modules are imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a failure, 2 for a wrong call, 130 interrupted."""
    try:
        from kvstore.cli.verbs import run  # takes a moment, in which a user may press Ctrl-C

        return run(arguments)
    except KeyboardInterrupt:
        print("kvstore: interrupted", file=sys.stderr)
        return INTERRUPTED
