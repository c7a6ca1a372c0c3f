"""The scheduler side of the connector: one object in the engine's core process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from connector.bridge import Bridge, post
from connector.canonical.attention import may_lose_blocks
from connector.facts import EngineFacts
from connector.identity import CacheShape
from connector.jobs import LoadJob, RankReport, StepJobs
from connector.logs import LOG
from connector.losses import LossReason, LossReporter
from connector.memory_budget import host_memory_budget, page_bytes
from connector.prefix_hash import PrefixChain
from connector.scheduler.audits import Audits
from connector.scheduler.cache_events import CacheEvents
from connector.scheduler.costs import Costs
from connector.scheduler.hits import Hits
from connector.scheduler.hook_facts import PromptFacts, StepFacts
from connector.scheduler.namespace import EngineNamespace
from connector.scheduler.plans import plan_load
from connector.scheduler.requests import RequestState
from connector.scheduler.save_jobs import BlockPins, SaveJobs, Watchdog
from connector.scheduler.saves import RunningRequest, Saves
from connector.scheduler.stopwatch import Stopwatch
from connector.settings import ConnectorSettings
from connector.weights import Adapters
from kvstore.api import PageStore
from kvstore.errors import InternalError
from kvstore.model.keys import NamespaceId
from kvstore.model.prompt_hint import EndedPrompt, ends_of_pages
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.instruments import Instruments

_EMPTY_STEP_S = 0.005


class SchedulerSide:
    """Answers vLLM's scheduler from memory; everything slow runs on the store's thread.

    Until the weights are digested and the namespace is open there are neither hits nor saves.

    Args:
        facts: The engine, as its first rank reports it.
        rank_refusals: By rank why its cache tensors cannot be cached; one refusal leaves the engine uncached.

    Attributes:
        requests: The requests that vLLM has announced and not ended, by id.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineFacts,
        shape: CacheShape,
        bridge: Bridge,
        *,
        cache_folder: Path,
        rank_refusals: Mapping[int, str | None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        instruments = Instruments(clock)
        self._settings = settings
        self._shape = shape
        self._bridge = bridge
        self.meters = instruments.meters
        self.requests: dict[str, RequestState] = {}
        self._loads: list[LoadJob] = []
        self._ended_while_loading: dict[str, RequestState] = {}
        self._may_wait_for_namespace = True
        self._steps_together = facts.steps_together
        self.costs = Costs()
        self._stopwatch = Stopwatch(self.costs, self._prompt_tokens_of, clock)
        self._audits = Audits(settings.audit_rate, shape, facts=facts, meters=self.meters)
        self.hits = Hits(
            bridge,
            settings,
            facts,
            shape,
            costs=self.costs,
            adapters=Adapters(cache_folder, facts.adapter_rules, self.meters),
            audits=self._audits,
            instruments=instruments,
        )
        self.budget = host_memory_budget(settings, facts, shape)
        self._losses = LossReporter(bridge, self.meters)
        self.save_jobs = SaveJobs(
            shape,
            num_ranks=facts.num_ranks,
            limit_bytes=self.budget.in_flight_bytes,
            num_blocks=facts.num_blocks,
            requests=self.requests,
            losses=self._losses,
            instruments=instruments,
        )
        self.saves = Saves(shape, self.save_jobs, self.meters)
        self._watchdog = Watchdog(self.save_jobs, clock)
        # vLLM offers a state in the step that writes it, and frees a window's blocks after a few steps
        self._saves_at_once = any(group.is_state or may_lose_blocks(group.facts.kind) for group in shape.groups)
        if settings.saves:
            LOG.info("kvstore: %s", self.budget.text)
        self.namespace = EngineNamespace(
            settings,
            facts,
            shape,
            bridge,
            cache_folder=cache_folder,
            rank_refusals=rank_refusals,
            on_open=self._report_what_never_fits,
            clock=clock,
        )

    def _prompt_tokens_of(self, request_id: str) -> int:
        state = self.requests.get(request_id)
        return len(state.prompt) if state is not None else 0

    def _report_what_never_fits(self, namespace: NamespaceId) -> None:
        """Report the records that are too large for the host memory budget. Called on the store's thread."""
        if not self._settings.saves:
            return
        for index, group in enumerate(self._shape.groups):
            needs_bytes = 2 * page_bytes(self._shape, group)
            if needs_bytes > self.budget.pinned_bytes:
                self._losses.report_too_large(
                    namespace=namespace, group=index, pinned_bytes=self.budget.pinned_bytes, needs_bytes=needs_bytes
                )

    @property
    def is_ready(self) -> bool:
        return self.namespace.id is not None

    def bind_pins(self, pins: BlockPins) -> None:
        """Set vLLM's block pool: from now on pages of requests that have ended can be saved."""
        self.save_jobs.pins = pins

    def publish_events(self, events: CacheEvents) -> None:
        """Publish cache events of saves from now on."""
        self.save_jobs.cache_events = events

    # ---- requests

    def on_new_request(self, prompt: PromptFacts) -> None:
        for what, wanted in (("load", prompt.flags.load), ("save", prompt.flags.save)):
            if not wanted:
                self.meters.add("connector_requests_opted_out", of=what)
        chain = None
        if prompt.uncacheable is not None:
            self.meters.add("connector_uncacheable_requests", reason=prompt.uncacheable)
        elif prompt.flags.load or prompt.flags.save:
            chain = PrefixChain(self._shape.boundary_tokens, prompt.cache_salt, prompt.content)
        state = RequestState(
            prompt.request_id,
            tuple(prompt.tokens),
            chain,
            prompt.tokens,
            prompt.flags,
            uncacheable=prompt.uncacheable,
            handoff=prompt.handoff,
            trace=prompt.trace,
            adapter=chain.adapter if chain is not None else None,
        )
        self.requests[state.request_id] = state
        namespace = self.namespace.id
        # a short one is hashed for what it generates: a state that is computed before that could not be saved
        is_hashed_now = len(state.prompt) >= self._shape.boundary_tokens or self._saves_at_once
        if chain is not None and namespace is not None and is_hashed_now:
            self.hits.lookups.start(state, namespace)

    def stop_adapter(self, number: int) -> None:
        """Stop the open requests with this adapter: vLLM may compute them with other weights from now on."""
        self._stop([one for one in self.requests.values() if one.adapter is not None and one.adapter.number == number])

    def refuse(self, reason: str) -> None:
        """End caching on this engine before its next step, also for open requests."""
        self._stop(list(self.requests.values()))
        self.namespace.refuse(reason)

    def detach(self) -> None:
        """Load and save no more until the weights that come have an id, also for open requests."""
        self._stop(list(self.requests.values()))
        self.namespace.detach()

    def _stop(self, states: Sequence[RequestState]) -> None:
        """Load, save and audit no more of open requests: their pages may mix two sets of weights."""
        for state in states:
            self.hits.drop_fetch(state)
            state.no_more_hits = state.load_failed = state.save_stopped = True
            self._audits.on_finished(state.request_id)  # pages computed now cannot equal the stored ones
        stopped = {state.request_id for state in states}
        self._loads = [replace(job, pieces=None) if job.request_id in stopped else job for job in self._loads]

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        """The answer to vLLM's poll: tokens beyond its own hit that can be loaded; `None`: ask again."""
        state = self.requests.get(request_id)
        if state is None or state.loading is not None:
            return 0
        if self._saves_at_once and self._awaits_hash(state) and self.hits.lookups.may_wait(state):
            return None  # what is computed before the hash is known could not be saved
        state.local_tokens, state.cap_tokens = local_tokens, self.hits.lookups.cap_tokens(state.prompt)
        if (reason := self._why_no_lookup(state)) is not None:
            self.hits.outcomes.report(state, reason[0], detail=reason[1])
            return 0
        namespace = self.namespace.id
        if namespace is None:
            # An engine's first requests often come while the namespace is being opened. They wait for it, but only
            # once, for requests that come together: a service that is down must not slow later ones.
            may_wait = self.hits.lookups.may_wait(state)
            self._may_wait_for_namespace = self._may_wait_for_namespace and may_wait
            if self._may_wait_for_namespace:
                return None
            self.hits.outcomes.report(state, "not_ready", detail={"because": self.namespace.awaited})
            return 0
        return self.hits.poll(state, namespace, local_tokens)

    def _why_no_lookup(self, state: RequestState) -> tuple[str, dict[str, object]] | None:
        """Why a request is not looked up, as an outcome's reason and detail; `None` if it is."""
        if self.namespace.refusal is not None:
            return "engine_not_cached", {"because": self.namespace.refusal}
        if not self._settings.loads:
            return "mode", {}
        if not state.flags.load:
            return "opted_out", {}
        if state.chain is None:
            return "uncacheable", {"because": state.uncacheable or ""}
        if not self.is_ready and not self.namespace.is_expected:
            return "not_ready", {"because": self.namespace.awaited}
        return None

    def on_allocated(self, request_id: str, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Note that vLLM allocated blocks, and load into them if it took the hit."""
        state = self.requests.get(request_id)
        if external_tokens == 0:
            if state is not None:
                state.polled_since_s = None  # it computes, and waits for nothing any more
                self.hits.drop_fetch(state)
            return
        # vLLM waits for the ranks to report a load, so one is ordered even after an error below
        job = LoadJob(request_id, b"", None)
        try:
            assert state is not None, "a hit of an unknown request"
            job = self._plan_load(state, tables, external_tokens)
        finally:
            self._loads.append(job)
            if state is not None and job.pieces is None:
                state.no_more_hits = state.load_failed = True

    def _plan_load(self, state: RequestState, tables: Sequence[Sequence[int]], external_tokens: int) -> LoadJob:
        staged, local_tokens = self.hits.admit(state, external_tokens)
        self._stopwatch.on_load_ordered(state.request_id, staged.num_bytes)
        resume_tokens = local_tokens + external_tokens
        try:
            if resume_tokens > staged.resume_tokens:
                raise InternalError("vLLM took more than was promised", seen=resume_tokens, of=staged.resume_tokens)
            pieces = plan_load(
                staged, self._shape.groups, tables, local_tokens=local_tokens, resume_tokens=resume_tokens
            )
        except InternalError:
            LOG.exception("kvstore: a load could not be planned; the request is computed instead")
            pieces = None
        assert staged.lease is not None
        for index, group in enumerate(self._shape.groups):
            if group.is_state:
                state.note_stored(resume_tokens, index)
        return LoadJob(state.request_id, staged.lease, pieces, self._audits.is_read_back(staged), state.trace)

    def on_loads_finished(self, finished: set[str], failed: set[str]) -> None:
        """Note the ranks' reports of loads. A failed load is never tried again."""
        for request_id in finished:
            ended = self._ended_while_loading.pop(request_id, None)
            state = self.requests.get(request_id) or ended
            self._stopwatch.on_load_ended(request_id, failed=request_id in failed)
            if state is None or state.loading is None:  # under MultiConnector another cache's load ends here too
                continue
            # vLLM discards what was loaded for a request that has ended
            is_lost = request_id in failed or ended is not None
            self.hits.on_loaded(state, failed=is_lost)
            if request_id in failed:
                state.no_more_hits = state.load_failed = True
                self.meters.add("connector_failed_loads")

    def on_finished(self, request_id: str, final_tokens: int = 0, tables: Sequence[Sequence[int]] = ()) -> None:
        """Note that a request ended, and save the rest of it.

        Args:
            request_id: vLLM's.
            final_tokens: Tokens whose cache content is final; 0 if it did not end well.
            tables: Its blocks, for each of vLLM's groups.
        """
        state = self.requests.pop(request_id, None)
        self._audits.on_finished(request_id)
        if state is None:
            return
        try:
            if state.loading is not None:
                self._ended_while_loading[request_id] = state
            elif final_tokens and (namespace := self._saves_to(state)) is not None:
                self.saves.plan_end(state, namespace, final_tokens, tables)
            if self.namespace.id is not None:
                self._report_ended(state, self.namespace.id, final_tokens)
        finally:
            self.hits.forget(state)

    def _report_ended(self, state: RequestState, namespace: NamespaceId, final_tokens: int) -> None:
        """Report the prompt of an ended request to the store, with what its client wishes for the time after.

        All are reported, since a later hint may name any by its id. Nothing waits for that; if it fails, only the hint
        is lost.
        """
        if state.chain is None or not state.is_hashed:
            return
        boundary_tokens, page_tokens = self._shape.boundary_tokens, self._shape.layout.page_tokens
        state.extend_chain(final_tokens, boundary_tokens)
        boundaries, tokens = state.chain.boundaries, final_tokens or len(state.prompt)
        prompt_tokens, wishes, request = len(state.prompt), state.flags.wishes, state.request_id
        num = min(len(boundaries), tokens // boundary_tokens)
        if not num:
            return

        async def report(store: PageStore) -> None:
            ends = ends_of_pages(boundaries[:num], page_tokens)
            store.end_prompt(EndedPrompt(request, namespace, ends, boundary_tokens, prompt_tokens, wishes))

        post(self._bridge, report)

    # ---- steps

    def on_step_reported(self) -> None:
        """Note that vLLM has a step's results; called once for each step, in their order."""
        self._stopwatch.on_step_reported()

    def plan_step(self, step: StepFacts) -> StepJobs:
        """The jobs of one step, from what the engine computes in it."""
        self._stopwatch.on_step_planned(step.computed_tokens, step.final_tokens, is_shared=step.is_shared)
        self._watchdog.on_step()
        for request_id in step.preempted:
            if (preempted := self.requests.get(request_id)) is not None:
                preempted.preempt()
        running = []
        for request_id, final_tokens in step.final_tokens.items():
            state, offers = self.requests.get(request_id), step.offers.get(request_id, ())
            if state is None:
                continue
            if (namespace := self._saves_to(state)) is not None:
                tables = partial(step.tables.__getitem__, request_id)
                running.append(RunningRequest(state, namespace, final_tokens, tables, offers))
            elif offers and self._awaits_hash(state):
                self.meters.add("connector_saves", outcome="not_hashed")  # vLLM does not offer this state again
        saves = self.saves.plan_step(running)
        try:
            audits = self._audits.plan_step(step)
        except BaseException:
            self._audits.stop()
            self.save_jobs.withdraw(saves)
            raise
        # last, so that an error above cannot lose a load that vLLM waits for
        loads, self._loads = tuple(self._loads), []
        # vLLM also plans steps with nothing to compute ahead of the results of one that computes
        may_wait = not (self._stopwatch.is_computing or self._steps_together)
        return StepJobs(loads, tuple(saves), bool(step.final_tokens), audits, may_wait)

    def wait_for_answers(self) -> None:
        """In a step that may wait, while requests wait for answers, sleep until one comes, for at most 5 ms.

        vLLM keeps stepping while a request waits, and a step without work is an exchange of messages between spinning
        processes. On few cores that starves the threads and the service that the request waits for.

        Does not sleep while ranks load, since the ranks wait in that step.
        """
        states = self.requests.values()
        if any(state.is_polled for state in states) and not any(state.loading for state in states):
            self.hits.answered.wait(_EMPTY_STEP_S)
        self.hits.answered.clear()

    def _will_save_to(self, state: RequestState) -> NamespaceId | None:
        """Where pages of this request are saved once its prompt is hashed; `None`: nowhere. Starts the hashing."""
        namespace = self.namespace.id
        if not self._settings.saves or not state.flags.save or not self.budget.fits_all:
            return None
        if self._watchdog.has_ended_saves or state.save_stopped:
            return None
        if namespace is None or state.chain is None or len(state.tokens) < self._shape.boundary_tokens:
            return None
        if state.hashed is None:  # the request came before the namespace was open, or was preempted
            self.hits.lookups.start(state, namespace)
        return namespace

    def _awaits_hash(self, state: RequestState) -> bool:
        return self._will_save_to(state) is not None and not state.is_hashing_over

    def _saves_to(self, state: RequestState) -> NamespaceId | None:
        """Where pages of this request can be saved now; `None`: nowhere."""
        namespace = self._will_save_to(state)
        if namespace is None or not state.is_hashed:
            return None
        state.note_lookup()
        return namespace

    @property
    def has_pending_saves(self) -> bool:
        """Whether an engine without requests must keep stepping.

        Not only while blocks are pinned for saves: without a step vLLM's worker processes spin in Python for a second,
        and keep the interpreter and the core from the threads that save. In an empty step they wait for these instead.
        """
        return len(self.save_jobs) > 0 or self._audits.has_open_jobs

    def on_rank_report(self, report: RankReport) -> None:
        """Note the ranks' reports of saves and audits."""
        if report.refusal:
            self.namespace.refuse(report.refusal)
        self.save_jobs.on_rank_report(report)
        self._audits.on_rank_report(report)
        if self._audits.refusal is not None:
            self.namespace.refuse(self._audits.refusal)

    # ---- the engine

    def reset_cache(self, *, is_empty: bool) -> None:
        """Note that the engine dropped its own cache. If weights may change, that ends loads and saves for now.

        Jobs in flight belong to the old weights and continue.

        Args:
            is_empty: vLLM holds no block: everything computed from here on uses the engine's current weights.
        """
        if not self._settings.weights_may_change:
            return
        self._stop(list(self.requests.values()))
        self.namespace.reset(is_empty=is_empty)

    def give_blocks_back(self) -> None:
        """Hold no block any more: vLLM is about to drop its own cache, and does not while one is held."""
        self.save_jobs.give_blocks_back()

    def on_blocks_emptied(self) -> None:
        """Note that the engine slept: the blocks of saves that were planned before and not sent are empty."""
        self.save_jobs.abandon(LossReason.STOPPED)

    def shutdown(self) -> None:
        """End every lease and all work on the store's thread. Idempotent."""
        self.namespace.cancel()
        self.save_jobs.close()
        self._losses.close()
        for state in self.requests.values():
            self.hits.forget(state)
        self.requests.clear()
