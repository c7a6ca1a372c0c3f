"""What error replies mean for us: `Unavailable` with the next step, or a redirection to another node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.tiers.locations_redis import HostPort
from kvstore.tiers.redis.resp import ErrorReply, Reply

__all__ = ["Redirect", "check_replies", "check_reply", "redirect_of"]

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
        return Redirect(HostPort(host.strip("[]") or asked.host, int(port)), int(slot), reply.code == "ASK")
    except ValueError:
        return None
