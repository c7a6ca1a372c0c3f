"""The scheduler side of the connector: one object in the engine's core process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from connector.adapters import Adapters
from connector.canonical.attention import may_lose_blocks
from connector.facts import EngineFacts
from connector.identity import CacheShape
from connector.jobs import LoadJob, RankReport, StepJobs
from connector.losses import Losses, Lost
from connector.prefix_hash import PrefixChain
from connector.room import page_bytes, save_room
from connector.scheduler.admission import Admission
from connector.scheduler.audits import Audits
from connector.scheduler.bridge import Bridge
from connector.scheduler.ledger import Ledger, RequestState
from connector.scheduler.load_plan import plan_load
from connector.scheduler.lookups import Lookups
from connector.scheduler.opening import Opening
from connector.scheduler.outcomes import Outcomes
from connector.scheduler.prompt_facts import PromptFacts
from connector.scheduler.saves import BlockPins, Running, Saves
from connector.scheduler.step_facts import StepFacts
from connector.scheduler.timing import Timing
from connector.scheduler.watchdog import Watchdog
from connector.settings import ConnectorSettings
from kvstore.errors import InternalError
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters
from kvstore.runtime.sizes import format_bytes

__all__ = ["PromptFacts", "SchedulerSide", "StepFacts"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_EMPTY_STEP_S = 0.005


class SchedulerSide:
    """Answers vLLM's scheduler from memory; everything slow runs on the store's thread.

    Until the weights are digested and the namespace is open there are neither hits nor saves.

    Args:
        settings: The operator's.
        facts: The engine, as its first rank sees it.
        shape: The model's cache.
        bridge: To the store.
        cache_folder: For digests of weight files.
        rank_refusals: By rank why its cache tensors cannot be cached; one refusal leaves the engine uncached.
        clock: Time.
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
        self._settings = settings
        self._shape = shape
        self.meters = Meters()
        self.ledger = Ledger()
        self._admission = Admission(always=settings.load_always)
        self._timing = Timing(self._admission, self.ledger, clock)
        self._outcomes = Outcomes(bridge, shape.layout)
        self._lookups = Lookups(
            bridge,
            settings,
            step_tokens=shape.boundary_tokens,
            layout=shape.layout,
            admission=self._admission,
            adapters=Adapters(cache_folder, facts.adapter_rules, self.meters),
            outcomes=self._outcomes,
            local_cache=facts.prefix_caching,
            # a recurrent state that contains the last token would process it twice
            whole_prompts=settings.whole_prompt_hits and not any(group.is_state for group in shape.groups),
            meters=self.meters,
            clock=clock,
        )
        self.room = save_room(settings, facts, shape)
        self._losses = Losses(bridge, self.meters)
        self.saves = Saves(
            shape,
            num_ranks=facts.num_ranks,
            limit_bytes=self.room.in_flight_bytes,
            num_blocks=facts.num_blocks,
            ledger=self.ledger,
            meters=self.meters,
            losses=self._losses,
            clock=clock,
        )
        self._tell_room()
        # a state is offered in the step that makes it, and a window's blocks are given back after a few
        self._saves_at_once = any(group.is_state or may_lose_blocks(group.facts.kind) for group in shape.groups)
        self._audits = Audits(settings.audit_rate, shape, bridge, facts=facts, meters=self.meters, clock=clock)
        self._lookups.audits = self._audits
        self._loads: list[LoadJob] = []
        self._orphans: dict[str, RequestState] = {}  # ended while the ranks still load for them
        self._patient = True
        self._watchdog = Watchdog(self.saves, clock)
        self.opening = Opening(
            settings,
            facts,
            shape,
            bridge,
            cache_folder=cache_folder,
            rank_refusals=rank_refusals,
            on_open=self._tell_what_never_fits,
        )

    def _tell_room(self) -> None:
        """Say how much host memory each rank takes for pages."""
        if not self._settings.saves:
            return
        room = self.room
        _log.info("kvstore: pinned_bytes is %s for each rank: %s", format_bytes(room.pinned_bytes), room.reason)

    def _tell_what_never_fits(self, namespace: NamespaceId) -> None:
        """Say which records there will never be room for. Called on the store's thread."""
        if not self._settings.saves:
            return
        for index, group in enumerate(self._shape.groups):
            needs_bytes = 2 * page_bytes(self._shape, group)
            if needs_bytes > self.room.pinned_bytes:
                detail = {"pinned_bytes": self.room.pinned_bytes, "needs_bytes": needs_bytes}
                self._losses.tell_always(namespace=namespace, group=index, reason=Lost.TOO_LARGE, detail=detail)

    def bind_pins(self, pins: BlockPins) -> None:
        """Set vLLM's block pool: from now on pages of requests that have ended can be saved."""
        self.saves.pins = pins

    def wait_in_empty_step(self) -> None:
        """Sleep for 5 ms, or until an answer comes, in a step that computes nothing while requests wait for answers.

        vLLM keeps stepping while a request waits, and a step without work is an exchange of messages between spinning
        processes: on few cores it starves the very threads and the service that the request waits for.

        Not while a computing step is in flight, since vLLM plans ahead of it and its results would be late; nor while
        the ranks load, since they wait themselves then.
        """
        if not self._timing.is_computing:
            states = list(self.ledger)
            if any(state.is_asking for state in states) and not any(state.loading for state in states):
                self._lookups.answered.wait(_EMPTY_STEP_S)
        self._lookups.answered.clear()

    @property
    def is_ready(self) -> bool:
        return self.opening.is_ready

    # ---- requests

    def on_new_request(self, prompt: PromptFacts) -> None:
        chain = None
        for told in ("load", "save"):
            if not getattr(prompt.flags, told):
                self.meters.add("connector_requests_opted_out", of=told)
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
        )
        self.ledger.open(state)
        if chain is not None and self.is_ready and len(state.prompt) >= self._shape.boundary_tokens:
            assert self.opening.namespace is not None
            self._lookups.start(state, self.opening.namespace)

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        """The answer to vLLM: tokens beyond its own hit that can be loaded; `None`: ask again."""
        state = self.ledger.find(request_id)
        if state is None or state.loading is not None:
            return 0
        if self._saves_at_once and self._awaits_hash(state) and self._lookups.may_wait(state):
            return None  # computed now, it could not be saved
        if (never := self._why_never(state)) is not None:
            reason, detail = never
            self._outcomes.tell(state, reason, detail=detail)
            return 0
        if not self.is_ready:
            # An engine's first request often comes while the namespace is being opened: wait as long as for a lookup,
            # but only once, for requests that come together. A service that is down must not slow later ones.
            waiting = self._lookups.may_wait(state)
            self._patient = self._patient and waiting
            if waiting and self._patient:
                return None
            self._outcomes.tell(state, "not_ready")
            return 0
        assert self.opening.namespace is not None
        return self._lookups.hit(state, self.opening.namespace, local_tokens)

    def _why_never(self, state: RequestState) -> tuple[str, dict[str, object]] | None:
        """Why nothing is looked up for a request, whatever is stored, as an outcome's reason and detail."""
        if self.opening.refused is not None:
            return "engine_not_cached", {"because": self.opening.refused}
        if not self._settings.loads:
            return "mode", {}
        if not state.flags.load:
            return "opted_out", {}
        if state.chain is None:
            return "uncacheable", {"because": state.uncacheable or ""}
        if not self.is_ready and not self.opening.is_coming:
            return "not_ready", {}
        return None

    def on_allocated(self, request_id: str, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Note that vLLM allocated blocks, and load into them if it took the hit."""
        state = self.ledger.find(request_id)
        if external_tokens == 0:
            if state is not None:
                state.asked_s = None  # it computes, and waits for nothing any more
                self._lookups.drop_fetch(state)
            return
        job = LoadJob(request_id, b"", None)  # vLLM waits for the ranks to report it, whatever happens here
        try:
            assert state is not None, "a hit of a request that is not known"
            job = self._plan_load(state, tables, external_tokens)
        finally:
            self._loads.append(job)
            if state is not None and job.pieces is None:
                state.closed = state.load_failed = True

    def _plan_load(self, state: RequestState, tables: Sequence[Sequence[int]], external_tokens: int) -> LoadJob:
        staged, local_tokens = self._lookups.admitted(state, external_tokens)
        self._timing.on_load_ordered(state.request_id, staged.num_bytes)
        resume_tokens = local_tokens + external_tokens
        try:
            if resume_tokens > staged.resume_tokens:
                raise InternalError("vLLM took more than was promised", seen=resume_tokens, of=staged.resume_tokens)
            pieces = plan_load(
                staged, self._shape.groups, tables, local_tokens=local_tokens, resume_tokens=resume_tokens
            )
        except InternalError:
            _log.exception("kvstore: a load could not be planned and is recomputed")
            pieces = None
        assert staged.lease is not None
        for index, group in enumerate(self._shape.groups):
            if group.is_state:
                state.note_stored(resume_tokens, index)
        return LoadJob(state.request_id, staged.lease, pieces, self._audits.is_read_back(staged), state.trace)

    def on_loads_finished(self, finished: set[str], failed: set[str]) -> None:
        """Take the ranks' reports of loads; a failed one is never tried again."""
        for request_id in finished:
            orphan = self._orphans.pop(request_id, None)
            state = self.ledger.find(request_id) or orphan
            self._timing.on_load_ended(request_id, failed=request_id in failed)
            if state is None or state.loading is None:  # under MultiConnector another cache's load ends here too
                continue
            # vLLM discards what was loaded for a request that has ended
            is_lost = request_id in failed or orphan is not None
            self._lookups.loaded(state, failed=is_lost)
            if request_id in failed:
                state.closed = state.load_failed = True
                self.meters.add("connector_failed_loads")

    def on_finished(self, request_id: str, final_tokens: int = 0, tables: Sequence[Sequence[int]] = ()) -> None:
        """Note that a request ended, and save what is left of it.

        Args:
            request_id: vLLM's.
            final_tokens: Tokens whose cache content is final; 0 if it did not end well.
            tables: Its blocks, for each of vLLM's groups.
        """
        state = self.ledger.close(request_id)
        self._audits.on_finished(request_id)
        if state is None:
            return
        try:
            if state.loading is not None:
                self._orphans[request_id] = state
            elif final_tokens and self._saves(state):
                assert self.opening.namespace is not None
                self.saves.plan_end(state, self.opening.namespace, final_tokens, tables)
        finally:
            self._lookups.forget(state)

    # ---- steps

    def on_step_reported(self) -> None:
        """vLLM has a step's results; called once for each step, in their order."""
        self._timing.on_reported()

    def plan_step(self, step: StepFacts) -> StepJobs:
        """The jobs of one step, from what the engine computes in it."""
        self._timing.on_planned(step.computed_tokens, step.final_tokens)
        self._watchdog.on_step()
        for request_id in step.preempted:
            if (lost := self.ledger.find(request_id)) is not None:
                lost.resume()
        requests = []
        for request_id, final_tokens in step.final_tokens.items():
            state, offers = self.ledger.find(request_id), step.offers.get(request_id, ())
            if state is not None and self._saves(state):
                assert self.opening.namespace is not None
                tables = partial(step.tables.__getitem__, request_id)
                requests.append(Running(state, self.opening.namespace, final_tokens, tables, offers))
            elif state is not None and offers and self._awaits_hash(state):
                self.meters.add("connector_saves", outcome="not_hashed")  # a state, for good
        saves = self.saves.plan_step(requests)
        try:
            audits = self._audits.plan_step(step)
        except BaseException:
            self._audits.stop()
            self.saves.withdraw(saves)
            raise
        # last, so that an error above cannot lose a load that vLLM waits for
        loads, self._loads = tuple(self._loads), []
        return StepJobs(loads, tuple(saves), computes=bool(step.final_tokens), audits=audits)

    def _can_save(self, state: RequestState) -> bool:
        """Whether pages of this request can be saved once its prompt is hashed, which has begun then."""
        if not self._settings.saves or not state.flags.save or not self.room.fits_all:
            return False
        if self._watchdog.has_ended_saves:
            return False
        if not self.is_ready or state.chain is None or state.save_stopped:
            return False
        if len(state.known) < self._shape.boundary_tokens:
            return False
        if state.hashed is None:  # the request came before the namespace was open, or was preempted
            assert self.opening.namespace is not None
            self._lookups.start(state, self.opening.namespace)
        return True

    def _awaits_hash(self, state: RequestState) -> bool:
        return self._can_save(state) and not state.is_hashing_over

    def _saves(self, state: RequestState) -> bool:
        """Whether pages of this request can be saved now."""
        if not self._can_save(state) or not state.is_hashed:
            return False
        state.learn_presence()
        return True

    @property
    def has_pending_saves(self) -> bool:
        """Whether an engine without requests must keep stepping.

        Not only while blocks are held for saves: without a step vLLM's worker processes spin in Python for a second,
        and keep the interpreter and the core from the threads that save. In an empty step they wait for these instead.
        """
        return len(self.saves) > 0 or self._audits.has_open_jobs

    def on_rank_report(self, report: RankReport) -> None:
        """Take the ranks' reports of saves and audits."""
        self.saves.on_rank_report(report)
        self._audits.on_rank_report(report)
        if self._audits.refusal is not None:
            self.opening.refuse(self._audits.refusal)

    def reset_cache(self, *, is_empty: bool) -> None:
        """Note that the engine dropped its own cache; if weights may change, that ends loads and saves for now.

        What is in flight already, and belongs to the old weights, continues.

        Args:
            is_empty: vLLM holds no block: all that is computed from here on uses the engine's current weights.
        """
        if not self._settings.weights_may_change:
            return
        for state in self.ledger:  # what they have computed, or still will, may mix two sets of weights
            self._lookups.drop_fetch(state)
            state.closed = state.load_failed = state.save_stopped = True
            self._audits.on_finished(state.request_id)  # what is computed now cannot equal what is stored
        self._loads = [replace(job, pieces=None) for job in self._loads]
        self.opening.reset(is_empty=is_empty)

    def on_blocks_emptied(self) -> None:
        """Note that the engine slept: saves that were planned before and not sent would now copy something else."""
        self.saves.abandon(Lost.STOPPED)

    def status(self) -> dict[str, Any]:
        """Plain values for people and tests."""
        return {
            "ready": self.is_ready,
            "refused": self.opening.refused,
            "namespace": self.opening.namespace.hex() if self.opening.namespace else None,
            "requests": len(self.ledger),
            "saves_in_flight": len(self.saves),
            **self.meters.snapshot(),
        }

    def shutdown(self) -> None:
        """End every lease and stop asking. Idempotent."""
        self.opening.cancel()
        self.saves.close()
        self._losses.close()
        for state in self.ledger:
            self._lookups.forget(state)
            self.ledger.close(state.request_id)
