"""The guard of the calls that an engine makes: no error of ours reaches it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])


def never_raises(note: Callable[[Any, str, Exception], None], answer: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """Catch the errors of a method that an engine calls.

    Args:
        note: Called with the method's object, the method's name and the error.
        answer: Called with the method's arguments; its result is what the engine gets after an error.
    """

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def protected(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the guard
                note(self, hook.__name__, error)
                return answer(*args, **kwargs)

        return protected  # type: ignore[return-value]

    return decorate
