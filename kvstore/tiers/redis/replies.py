"""Checks replies: an error, or a reply that its command cannot have, is `Unavailable` with the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.errors import Unavailable
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.refusals import Refused

_NEXT_STEP = {
    "NOAUTH": "put user and password into the url",
    "WRONGPASS": "check user and password in the url",
    "NOPERM": "give the user the commands and keys that it lacks (ACL SETUSER)",
    "LOADING": "wait until it has read its data set",
    "READONLY": "name the primary, not a replica",
    "MISCONF": "make room for its snapshots or switch them off",
    "NOREPLICAS": "bring its replicas back",
    "OOM": "raise maxmemory, or set maxmemory-policy volatile-lru",
    "MOVED": "this is a Redis Cluster: use redis+cluster://",
    "CLUSTERDOWN": "if this lasts longer than a replica needs to take over, bring the cluster's missing nodes back",
    "MASTERDOWN": "bring its primary back",
    "IDONTKNOW": "try again once the sentinel has seen the primary",
}


class SlotMoves(Unavailable):
    """A cluster refused a command on several names, because only some of them are on another node yet."""


def _is_count(reply: Reply) -> bool:
    return isinstance(reply, int) and reply >= 0


def _is_scan(reply: Reply) -> bool:
    if not isinstance(reply, list) or len(reply) != 2:
        return False
    cursor, names = reply
    return isinstance(cursor, bytes) and cursor.isdigit() and isinstance(names, list)


_FORMS: Mapping[str, Callable[[Reply], bool]] = {
    **dict.fromkeys(("STRLEN", "EXISTS", "UNLINK", "DEL", "EXPIRE", "PERSIST", "EVAL"), _is_count),
    **dict.fromkeys(("GETRANGE", "INFO"), lambda reply: isinstance(reply, memoryview)),
    **dict.fromkeys(("AUTH", "SELECT", "ASKING"), lambda reply: reply == "OK"),
    "GET": lambda reply: reply is None or isinstance(reply, memoryview),
    "PING": lambda reply: reply == "PONG",
    "ROLE": lambda reply: isinstance(reply, list),
    "SCAN": _is_scan,
    "SET": lambda reply: reply is None or reply == "OK",
}
"""By command, whether it can have a reply that is no error. The callers of other commands check their replies. Our
scripts return counts."""


WRITE_PROBE = ("EVAL", "#!lua\nreturn 1", 0)
"""Changes nothing and has no key, but Redis 7 treats it as a write: a server that refuses writes refuses it, also as a
node of a cluster. Older servers do not support such scripts, and refuse it with another error."""

NO_ROOM = "it has no memory left: raise maxmemory, or set maxmemory-policy volatile-lru"

_WRITES_REFUSED = {
    "OOM": NO_ROOM,
    "READONLY": "it is a replica: name the primary",
    "MISCONF": "it cannot save to its disk: make room there, or switch its snapshots off",
    "NOREPLICAS": "it has fewer replicas than it wants for a write: bring them back",
}
_REFUSED = frozenset(("NOPERM", *_WRITES_REFUSED))
"""Codes with which a server that answers refuses some kinds of commands."""


def writes_refused(reply: Reply) -> str:
    """Why a server refuses writes, by its reply to `WRITE_PROBE`; empty: it accepts them, or this is unknown."""
    return _WRITES_REFUSED.get(reply.code, "") if isinstance(reply, ErrorReply) else ""


def check_form(command: Command, reply: Reply, address: str) -> None:
    """Raise `Unavailable` for a reply that no Redis gives to a command: another server's, or a damaged one."""
    form = _FORMS.get(str(command[0]))
    if form is not None and not isinstance(reply, ErrorReply) and not form(reply):
        raise strange_reply(str(command[0]), reply, address)


def strange_reply(verb: str, reply: object, address: str) -> Unavailable:
    """The error for a reply that its command cannot have."""
    return Unavailable(
        "the server at the address of Redis does not reply like a Redis: check the address, and proxies on the way",
        address=address,
        command=verb,
        seen=repr(bytes(reply[:40]) if isinstance(reply, memoryview) else reply)[:80],
    )


def is_no_room(reply: Reply) -> bool:
    """Whether the server had no memory for what was written. Servers before Redis 7 say so for a command of a script in
    the middle of a longer error."""
    return isinstance(reply, ErrorReply) and (reply.code == "OOM" or "OOM command not allowed" in reply.message)


def is_wrong_type(reply: Reply) -> bool:
    """Whether the name has a value that is not a string."""
    return isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE"


def check_replies(replies: Sequence[Reply]) -> None:
    """Raise `Unavailable` for the first error among replies."""
    for reply in replies:
        check_reply(reply)


def check_reply(reply: Reply) -> None:
    """Raise `Unavailable` with the next step when a reply is an error."""
    if isinstance(reply, ErrorReply):
        next_step = _NEXT_STEP.get(reply.code, "see its message")
        if "cluster support disabled" in reply.message:
            next_step = "this is no cluster: use redis://"
        kind = Refused if reply.code in _REFUSED else Unavailable
        raise kind(f"Redis refused a command: {next_step}", address=reply.address, seen=reply.message[:200])
