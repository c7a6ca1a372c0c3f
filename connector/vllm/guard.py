"""The guard: no error of ours reaches the engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["guarded"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_LOGGED_ERRORS = 20

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(fallback: Any = None) -> Callable[[Hook], Hook]:
    """Keep errors of a hook from the engine: count them, log them with their traceback, return the fallback.

    The hook's object counts in `guarded_errors`; the first 20 are logged.

    Args:
        fallback: What the engine gets instead; called if it is callable.
    """

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def protected(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - the guard
                self.guarded_errors += 1
                if self.guarded_errors <= _LOGGED_ERRORS:
                    _log.exception("kvstore: an error in %s was kept from the engine", hook.__name__)
                return fallback() if callable(fallback) else fallback

        return protected  # type: ignore[return-value]

    return decorate
