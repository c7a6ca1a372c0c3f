"""The scheduler side of the connector: one object in the engine's core process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.facts import EngineFacts
from connector.identity import CacheShape, describe_namespace
from connector.jobs import LoadJob, RankReport, SaveJob, StepJobs
from connector.prefix_hash import PrefixChain
from connector.scheduler.bridge import Bridge
from connector.scheduler.ledger import Ledger, RequestState
from connector.scheduler.load_plan import plan_load
from connector.scheduler.lookups import Lookups
from connector.scheduler.save_plan import final_pages
from connector.settings import ConnectorSettings
from connector.weights import digest_weights, find_weight_files
from kvstore.api import Deadline, PageStore
from kvstore.errors import Closed, InternalError, InvalidRequest, KVStoreError, Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.runtime.meters import Meters

__all__ = ["PromptFacts", "SchedulerSide", "StepFacts"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_OPEN_RETRY_S = 0.5
_EMPTY_STEP_S = 0.005


@dataclass(slots=True)
class _Saving:
    """A save job in flight: what it holds on each rank, and how many ranks still hold it."""

    request_id: str
    num_bytes: int
    busy_ranks: int


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What of a request decides whether and as what it is cached.

    Attributes:
        request_id: vLLM's.
        tokens: The prompt.
        cache_salt: vLLM's isolation salt, or `None`.
        uncacheable: Why its pages depend on more than tokens and salt, or `None`.
    """

    request_id: str
    tokens: tuple[int, ...]
    cache_salt: str | None = None
    uncacheable: str | None = None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine computes in one step.

    Attributes:
        final_tokens: By request, tokens whose cache content is final after this step's forward.
        tables: By request, for each group its block ids now.
        preempted: Requests that lost their blocks.
    """

    final_tokens: Mapping[str, int]
    tables: Mapping[str, Sequence[Sequence[int]]]
    preempted: Sequence[str] = ()


class SchedulerSide:
    """Answers vLLM's scheduler from memory; everything slow runs on the store's thread.

    Until the weights are digested, the namespace is open and every rank has proven its layout there are neither hits
    nor saves.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineFacts,
        shape: CacheShape,
        bridge: Bridge,
        *,
        rank_page_bytes: int,
        cache_folder: Path,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._shape = shape
        self._bridge = bridge
        self.meters = Meters()
        self.ledger = Ledger()
        self._lookups = Lookups(bridge, settings, step_tokens=facts.scheduler_block_tokens, meters=self.meters)
        self._all_groups = (1 << len(shape.layout.groups)) - 1
        self._block_bytes = rank_page_bytes // max(1, shape.layout.page_tokens // shape.block_tokens)
        self._save_limit_bytes = settings.pinned_bytes // 2
        self._saving: dict[int, _Saving] = {}  # by job id
        self._next_job_id = 0
        self._loads: list[LoadJob] = []
        self._orphans: dict[str, RequestState] = {}  # ended while the ranks still load for them
        self._namespace: NamespaceId | None = None
        self._refused: str | None = None
        self._ranks_proven = False
        self._patient = True
        self._opening: Future[None] = bridge.submit(lambda store: self._open(store, cache_folder))

    # ---- start-up

    async def _open(self, store: PageStore, cache_folder: Path) -> None:
        try:
            await self._find_namespace(store, cache_folder)
        except Closed:
            return  # the engine ends
        except KVStoreError as error:
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001 - a background task's top: an engine without a cache must say why
            _log.exception("kvstore: the namespace could not be opened")
            self._refuse(f"{type(error).__name__}: {error}")

    async def _find_namespace(self, store: PageStore, cache_folder: Path) -> None:
        try:
            weights_id = self._settings.weights_id
            if weights_id is None:
                weights_id = await asyncio.get_running_loop().run_in_executor(
                    None, lambda: digest_weights(find_weight_files(self._facts.model_path), cache_folder)
                )
            description = describe_namespace(self._facts, self._shape, weights_id)
        except (InvalidRequest, OSError) as error:
            raise InvalidRequest(f"the weights have no id: {error}") from error
        while self._namespace is None:
            try:
                self._namespace = await store.open_namespace(description, deadline=Deadline.after(5.0))
            except Unavailable:
                await asyncio.sleep(_OPEN_RETRY_S)  # the client says what is wrong, once, and keeps connecting
            except InvalidRequest as error:
                raise InvalidRequest(f"the service refuses the namespace: {error}") from error
        layout = self._shape.layout
        _log.info(
            "kvstore: caching in namespace %s: pages of %d tokens in %d slices, service %s",
            self._namespace.hex(),
            layout.page_tokens,
            sum(group.num_slices for group in layout.groups),
            self._settings.url,
        )

    def _refuse(self, reason: str) -> None:
        if self._refused is None:
            self._refused = reason
            _log.warning("kvstore: this engine is not cached: %s", reason)

    def set_rank_proofs(self, refusals: Mapping[int, str | None], expected_ranks: int) -> None:
        """Every rank's verdict on its own cache tensors; one refusal leaves the engine uncached."""
        for rank, refusal in refusals.items():
            if refusal is not None:
                self._refuse(f"rank {rank}: {refusal}")
        self._ranks_proven = len(refusals) == expected_ranks and self._refused is None

    def wait_in_empty_step(self) -> None:
        """Let others run, for 5 ms or until an answer comes, in a step that computes nothing while requests ask.

        vLLM steps on while a request waits, and a step without work is an exchange of messages between spinning
        processes: on few cores it keeps the very threads and the service from running that the request waits for.
        """
        if any(state.is_asking for state in self.ledger):
            self._lookups.answered.wait(_EMPTY_STEP_S)
        self._lookups.answered.clear()

    @property
    def is_ready(self) -> bool:
        return self._namespace is not None and self._ranks_proven and self._refused is None

    # ---- requests

    def on_new_request(self, prompt: PromptFacts) -> None:
        chain = None
        if prompt.uncacheable is None:
            chain = PrefixChain(self._shape.block_tokens, prompt.cache_salt)
        else:
            self.meters.add("connector_uncacheable_requests", reason=prompt.uncacheable)
        state = RequestState(prompt.request_id, prompt.tokens, chain)
        self.ledger.open(state)
        if chain is not None and self.is_ready and len(prompt.tokens) >= self._shape.block_tokens:
            assert self._namespace is not None
            self._lookups.start(state, self._namespace)

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        """vLLM's question: tokens beyond its own hit that can be loaded; `None`: ask again."""
        state = self.ledger.find(request_id)
        if state is None or not self._settings.loads or state.loading is not None or self._refused is not None:
            return 0
        if not self.is_ready:
            if state.chain is None:
                return 0
            # an engine's first request often comes while the namespace is being opened: as patient as for a lookup,
            # but only with requests that come with it; later ones must not be slowed by a service that is not there
            waiting = self._lookups.may_wait(state)
            self._patient = self._patient and waiting
            return None if waiting and self._patient else 0
        assert self._namespace is not None
        return self._lookups.hit(state, self._namespace, local_tokens)

    def on_allocated(self, request_id: str, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM allocated blocks; load into them when it took the hit."""
        state = self.ledger.find(request_id)
        if state is None:
            return
        if external_tokens == 0:
            self._lookups.drop_fetch(state)
            return
        staged, local_tokens = self._lookups.admitted(state)
        resume_tokens = local_tokens + external_tokens
        try:
            if resume_tokens > staged.resume_tokens:
                raise InternalError("vLLM took more than was promised", seen=resume_tokens, of=staged.resume_tokens)
            pieces = plan_load(
                staged,
                tables,
                local_tokens=local_tokens,
                resume_tokens=resume_tokens,
                block_tokens=self._shape.block_tokens,
            )
        except InternalError:
            _log.exception("kvstore: a load could not be planned and is recomputed")
            pieces = None
        assert staged.lease is not None
        self._loads.append(LoadJob(request_id, staged.lease, pieces))
        self.meters.add("connector_hits")
        self.meters.add("connector_external_tokens", external_tokens)
        for tier, count in staged.sources.items():
            self.meters.add("connector_records_staged", count, tier=tier)

    def on_loads_finished(self, finished: set[str], failed: set[str]) -> None:
        """The ranks reported loads; a failed one is never asked for again."""
        for request_id in finished:
            state = self.ledger.find(request_id) or self._orphans.pop(request_id, None)
            if state is None:
                continue
            self._lookups.loaded(state)
            if request_id in failed:
                state.closed = state.load_failed = True
                self.meters.add("connector_failed_loads")

    def on_finished(self, request_id: str) -> None:
        state = self.ledger.close(request_id)
        if state is None:
            return
        if state.loading is not None:
            self._orphans[request_id] = state
        self._lookups.forget(state)

    # ---- steps

    def plan_step(self, step: StepFacts) -> StepJobs:
        """The jobs of one step, from what the engine computes in it."""
        for request_id in step.preempted:
            if (state := self.ledger.find(request_id)) is not None:
                state.closed, state.asked_s, state.lookup = state.load_failed, None, None
        saves: list[SaveJob] = []
        first_job_id = self._next_job_id
        try:
            if self._settings.saves and self.is_ready:
                for request_id, final_tokens in step.final_tokens.items():
                    state = self.ledger.find(request_id)
                    if state is not None:
                        saves.extend(self._plan_saves(state, final_tokens, step.tables[request_id]))
        except BaseException:
            for job_id in range(first_job_id, self._next_job_id):
                self._saving.pop(job_id, None)  # never sent: no rank will give its bytes back
            raise
        # last, so that an error above cannot lose a load that vLLM waits for
        loads, self._loads = tuple(self._loads), []
        return StepJobs(loads, tuple(saves), computes=bool(step.final_tokens))

    def _plan_saves(self, state: RequestState, final_tokens: int, tables: Sequence[Sequence[int]]) -> list[SaveJob]:
        if state.chain is None or state.save_stopped or len(state.prompt) < self._shape.block_tokens:
            return []
        assert self._namespace is not None
        if state.hashed is None:  # the request came before the namespace was open
            self._lookups.start(state, self._namespace)
        if not state.is_hashed:
            return []
        state.learn_presence()
        pages, cursor = final_pages(
            saved_tokens=state.saved_tokens,
            final_tokens=final_tokens,
            prompt_tokens=len(state.prompt),
            page_tokens=self._shape.layout.page_tokens,
            block_tokens=self._shape.block_tokens,
            present=state.present,
            wanted_groups=self._all_groups,
        )
        jobs = []
        for page in pages:
            first, last = page.start_tokens // self._shape.block_tokens, page.stop_tokens // self._shape.block_tokens
            num_bytes = (last - first) * self._block_bytes
            if not self._grant(num_bytes):
                # the ranks have no room: the blocks are still held, so the next step tries again
                cursor = page.start_tokens
                break
            boundary = state.chain.boundaries[page.boundary_index]
            assert boundary.tokens == page.stop_tokens
            jobs.append(
                SaveJob(
                    job_id=self._next_job_id,
                    namespace=self._namespace,
                    prefix=boundary.prefix,
                    group=0,
                    start_tokens=page.start_tokens,
                    stop_tokens=page.stop_tokens,
                    block_ids=tuple(tables[0][first:last]),
                )
            )
            self._saving[self._next_job_id] = _Saving(state.request_id, num_bytes, self._facts.tp_size)
            self._next_job_id += 1
        state.saved_tokens = max(state.saved_tokens, cursor)
        return jobs

    def _grant(self, num_bytes: int) -> bool:
        in_flight = sum(saving.num_bytes for saving in self._saving.values())
        if in_flight and in_flight + num_bytes > self._save_limit_bytes:
            self.meters.add("connector_saves_delayed")
            return False
        return True

    def on_rank_report(self, report: RankReport) -> None:
        """Save buffers that ranks gave back."""
        for job_id in report.saves_failed:
            saving = self._saving.get(job_id)
            if saving is not None and (state := self.ledger.find(saving.request_id)) is not None:
                state.save_stopped = True
        for job_id, ranks in report.saves_done.items():
            saving = self._saving.get(job_id)
            if saving is None:
                continue
            saving.busy_ranks -= ranks
            if saving.busy_ranks <= 0:
                del self._saving[job_id]

    def status(self) -> dict[str, Any]:
        """Plain values for people and tests."""
        return {
            "ready": self.is_ready,
            "refused": self._refused,
            "namespace": self._namespace.hex() if self._namespace else None,
            "requests": len(self.ledger),
            "saves_in_flight": len(self._saving),
            **self.meters.snapshot(),
        }

    def shutdown(self) -> None:
        """End every lease and stop asking. Idempotent."""
        self._opening.cancel()
        for state in self.ledger:
            self._lookups.forget(state)
            self.ledger.close(state.request_id)
