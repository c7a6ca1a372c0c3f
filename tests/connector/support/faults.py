"""Every fault of the failure table: how it is brought about in a running stack, and how it ends."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.connector.support.stack import Stack
from tests.connector.support.stores import wait_for_engine
from tests.connector.support.traffic import Traffic

__all__ = ["FAULTS", "Fault"]

FREEZE_S = 25.0
BUSY_S = 30.0
SHORT_S = 3.0
_PATIENCE_S = 60.0
_TURNS = 3
_QUESTIONS = re.compile('"MGET" |"STRLEN" "v1/')
"""Of the catalog, and of records."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row.

    Attributes:
        name: As printed.
        place: The service that it happens to, as `Stack.prepare` takes it.
        run: Breaks, lets the traffic go on, and mends. Returns when it was mended.
        felt: A counter of the service, and its tier, that must grow by the fault; `None`: a stored prompt is computed.
        healed: One that must grow again after the fault's end, beside whole hits.
    """

    name: str
    place: str
    run: Callable[[Stack, Traffic], float]
    felt: tuple[str, str] | None = None
    healed: tuple[str, str] | None = None


def service_killed(stack: Stack, traffic: Traffic) -> float:
    stack.service.kill()
    traffic.go_on(SHORT_S)
    stack.service.start()
    return time.monotonic()


def service_frozen(stack: Stack, traffic: Traffic) -> float:
    stack.service.freeze()
    traffic.go_on(FREEZE_S)
    stack.service.thaw()
    return time.monotonic()


def service_restarted(stack: Stack, traffic: Traffic) -> float:
    stack.service.stop()
    traffic.go_on(1.0)  # a start can be so quick that no request meets it
    stack.service.start()
    return time.monotonic()


def redis_killed(stack: Stack, traffic: Traffic) -> float:
    stack.redis.kill9()
    traffic.go_on(SHORT_S)
    stack.redis.start()
    return time.monotonic()


def redis_frozen(stack: Stack, traffic: Traffic) -> float:
    stack.redis.freeze()
    traffic.go_on(FREEZE_S)
    stack.redis.thaw()
    return time.monotonic()


def redis_restarted(stack: Stack, traffic: Traffic) -> float:
    """Restart it as soon as it is asked; again where it had answered before it ended."""
    before = stack.counter("tier_errors", "redis")
    for _ in range(2 * _TURNS):
        _wait_for_command(stack.redis.port, _QUESTIONS)
        stack.redis.restart()
        mended_s = time.monotonic()
        traffic.go_on(1.0)
        if stack.counter("tier_errors", "redis") > before:
            break
    return mended_s


def redis_flushed(stack: Stack, traffic: Traffic) -> float:
    """Empty Redis between a lookup and its stage: the records go first, until a stage has missed what its lookup found
    in the catalog, and then the catalog. Memory may serve the next requests, so the records are removed repeatedly."""
    before, ends_s = stack.counter("stage_misses", "redis"), time.monotonic() + _PATIENCE_S
    with redis.Redis(port=stack.redis.port) as client:
        while stack.counter("stage_misses", "redis") == before and time.monotonic() < ends_s:
            if records := list(client.scan_iter("v1/*", count=1000)):
                client.delete(*records)
            traffic.go_on(0.3)
        client.flushall()
    traffic.go_on(SHORT_S)
    return time.monotonic()


def _wait_for_command(port: int, commands: re.Pattern[str]) -> None:
    """Return at the next use of one of these commands."""
    ends_s = time.monotonic() + _PATIENCE_S
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as watching:
        watching.sendall(b"MONITOR\r\n")
        with watching.makefile("rb") as lines:
            while not commands.search(lines.readline().decode("latin-1")):
                assert time.monotonic() < ends_s, f"Redis was not asked for {commands.pattern}"


@contextmanager
def _felt(stack: Stack, traffic: Traffic, counter: str, tier: str) -> Iterator[None]:
    """Let the traffic go on after the block until the service has counted what the block brings about."""
    before = stack.counter(counter, tier)
    yield
    ends_s = time.monotonic() + _PATIENCE_S
    while stack.counter(counter, tier) == before and time.monotonic() < ends_s:
        traffic.go_on(0.3)


def redis_full(stack: Stack, traffic: Traffic) -> float:
    with redis.Redis(port=stack.redis.port) as client, _felt(stack, traffic, "tier_full", "redis"):
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        traffic.go_on(2 * SHORT_S)
    with redis.Redis(port=stack.redis.port) as client:
        client.config_set("maxmemory", 0)
    return time.monotonic()


def s3_unreachable(stack: Stack, traffic: Traffic) -> float:
    with _felt(stack, traffic, "tier_refused", "s3"):
        stack.proxy.refuse()
        traffic.go_on(2 * SHORT_S)
    stack.proxy.heal()
    return time.monotonic()


def s3_busy(stack: Stack, traffic: Traffic) -> float:
    stack.proxy.answer_503()
    traffic.go_on(BUSY_S)
    stack.proxy.heal()
    return time.monotonic()


def s3_slow(stack: Stack, traffic: Traffic) -> float:
    with _felt(stack, traffic, "tier_refused", "s3"):
        stack.proxy.delay(5.0)
        traffic.go_on(4 * SHORT_S)
    stack.proxy.heal()
    return time.monotonic()


def disk_full(stack: Stack, traffic: Traffic) -> float:
    filler = Path(f"/proc/{stack.service.pid}/root{stack.disk}/filler")  # as the service sees it
    with _felt(stack, traffic, "write_back_dropped", "filesystem"):
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        traffic.go_on(2 * SHORT_S)
    filler.unlink()
    return time.monotonic()


def record_corrupted(stack: Stack, traffic: Traffic) -> float:
    """Flip a bit of one record of a stored prompt, in Redis and later in S3; mended when the store has noticed both."""
    traffic.focus = prompt = stack.prompts.old[0]
    name = sorted(stack.objects_of[prompt])[0]
    status, good = stack.rgw.request("GET", f"/{stack.bucket}/{name}")
    assert status == 200
    bad = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :]
    with redis.Redis(port=stack.redis.port) as client:

        def break_in_redis() -> None:
            client.set(name, bad)

        def break_in_s3() -> None:
            client.delete(name)
            assert stack.rgw.request("PUT", f"/{stack.bucket}/{name}", bad)[0] == 200

        for tier, break_it in (("redis", break_in_redis), ("s3", break_in_s3)):
            assert any(_is_noticed(stack, traffic, tier, break_it) for _ in range(_TURNS)), f"not noticed in {tier}"
    return time.monotonic()


def _is_noticed(stack: Stack, traffic: Traffic, tier: str, break_it: Callable[[], None]) -> bool:
    """Break a record behind the service's back, and let it be asked for some time.

    What stands before the tier must be empty, so the service starts anew. Meanwhile nobody asks: a prompt that was
    computed without it would be saved again, and a good record would stand before the bad one.
    """
    with traffic.paused():
        stack.service.stop()
        break_it()
        stack.service.start()
        wait_for_engine(stack.service.url)
    ends_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_s:
        traffic.go_on(0.3)
        if stack.counter("tier_quarantined", tier):
            return True
    return False


def clock_jumps(stack: Stack, traffic: Traffic) -> float:
    for offset in ("+1d", "-1d", "+0"):
        stack.set_clock(offset)
        if offset != "+0":
            traffic.go_on(SHORT_S)
    return time.monotonic()


FAULTS = (
    Fault("service SIGKILL", "shared", service_killed, None, ("served_records", "redis")),
    Fault("service SIGSTOP 25 s", "shared", service_frozen, None, ("served_records", "redis")),
    Fault("service restart", "shared", service_restarted, None, ("served_records", "redis")),
    Fault("Redis SIGKILL", "shared", redis_killed, ("tier_refused", "redis"), ("tier_put_bytes", "redis")),
    Fault("Redis SIGSTOP 25 s", "shared", redis_frozen, ("tier_refused", "redis"), ("served_records", "redis")),
    Fault("Redis restart", "shared", redis_restarted, ("tier_errors", "redis"), ("tier_put_bytes", "redis")),
    Fault(
        "Redis FLUSHALL after lookup", "shared", redis_flushed, ("stage_misses", "redis"), ("tier_put_bytes", "redis")
    ),
    Fault("Redis at maxmemory", "shared", redis_full, ("tier_full", "redis"), ("tier_put_bytes", "redis")),
    Fault("corrupt record", "shared", record_corrupted, None, None),  # it sees itself that both tiers notice
    Fault("S3 unreachable", "s3", s3_unreachable, ("tier_refused", "s3"), ("served_records", "s3")),
    Fault("S3 503 for 30 s", "s3", s3_busy, ("tier_refused", "s3"), ("served_records", "s3")),
    Fault("S3 5 s latency", "s3", s3_slow, ("tier_refused", "s3"), ("served_records", "s3")),
    Fault("store disk full", "disk", disk_full, ("write_back_dropped", "filesystem"), ("tier_put_bytes", "filesystem")),
    Fault("clock jumps by a day", "clock", clock_jumps, ("tier_errors", "s3"), ("tier_put_bytes", "s3")),
)
