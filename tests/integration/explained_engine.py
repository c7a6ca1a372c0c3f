"""A scheduler side on a store of its own, over a directory or Redis, whose requests are explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from connector.identity import describe_namespace
from connector.scheduler.hook_facts import PromptFacts
from connector.scheduler.side import SchedulerSide
from connector.settings import ConnectorSettings
from kvstore.compose import open_store
from kvstore.errors import InvalidRequest
from kvstore.format.record import Record
from kvstore.settings import Settings, load_settings
from kvstore.testing.servers import RedisServer
from kvstore.testing.waiting import eventually, soon
from tests.unit.connector.support import WEIGHTS, LoopBridge, make_facts, make_shape, records_of, tokens_of

__all__ = ["TOKENS", "Engine", "directory", "engine", "on_redis"]

TOKENS = 200
"""Three pages of 64 and what is left, of which 192 can be resumed."""


class StoreBridge(LoopBridge):
    """The loop thread of an engine whose store runs on it, as the settings say."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        super().__init__()

    async def _make(self) -> Any:
        return await self._stack.enter_async_context(open_store(self._settings))

    def close(self) -> None:
        self._call(self._stack.aclose)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Engine:
    """A scheduler side on a store of its own."""

    def __init__(self, settings: Settings, folder: Path, *, max_wait_ms: int = 3000, **facts: Any) -> None:
        self.bridge = StoreBridge(settings)
        self.facts = make_facts(**facts)
        self.shape = make_shape(self.facts)
        chosen = ConnectorSettings(weights_id=WEIGHTS, lookup_timeout_ms=3000, max_wait_ms=max_wait_ms)
        self.side = SchedulerSide(chosen, self.facts, self.shape, self.bridge, cache_folder=folder, rank_refusals={})
        eventually(lambda: self.side.is_ready)

    def keep(self, name: str, ends: list[int] | None = None) -> list[Record]:
        """Store a prompt's pages, down to the cold tier where there is one."""
        records = records_of(tokens_of(name, TOKENS), self.facts, self.shape, ends=ends)

        async def save(store: Any) -> None:
            await store.open_namespace(describe_namespace(self.facts, self.shape, WEIGHTS), deadline=soon())
            for record in records:
                await store.save(record, deadline=soon())
            assert await store.drain(soon()) == 0
            if store.recorder is not None:
                await store.recorder.drain(soon())

        self.bridge.run(save)
        return records

    def ask(self, request_id: str, name: str, **prompt: Any) -> int:
        """vLLM's question, as often as it takes; loads what is found."""
        self.side.on_new_request(PromptFacts(request_id, tokens_of(name, TOKENS), **prompt))
        answer = eventually(lambda: self.side.matched_tokens(request_id, 0), holds=lambda answer: answer is not None)
        assert answer is not None
        if answer:
            self.side.on_allocated(request_id, [list(range(1, 64))], answer)
            self.side.on_loads_finished({request_id}, set())
        return answer

    def explain(self, request_id: str) -> Mapping[str, Any]:
        told: Mapping[str, Any] = eventually(
            lambda: self.bridge.run(lambda store: store.explain(request_id, deadline=soon(), tenant=None)),
            despite=InvalidRequest,
        )
        return told

    def listed(self) -> dict[str, str]:
        """By request, the reason in the list of the latest ones."""
        told = self.bridge.run(lambda store: store.explain("", deadline=soon(), tenant=None))
        return {one["request"]: one["reason"] for one in told["requests"]}

    def num_tombstones(self) -> int:
        return len(self.bridge.run(lambda store: store.recorder.catalog.tombstones(limit=9, deadline=soon())))

    def close(self) -> None:
        for state in list(self.side.requests.values()):
            self.side.on_finished(state.request_id)
        self.side.shutdown()
        self.bridge.close()


@contextmanager
def engine(settings: Settings, folder: Path, **facts: Any) -> Iterator[Engine]:
    made = Engine(settings, folder, **facts)
    try:
        yield made
    finally:
        made.close()


def directory(folder: Path, **more: object) -> Settings:
    own = {"hot": "memory:", "cold": f"file://{folder}/records", "memory_bytes": "32MiB", "disk_bytes": "64MiB"}
    return load_settings({**own, **more})


def on_redis(server: RedisServer, **more: object) -> Settings:
    own = {"hot": server.url, "cold": "memory:", "memory_bytes": "32MiB", "catalog_look_s": 600.0}
    return load_settings({**own, **more})
