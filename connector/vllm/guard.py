"""The guard around each hook of vLLM: errors of ours are counted and logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from connector.guard import Hook, never_raises
from connector.logs import LOG

_LOGGED_ERRORS = 20


def guarded(fallback: Any = None) -> Callable[[Hook], Hook]:
    """Catch the errors of a hook: count them in `guarded_errors` of its object, log the first 20 with their traceback.

    Args:
        fallback: The result for the engine after an error; called if it is callable.
    """
    return never_raises(_count, lambda *_, **__: fallback() if callable(fallback) else fallback)


def _count(guarded_object: Any, hook: str, error: Exception) -> None:
    guarded_object.guarded_errors += 1
    if guarded_object.guarded_errors <= _LOGGED_ERRORS:
        LOG.error("kvstore: an error in %s was caught; the engine continues", hook, exc_info=error)
