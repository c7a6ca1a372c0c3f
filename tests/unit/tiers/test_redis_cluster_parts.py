"""Pure parts of the Redis tier's topologies: hash slots, maps, redirections, what a server tells about itself."""

from __future__ import annotations

import pytest

from kvstore.errors import Unavailable
from kvstore.format.names import format_name, stripe_name
from kvstore.testing.records import make_key
from kvstore.testing.waiting import soon
from kvstore.tiers.base import Severity
from kvstore.tiers.locations import HostPort, parse_redis
from kvstore.tiers.redis.cluster import Cluster, Redirect, parse_slots, redirect_of, slot_of
from kvstore.tiers.redis.examine import concerns_of, parse_info
from kvstore.tiers.redis.resp import ErrorReply, Reply

ASKED = HostPort("10.0.0.1", 7000)


def test_hash_slots() -> None:
    """As the cluster specification gives them; an empty tag, or one that is not closed, does not count."""
    assert slot_of("123456789") == 0x31C3
    assert slot_of("foo") == 12182
    assert slot_of("{user1000}.following") == slot_of("user1000") == slot_of("a{user1000}{b}")
    assert slot_of("foo{}{bar}") != slot_of("bar")
    assert slot_of("foo{bar") != slot_of("bar")


def test_names_of_one_record_share_a_slot() -> None:
    """All names of a boundary are on one node; boundaries spread over nodes."""
    key = make_key(1)
    names = [format_name(key), stripe_name(key, bytes(16), 3), f"quarantine:{format_name(key)}"]
    names += [format_name(make_key(1, group=2, slice_=7))]
    assert len(set(map(slot_of, names))) == 1
    assert len({slot_of(format_name(make_key(number))) for number in range(100)}) > 90


def test_slot_maps() -> None:
    """Primaries by slot; a node that does not know its own address has the one that it was queried at.
    One without a host name has its own address."""
    reply: Reply = [
        [0, 99, [b"10.0.0.2", 7001, b"id", []], [b"10.0.0.9", 7009, b"id"]],
        [100, 100, [b"", 7002, b"id"]],
        [102, 102, [b"?", 7004, b"id", [b"ip", b"10.0.0.4"]]],
        [103, 103, [b"?", 7005, b"id", []]],
        [200, 16383, [None, 7003, b"id"]],
    ]
    slots = parse_slots(reply, ASKED)
    assert slots is not None
    assert (slots[0], slots[99]) == (("10.0.0.2", 7001), ("10.0.0.2", 7001))
    assert (slots[102], slots[103]) == (("10.0.0.4", 7004), ("10.0.0.1", 7005))
    assert (slots[100], slots[101], slots[16383]) == (("10.0.0.1", 7002), None, ("10.0.0.1", 7003))


@pytest.mark.parametrize(
    "reply", [[], None, "OK", [[0, 1]], [[5, 1, [b"h", 1]]], [[0, 16384, [b"h", 1]]], [[0, 1, [b"h"]]]]
)
def test_slot_maps_of_another_form(reply: Reply) -> None:
    """A node outside of any cluster, or nonsense, gives no map."""
    assert parse_slots(reply, ASKED) is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("MOVED 3999 127.0.0.1:6381", Redirect(HostPort("127.0.0.1", 6381), 3999, once=False)),
        ("ASK 3999 ::1:6381", Redirect(HostPort("::1", 6381), 3999, once=True)),
        ("MOVED 3999 :6381", Redirect(HostPort("10.0.0.1", 6381), 3999, once=False)),
        ("MOVED what", None),
        ("ERR MOVED 1 h:1", None),
    ],
)
def test_redirections(message: str, expected: Redirect | None) -> None:
    """Where a node sends us."""
    assert redirect_of(ErrorReply(message), ASKED) == expected


INFO = (
    b"# Server\r\nredis_version:7.0.15\r\n# Memory\r\nused_memory:100\r\nmaxmemory:%d\r\nmaxmemory_policy:%s\r\n"
    b"# Replication\r\nrole:master\r\nconnected_slaves:2\r\n"
)


@pytest.mark.parametrize(
    ("maxmemory", "policy", "expected"),
    [
        (8 << 30, b"volatile-lru", []),
        (8 << 30, b"noeviction", [(Severity.ADVICE, "takes no new record")]),
        (0, b"noeviction", [(Severity.ADVICE, "no memory limit")]),
        (1 << 20, b"allkeys-lfu", [(Severity.DANGER, "allkeys-lfu"), (Severity.ADVICE, "too little memory")]),
    ],
)
def test_concerns(maxmemory: int, policy: bytes, expected: list[tuple[Severity, str]]) -> None:
    """Each bad setting is named with what follows and the next step, the dangerous first; a good one is silent."""
    facts = parse_info(INFO % (maxmemory, policy), "h:1", latency_s=0.001)
    assert (facts.version, facts.num_replicas, facts.used_bytes) == ("7.0.15", 2, 100)
    concerns = concerns_of([facts])
    assert [concern.severity for concern in concerns] == [severity for severity, _ in expected]
    for concern, (_, text) in zip(concerns, expected, strict=True):
        assert text in concern.text and "address=h:1" in str(concern)
        assert "CONFIG SET" in concern.text


def test_concerns_of_an_old_and_slow_server() -> None:
    """An old version and a slow round trip are concerns."""
    info = INFO.replace(b"7.0.15", b"5.0.1") % (8 << 30, b"volatile-ttl")
    texts = [concern.text for concern in concerns_of([parse_info(info, "h:1", latency_s=0.2)])]
    assert any("upgrade to 6.2" in text for text in texts)
    assert any("200.0 ms" in text for text in texts)
    assert concerns_of([parse_info(b"", "h:1", latency_s=0.0)])  # an empty INFO is no reason to fail


async def test_a_node_that_did_not_answer_is_forgotten_when_it_has_left() -> None:
    """Where each restart gives a node another address, these would add up."""
    cluster = Cluster(parse_redis("redis+cluster://127.0.0.1:1"), num_data_connections=1)
    vars(cluster)["_silent"].update(HostPort("10.0.0.1", port) for port in range(100))
    with pytest.raises(Unavailable):
        await cluster.read_map(soon())
    assert vars(cluster)["_silent"] == {HostPort("127.0.0.1", 1)}
    await cluster.aclose()
