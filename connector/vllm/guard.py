"""The guard around each hook: no error of ours reaches the engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_LOGGED_ERRORS = 20

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(fallback: Any = None) -> Callable[[Hook], Hook]:
    """Catch the errors of a hook: count them in `guarded_errors` of its object, log the first 20 with their traceback.

    Args:
        fallback: The result for the engine after an error; called if it is callable.
    """

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def protected(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - the guard
                self.guarded_errors += 1
                if self.guarded_errors <= _LOGGED_ERRORS:
                    _log.exception("kvstore: an error in %s was caught; the engine continues", hook.__name__)
                return fallback() if callable(fallback) else fallback

        return protected  # type: ignore[return-value]

    return decorate
