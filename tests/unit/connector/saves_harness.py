"""Saves of a scheduler side, without a store: what is planned, in which steps, and what is pinned for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from connector.facts import GroupFacts
from connector.identity import CacheShape, read_shape
from connector.jobs import RankReport, SaveJob
from connector.losses import LossReporter
from connector.prefix_hash import PrefixChain
from connector.scheduler.hook_facts import StateOffer
from connector.scheduler.requests import RequestState
from connector.scheduler.save_jobs import SaveJobs
from connector.scheduler.saves import RunningRequest, Saves
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.runtime.instruments import Instruments
from tests.unit.connector.support import make_facts, tokens_of
from tests.virtual_time import ManualClock

NAMESPACE = NamespaceId(bytes(16))


def shape_of(*groups: GroupFacts) -> CacheShape:
    shape = read_shape(make_facts(groups=groups))
    assert isinstance(shape, CacheShape)
    return shape


class Pins:
    """Counts pins; a block must not be unpinned more often than pinned."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def pin(self, block_ids: Sequence[int]) -> None:
        self.held += block_ids

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.held.remove(block_id)


class KeptLosses(LossReporter):
    """Keeps the reports."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, int, int, str]] = []
        self.num_records = 0

    def report(  # type: ignore[override]
        self, *, request_id: str, boundary: Boundary, group: int, reason: str, records: int, **_: object
    ) -> None:
        self.reported.append((request_id, boundary.tokens, group, reason))
        self.num_records += records


class SavesHarness:
    """Saves of one request, whose tokens grow as a test says."""

    def __init__(self, *groups: GroupFacts, prompt: int, limit_bytes: int = 1 << 20, num_blocks: int = 100) -> None:
        self.shape = shape_of(*groups)
        self.pins, self.clock = Pins(), ManualClock()
        instruments = Instruments(self.clock)
        self.meters = instruments.meters
        self.requests: dict[str, RequestState] = {}
        self.losses = KeptLosses()
        self.jobs = SaveJobs(
            self.shape,
            num_ranks=1,
            limit_bytes=limit_bytes,
            num_blocks=num_blocks,
            requests=self.requests,
            losses=self.losses,
            instruments=instruments,
        )
        self.jobs.pins = self.pins
        self.saves = Saves(self.shape, self.jobs, self.meters)
        self.tokens = list(tokens_of("a", 2000))
        self.state = self.open("a", prompt)

    def open(self, name: str, prompt: int) -> RequestState:
        """A request whose prompt is hashed."""
        chain = PrefixChain(self.shape.boundary_tokens, name)
        state = RequestState(name, tuple(self.tokens[:prompt]), chain, self.tokens[:prompt])
        chain.extend(state.prompt)
        state.hashed = Future()
        state.hashed.set_result(None)
        self.requests[name] = state
        return state

    def running(
        self, state: RequestState, final: int, *tables: Sequence[int], offers: Sequence[StateOffer] = ()
    ) -> RunningRequest:
        return RunningRequest(state, NAMESPACE, final, lambda: tables, offers)

    def step(
        self, final: int, *tables: Sequence[int], offers: Sequence[StateOffer] = (), known: int | None = None
    ) -> list[SaveJob]:
        self.state.tokens = self.tokens[: known or max(final, len(self.state.tokens))]
        return self.saves.plan_step([self.running(self.state, final, *tables, offers=offers)])

    def done(self, jobs: Sequence[SaveJob], failed: Sequence[SaveJob] = ()) -> None:
        self.jobs.on_rank_report(RankReport({job.job_id: 1 for job in jobs}, {job.job_id for job in failed}))
