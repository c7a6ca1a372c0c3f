"""Errors as messages: by the name of their public class, and a code for what a client does something about."""

from __future__ import annotations

from kvstore import errors
from kvstore.errors import InternalError, InvalidRequest, KVStoreError
from kvstore.model.namespace import NamespaceNotOpen
from kvstore.wire.messages import Error, Refused

__all__ = ["error_of", "raise_error"]

_KINDS: dict[str, type[KVStoreError]] = {
    name: kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), KVStoreError)
}
_NOT_OPEN = "namespace_not_open"


def error_of(request_id: int, error: KVStoreError) -> Error:
    """An error as the answer to a request, under the public class that it is one of."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    return Error(request_id, kind, str(error), _NOT_OPEN if isinstance(error, NamespaceNotOpen) else "")


def raise_error(answer: Error | Refused, *, codes: bool = True) -> None:
    """Raise what the other side answered, as the class it names.

    Args:
        answer: Its message.
        codes: Its welcome says so. An older service does not tell a namespace that is not open from any other invalid
            request: there each may be one.
    """
    kind = _KINDS.get(answer.kind, InternalError)
    if isinstance(answer, Error) and kind is InvalidRequest and (answer.code == _NOT_OPEN or not codes):
        kind = NamespaceNotOpen
    raise kind(answer.message)
