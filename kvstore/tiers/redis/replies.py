"""What replies mean for us: errors are `Unavailable` with the next step, or a redirection to another node; a reply that
its command cannot have is `Unavailable` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.tiers.locations import HostPort
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.redis.slots import NUM_SLOTS

__all__ = [
    "NO_ROOM",
    "WRITE_PROBE",
    "Redirect",
    "check_form",
    "check_replies",
    "check_reply",
    "redirect_of",
    "strange_reply",
    "writes_refused",
]

_NEXT_STEP = {
    "NOAUTH": "put user and password into the url",
    "WRONGPASS": "check user and password in the url",
    "NOPERM": "give the user the commands and keys that it lacks (ACL SETUSER)",
    "LOADING": "wait until it has read its data set",
    "READONLY": "name the primary, not a replica",
    "MISCONF": "make room for its snapshots or switch them off",
    "MOVED": "this is a Redis Cluster: use redis+cluster://",
    "CLUSTERDOWN": "bring the cluster's missing nodes back",
    "MASTERDOWN": "bring its primary back",
    "IDONTKNOW": "ask again once the sentinel has seen the primary",
}


def _is_count(reply: Reply) -> bool:
    return isinstance(reply, int) and reply >= 0


def _is_value(reply: Reply) -> bool:
    return isinstance(reply, memoryview)


def _is_value_or_none(reply: Reply) -> bool:
    return reply is None or isinstance(reply, memoryview)


def _is_done(reply: Reply) -> bool:
    return reply == "OK"


def _is_scan(reply: Reply) -> bool:
    if not isinstance(reply, list) or len(reply) != 2:
        return False
    cursor, names = reply
    return isinstance(cursor, bytes) and cursor.isdigit() and isinstance(names, list)


_FORMS: Mapping[str, Callable[[Reply], bool]] = {
    **dict.fromkeys(("STRLEN", "EXISTS", "UNLINK", "DEL", "EXPIRE", "PERSIST", "EVAL"), _is_count),
    **dict.fromkeys(("GETRANGE", "INFO"), _is_value),
    **dict.fromkeys(("AUTH", "SELECT", "ASKING"), _is_done),
    "GET": _is_value_or_none,
    "PING": lambda reply: reply == "PONG",
    "ROLE": lambda reply: isinstance(reply, list),
    "SCAN": _is_scan,
    "SET": lambda reply: reply is None or reply == "OK",
}
"""By command, whether it can have a reply that is no error; a command that is not listed is judged by whoever sent it.
Our scripts return counts."""


WRITE_PROBE = ("EVAL", "#!lua\nreturn 1", 0)
"""Changes nothing and has no key, but Redis 7 treats it as a write: a server that refuses writes refuses it, as a node
of a cluster does too. Older servers know no such scripts, and refuse it with another error."""

NO_ROOM = "it has no memory left: raise maxmemory, or set maxmemory-policy volatile-lru"

_WRITES_REFUSED = {
    "OOM": NO_ROOM,
    "READONLY": "it is a replica: name the primary",
    "MISCONF": "it cannot save to its disk: make room there, or switch its snapshots off",
    "NOREPLICAS": "it has fewer replicas than it wants for a write: bring them back",
}


def writes_refused(reply: Reply) -> str:
    """Why a server takes no writes, by its reply to `WRITE_PROBE`; empty: it does, or does not tell."""
    return _WRITES_REFUSED.get(reply.code, "") if isinstance(reply, ErrorReply) else ""


def check_form(command: Command, reply: Reply, address: str) -> None:
    """Refuse a reply that no Redis gives to a command: somebody else's, or a damaged one.

    Raises:
        Unavailable: It is one.
    """
    form = _FORMS.get(str(command[0]))
    if form is not None and not isinstance(reply, ErrorReply) and not form(reply):
        raise strange_reply(str(command[0]), reply, address)


def strange_reply(verb: str, reply: object, address: str) -> Unavailable:
    """The error for a reply that its command cannot have."""
    return Unavailable(
        "what answers at the address of Redis does not answer like one: check the address, and what stands between",
        address=address,
        command=verb,
        seen=repr(bytes(reply[:40]) if isinstance(reply, memoryview) else reply)[:80],
    )


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
        raise Unavailable(f"Redis refused a command: {next_step}", address=reply.address, seen=reply.message[:200])


@dataclass(frozen=True, slots=True)
class Redirect:
    """A cluster node's answer that another node has the keys.

    Attributes:
        address: The node to ask.
        slot: The hash slot in question.
        once: Only these keys have moved so far: send `ASKING` first, and keep asking the old node for others.
    """

    address: HostPort
    slot: int
    once: bool


def redirect_of(reply: Reply, asked: HostPort) -> Redirect | None:
    """Read `MOVED <slot> <host>:<port>` and `ASK ...`; `None` for any other reply."""
    if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
        return None
    try:
        _, slot, place = reply.message.split(" ")[:3]
        host, _, port = place.rpartition(":")
        # an empty host: the node does not know its own address, and means the one that we used
        redirect = Redirect(HostPort(host.strip("[]") or asked.host, int(port)), int(slot), reply.code == "ASK")
    except ValueError:
        return None
    return redirect if 0 <= redirect.slot < NUM_SLOTS else None
