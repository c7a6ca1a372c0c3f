"""Logs that a verb would show twice: what they say is in its report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quieted"]


@contextmanager
def quieted(level: int = logging.ERROR, *, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Show of our own logs, and of those of `also`, nothing below `level`; levels are as before at the end."""
    loggers = [logging.getLogger(name) for name in ("kvstore", *also)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
