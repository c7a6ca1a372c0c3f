"""A scheduler side on a real store, driven as vLLM's scheduler drives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connector.identity import describe_namespace
from connector.jobs import RankReport, StepJobs
from connector.scheduler.hook_facts import PromptFacts, StateOffer, StepFacts
from connector.scheduler.requests import RequestState
from connector.scheduler.side import SchedulerSide
from connector.settings import ConnectorSettings
from kvstore.format.record import Record
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import eventually, soon
from tests.unit.connector.support import (
    BLOCK,
    WEIGHTS,
    LoopBridge,
    bridge_to_memory,
    make_facts,
    make_shape,
    records_of,
    tokens_of,
)

BLOCK_BYTES = make_facts().groups[0].rank_block_bytes
"""What one block of all slices takes in a rank's host memory."""


class SchedulerHarness:
    """One engine's scheduler side.

    Attributes:
        bridge: The store's thread.
        side: What is tested.
    """

    def __init__(
        self,
        bridge: LoopBridge,
        folder: Path,
        facts: dict[str, Any],
        settings: dict[str, Any],
        refusals: dict[int, str | None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.bridge = bridge
        self.facts = make_facts(**facts)
        self.shape = make_shape(self.facts)
        values = {"weights_id": WEIGHTS, "lookup_timeout_ms": 5000, **settings}
        self.side = SchedulerSide(
            ConnectorSettings(**values),
            self.facts,
            self.shape,
            bridge,
            cache_folder=folder,
            rank_refusals=refusals or {},
            clock=clock,
        )

    @property
    def store(self) -> SteeredStore:
        return self.bridge.store

    def become_ready(self) -> None:
        eventually(lambda: self.side.is_ready)

    def keep(self, name: str, count: int, ends: list[int] | None = None) -> list[Record]:
        """Store the pages and the tail of a prompt."""
        records = records_of(tokens_of(name, count), self.facts, self.shape, ends=ends)

        async def save(store: SteeredStore) -> None:
            await store.inner.open_namespace(describe_namespace(self.facts, self.shape, WEIGHTS), deadline=soon())
            for record in records:
                await store.inner.save(record, deadline=soon())

        self.bridge.run(save)
        return records

    def new(self, request_id: str, count: int, name: str | None = None, **changes: Any) -> RequestState:
        self.side.on_new_request(PromptFacts(request_id, tokens_of(name or request_id, count), **changes))
        return self.state(request_id)

    def state(self, request_id: str) -> RequestState:
        state = self.side.requests.get(request_id)
        assert state is not None
        return state

    def ask(self, request_id: str, local_tokens: int = 0) -> int:
        """Ask as often as it takes, as vLLM does on every step."""
        answer = eventually(
            lambda: self.side.matched_tokens(request_id, local_tokens), holds=lambda answer: answer is not None
        )
        assert answer is not None
        return answer

    def ask_until_staged(self, request_id: str) -> None:
        """Ask until records are being staged for the request."""

        def staging() -> bool:
            assert self.side.matched_tokens(request_id, 0) is None
            return self.state(request_id).fetch is not None

        eventually(staging)

    def step(
        self,
        final: dict[str, int] | None = None,
        preempted: tuple[str, ...] = (),
        offers: dict[str, list[StateOffer]] | None = None,
    ) -> StepJobs:
        """One step; each request's block `i` has the id `100 + i`."""
        tables = {request_id: [tuple(range(100, 164))] for request_id in final or {}}
        return self.side.plan_step(StepFacts(final or {}, tables, offers or {}, preempted))

    def admit(self, request_id: str, external_tokens: int, local_tokens: int = 0) -> StepJobs:
        """vLLM allocates blocks `1..` for the request and makes a step."""
        count = (local_tokens + external_tokens) // BLOCK
        self.side.on_allocated(request_id, [list(range(1, count + 3))], external_tokens)
        return self.step()

    def finished(self, request_id: str, *, failed: bool = False) -> None:
        """All ranks report the load."""
        self.side.on_loads_finished({request_id}, {request_id} if failed else set())

    def ranks_done(self, *job_ids: int, failed: tuple[int, ...] = ()) -> None:
        self.side.on_rank_report(RankReport(dict.fromkeys(job_ids, 1), set(failed)))

    def hashed(self, *request_ids: str) -> None:
        """Wait until prompts are hashed and looked up."""
        for request_id in request_ids:
            state = self.state(request_id)
            eventually(lambda state=state: state.is_hashed and (state.lookup is None or state.lookup.done()))

    def no_leases(self) -> None:
        eventually(lambda: self.store.num_leases == 0)


@contextmanager
def harness(
    folder: Path, facts: dict[str, Any] | None = None, clock: Clock = SYSTEM_CLOCK, **settings: Any
) -> Iterator[SchedulerHarness]:
    """A scheduler side that is ready; it is shut down at the end and must not leave a lease."""
    with bridge_to_memory() as bridge:
        made = SchedulerHarness(bridge, folder, facts or {}, settings, clock=clock)
        made.become_ready()
        yield made
        made.store.held.clear()
        for state in list(made.side.requests.values()):
            made.side.on_finished(state.request_id)
        for request_id in list(made.side._ended_while_loading):
            made.finished(request_id)
        made.side.shutdown()
        made.no_leases()


@contextmanager
def unready_harness(
    folder: Path, refusals: dict[int, str | None] | None = None, **settings: Any
) -> Iterator[SchedulerHarness]:
    """A scheduler side whose service does not answer `open_namespace` yet; its ranks may have refused their caches."""
    with bridge_to_memory() as bridge:
        bridge.store.held.add("open_namespace")
        made = SchedulerHarness(bridge, folder, {}, settings, refusals)
        yield made
        made.side.shutdown()
