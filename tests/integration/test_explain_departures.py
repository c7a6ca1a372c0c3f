"""Why a request was a miss: what left by a rule, and what happened in the middle of a fetch, each for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from connector.scheduler.hook_facts import PromptFacts
from kvstore.store.retention import owner
from kvstore.testing.faulty_proxy import FaultyProxy
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.waiting import eventually
from tests.integration.explained_engine import TOKENS, Engine, directory, engine, on_redis
from tests.unit.connector.support import tokens_of

pytestmark = pytest.mark.servers

AWAY_S = 1.2
"""How far Redis is: between the catalog's answer and the first record there is time for something to happen."""


def test_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for it as long as `cold_unused_s` says: it left, and that is why."""
    monkeypatch.setattr(owner, "_FRESH_S", 1)  # what is younger than ten seconds is spared otherwise
    with engine(directory(tmp_path, cold_unused_s=1.0), tmp_path) as at:
        at.keep("prompt")
        eventually(lambda: at.num_tombstones() >= 3, seconds=15.0)
    with engine(directory(tmp_path), tmp_path) as at:  # with an empty memory
        assert at.ask("a", "prompt") == 0
        told = at.explain("a")
        assert (told["result"], told["reason"]) == ("miss", "expired")
        assert (told["detail"]["left"], told["detail"]["left_from"]) == ("expired", "cold")
        assert "time to live" in told["why"] and "pin" in told["advice"]


def test_quota(tmp_path: Path) -> None:
    """The tier has room, the tenant has not: what it stored first left for what it stored last."""
    with engine(directory(tmp_path), tmp_path) as at:
        num_bytes = sum(record.num_bytes for record in at.keep("first"))
    quotas = {"": {"maximum": 3 * num_bytes}}  # engines without a tenant are one, too
    settings = directory(tmp_path, quotas=quotas, retention_policy="lru")
    with engine(settings, tmp_path) as at:
        for number in range(6):
            at.keep(f"other {number}")
        eventually(lambda: at.num_tombstones() >= 1, seconds=15.0)
    with engine(settings, tmp_path) as at:
        assert at.ask("a", "first") < 192
        told = at.explain("a")
        assert told["reason"] == "quota"
        assert (told["detail"]["left"], told["detail"]["left_from"]) == ("quota", "cold")
        assert "quota" in told["why"] and "larger quota" in told["advice"]


@contextmanager
def far_redis(
    folder: Path, *, max_wait_ms: int = 60_000, **settings: object
) -> Iterator[tuple[Engine, RedisServer, FaultyProxy]]:
    """A fresh engine whose prompt is stored in a Redis that is some way off."""
    with redis_server() as redis, FaultyProxy(redis.port) as proxy:
        with engine(on_redis(redis), folder) as at:
            at.keep("prompt")
            at.keep("earlier")
        through = redis.url.replace(f":{redis.port}", f":{proxy.port}")
        with engine(on_redis(redis, hot=through, hot_connections=1, **settings), folder, max_wait_ms=max_wait_ms) as at:
            assert at.ask("earlier", "earlier") == 192  # its connections are open
            proxy.delay(AWAY_S)
            try:
                yield at, redis, proxy
            finally:
                redis.thaw()
                proxy.delay(0.0)


def ask_and(at: Engine, proxy: FaultyProxy, request_id: str, act: Callable[[], Any]) -> int:
    """vLLM's question about the prompt; `act` happens when its records are on their way and none has come."""
    at.side.on_new_request(PromptFacts(request_id, tokens_of("prompt", TOKENS)))

    async def waits(store: Any) -> bool:
        return any(run.waiting and not run.pins for run in store._stager._runs)

    def fetching() -> bool:
        assert at.side.matched_tokens(request_id, 0) is None, "it was answered before its records were on their way"
        return bool(at.bridge.run(waits))

    eventually(fetching, seconds=15.0)
    act()
    proxy.delay(0.0)  # for what is asked from now on
    answer = eventually(lambda: at.side.matched_tokens(request_id, 0), 15.0, holds=lambda answer: answer is not None)
    assert answer is not None
    return answer


def test_gone(tmp_path: Path) -> None:
    """Redis is emptied between the catalog's answer and the fetch, the catalog with it: nobody can say more."""
    with far_redis(tmp_path, stall_timeout_ms=60_000, fetch_timeout_ms=60_000) as (at, redis, proxy):
        assert ask_and(at, proxy, "a", redis.flush) == 0
        told = at.explain("a")
        assert (told["result"], told["reason"]) == ("miss", "gone")
        assert "no longer stored" in told["why"]


def test_gone_and_it_is_known_why(tmp_path: Path) -> None:
    """The records alone are taken from Redis: the store finds out as it fetches, and tells that they were lost."""
    with far_redis(tmp_path, stall_timeout_ms=60_000, fetch_timeout_ms=60_000) as (at, redis, proxy):

        def unlink() -> None:
            with Redis(host=redis.host, port=redis.port) as client:
                client.unlink(*client.scan_iter(match="v1/*{*"))

        assert ask_and(at, proxy, "a", unlink) == 0
        eventually(lambda: at.explain("a")["reason"] == "lost", seconds=15.0)
        assert at.explain("a")["detail"]["left_from"] == "hot"


def test_deadline_in_the_middle_of_a_fetch(tmp_path: Path) -> None:
    """Redis stands still while it sends records, for longer than the request may wait; the stall comes later."""
    slow = {"stall_timeout_ms": 60_000, "fetch_timeout_ms": 60_000}
    with far_redis(tmp_path, max_wait_ms=8000, **slow) as (at, redis, proxy):  # type: ignore[arg-type]
        assert ask_and(at, proxy, "a", redis.freeze) == 0
        told = at.explain("a")
        assert (told["result"], told["reason"]) == ("miss", "deadline")
        assert "max_wait_ms" in told["advice"]


def test_stall_in_the_middle_of_a_fetch(tmp_path: Path) -> None:
    """Redis stands still while it sends records, for longer than `stall_timeout_ms`."""
    with far_redis(tmp_path, stall_timeout_ms=4000, fetch_timeout_ms=60_000) as (at, redis, proxy):
        assert ask_and(at, proxy, "a", redis.freeze) == 0
        told = at.explain("a")
        assert (told["result"], told["reason"]) == ("miss", "stall")
        assert "stall_timeout_ms" in told["why"]
