"""The form of the reply to each command that we send, and the types of the keys that it needs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.catalog.redis.scripts import BEGIN_RECOUNT, END_RECOUNT, START
from kvstore.errors import Unavailable

Argument = bytes | str | int
Command = Sequence[Argument]

_INTEGER_MAX = 1 << 63
_TEXTS = frozenset({bytes, type(None)})


def _is_number(reply: Any) -> bool:
    return isinstance(reply, int) and not isinstance(reply, bool) and -_INTEGER_MAX <= reply < _INTEGER_MAX


def _is_text(reply: Any) -> bool:
    return isinstance(reply, bytes)


def _is_text_or_none(reply: Any) -> bool:
    return reply is None or isinstance(reply, bytes)


def _is_texts(reply: Any) -> bool:
    return isinstance(reply, list) and set(map(type, reply)) <= {bytes}


def _is_pairs(reply: Any) -> bool:
    if isinstance(reply, dict):
        return all(map(_is_text, reply)) and all(map(_is_text, reply.values()))
    return _is_texts(reply) and len(reply) % 2 == 0


def _is_scan(reply: Any, is_page: Callable[[Any], bool] = _is_texts) -> bool:
    return (
        isinstance(reply, list | tuple)
        and len(reply) == 2
        and isinstance(reply[0], bytes | int)
        and str(int(reply[0])).isdecimal()
        and is_page(reply[1])
    )


_FORMS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("EXISTS", "DEL", "UNLINK", "HSET", "HLEN", "HDEL"), _is_number),
    "EXPIRE": lambda reply: isinstance(reply, bool) or _is_number(reply),  # redis-py converts it
    "HEXISTS": lambda reply: isinstance(reply, bool) or _is_number(reply),  # redis-py converts it
    **dict.fromkeys(("CLUSTER", "INFO", "SCRIPT", "TYPE"), _is_text),
    # the caller checks the rest
    "EVAL": lambda reply: _is_text_or_none(reply) or _is_number(reply) or isinstance(reply, list),
    "GET": _is_text_or_none,
    "HGETALL": _is_pairs,
    "HSCAN": lambda reply: _is_scan(reply, _is_pairs),
    "LRANGE": _is_texts,
    "SCAN": _is_scan,
    "SET": lambda reply: reply is True or reply == b"OK",
}

_TYPES: Mapping[str, bytes] = {
    "GET": b"string",
    "LRANGE": b"list",
    **dict.fromkeys(("HGETALL", "HSCAN", "HSET", "HLEN", "HEXISTS", "HDEL"), b"hash"),
}
_TYPES_OF_A_SCRIPT = (b"string", b"hash", b"list")
"""Of the catalog's keys: an entry, totals, tombstones."""


def check_reply(command: Command, reply: Any) -> None:
    """Refuse a reply that no Redis gives to a command.

    Raises:
        Unavailable: It is one.
    """
    verb = str(command[0])
    if verb == "MGET":
        is_right = isinstance(reply, list) and len(reply) == len(command) - 1 and set(map(type, reply)) <= _TEXTS
    elif verb == "EVALSHA":
        is_right = _is_text_or_none(reply) if command[1] == START.sha else _is_number(reply)
    else:
        try:
            is_right = _FORMS[verb](reply)
        except ValueError:
            is_right = False
    if not is_right:
        raise strange_reply(verb, reply)


def strange_reply(verb: str, reply: Any) -> Unavailable:
    """The error for a reply that no Redis gives to a command."""
    return Unavailable(
        "the server at the address of Redis does not reply like one: check the address, and any proxy before it",
        command=verb,
        seen=repr(reply)[:80],
    )


def keys_of(command: Command) -> dict[Argument, bytes]:
    """The keys of a command that belong to the catalog, each with the type that its value must have."""
    if command[0] == "EVALSHA":
        return dict(zip(command[3:6], _TYPES_OF_A_SCRIPT, strict=True))
    key = command[1]
    kind = _TYPES.get(str(command[0]))
    if command[0] == "EVAL" and str(command[1]) in (BEGIN_RECOUNT, END_RECOUNT):
        key, kind = command[3], b"hash"
    if kind is None:
        return {}
    name = key if isinstance(key, bytes) else str(key).encode()
    return {name: kind} if name.startswith(b"c1") else {}
