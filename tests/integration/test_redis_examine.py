"""What `kvstore doctor` sees of several Redis servers. (Rights of a narrow user: test_redis_access.py.)"""

from __future__ import annotations

import pytest

from kvstore.doctor.check import Finding, Verdict
from kvstore.doctor.redis import judge_redis
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers import redis_cluster, redis_sentinel
from kvstore.tiers.locations import parse_redis
from kvstore.tiers.redis.examine import examine_redis

pytestmark = [pytest.mark.servers, pytest.mark.full]  # six servers for each of them


async def look(url: str) -> dict[str, Finding]:
    location = parse_redis(url)
    seen = await examine_redis(location, deadline=Deadline.after(20))
    return {finding.name: finding for finding in judge_redis(location, seen)}


async def topology(url: str) -> Finding:
    found = await look(url)
    assert found["redis.rights"].verdict is found["redis.clock"].verdict is Verdict.OK
    return found["redis.topology"]


async def test_a_cluster() -> None:
    """All slots are served, every primary has its replica; a url for a single server is reported."""
    with redis_cluster() as cluster:
        assert await topology(cluster.url) == Finding(
            "redis.topology",
            Verdict.OK,
            "a cluster of 3 primaries",
            "every hash slot is served, every primary has a replica",
        )
        found = await look(f"redis://127.0.0.1:{cluster.primaries()[0].port}/0")
        for mixed_up in (found["redis.topology"], found["redis.rights"]):
            assert mixed_up.verdict is Verdict.FAILED and "redis+cluster://" in mixed_up.fix


async def test_a_cluster_without_some_slots() -> None:
    """A primary and its replica are dead: that is said of their slots, and of the others all that they report."""
    with redis_cluster() as cluster:
        lost = cluster.primary_of(0)
        for server in cluster.servers:
            if server is lost or str(lost.port).encode() in server.ask("INFO", "replication"):
                server.kill9()
        found = await look(cluster.url)
        assert found["redis.topology"].verdict is Verdict.FAILED
        assert f"127.0.0.1:{lost.port} serves hash slots: cannot connect" in found["redis.topology"].seen
        assert "CLUSTER NODES" in found["redis.topology"].fix
        assert found["redis"].verdict is found["redis.version"].verdict is found["redis.clock"].verdict is Verdict.OK


async def test_sentinels() -> None:
    """They agree; if one of them is gone, this is reported."""
    with redis_sentinel() as group:
        found = await topology(group.url)
        assert (found.verdict, found.seen) == (Verdict.OK, "3 sentinels name one primary with 2 replicas")
        group.sentinels[0].kill9()
        found = await topology(group.url)
        assert found.verdict is Verdict.WARNING
        assert f"127.0.0.1:{group.sentinels[0].port}: no answer" in found.seen
        assert "start sentinels" in found.fix
