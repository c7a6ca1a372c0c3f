"""Runs a step: copy, verify, then remove, under a lease and a rate limit; continues an interrupted run.

An old record is removed only after its new record was read back and compared, and is in the lasting tier. So a run may
be killed at any moment: the next one finds every record under its old name, its new name, or both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from kvstore.catalog.base import Catalog, LeaveReason, Removal
from kvstore.catalog.coordination import Ownership
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.retries import retry
from kvstore.store.upkeep.verification import ByteRate
from kvstore.tiers.base import Tier
from migrations.copying import NOT_MIGRATED, Copier, Progress
from migrations.journal import Journal, Phase, State, namespaces_of, sheets_name
from migrations.steps import Step
from migrations.store import Listed, Store, soon

_LEASE = "migration"
_RENEW_SHARE = 0.3
"""Share of the lease after which it is renewed."""
_WAIT_SHARE = 2.0
"""How many leases long a run waits for another one's lease to expire."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """The records that a run would process in one tier for one tenant, from listings alone.

    Attributes:
        namespaces: Number of the tenant's namespaces.
        num_records: Records in them; each is read, and rewritten where it is not current.
        num_copied: Records that an interrupted run has copied.
    """

    tier: str
    tenant: str
    namespaces: int
    num_records: int
    num_bytes: int
    num_copied: int


class Runner:
    """Runs one step on one store.

    Args:
        tiers: The slower tiers, by level. Without circuit breakers: a run retries a tier that is unavailable.
        catalog: New and removed records are reported to it.
        ownership: Provides the lease.
        lease_s: How long the lease lasts unless it is renewed.
        rate: Limits how fast records are read; `None`: no limit.
    """

    def __init__(
        self,
        step: Step,
        tiers: Mapping[Level, Tier],
        catalog: Catalog,
        ownership: Ownership,
        *,
        lease_s: float,
        rate: ByteRate | None,
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._step = step
        self._store = Store(tiers, catalog)
        self._ownership = ownership
        self._lease_s = lease_s
        self._journal = Journal(self._store.lasting)
        self._copier = Copier(step, self._store, self._journal, self._progress, rate)

    # operators' commands

    async def state(self) -> State | None:
        """The latest migration, as `Journal.state`."""
        return await self._journal.state()

    async def plan(self) -> list[Plan]:
        """The records that a run would process, by tier and tenant. Lists names, reads no record, writes nothing."""
        plans = []
        state = await self._journal.state()
        for level, listed in (await self._store.listed()).items():
            counts: dict[str, list[int]] = {}
            for namespace, held in listed.items():
                description = await self._store.describe(namespace)
                if description is None or self._step.target(description.tenant) is None:
                    continue
                walk = await self._copier.walk(level, description, state, len(held), is_new=False)
                row = counts.setdefault(description.tenant, [0, 0, 0, 0])
                row[0] += 1
                row[1] += len(held)
                row[2] += sum(held.values())
                row[3] += sum(old in held for sheet in walk.sheets for old in sheet)
            tier = self._store.tiers[level]
            plans += [Plan(tier.name, tenant, *row) for tenant, row in sorted(counts.items())]
        return plans

    async def copy(self) -> State:
        """Copy every record that is not current to its new one. Continues an interrupted run.

        Raises:
            InvalidRequest: Another migration is under way, or there is nothing to do.
            Unavailable: Another run holds the lease, or a tier failed several times in a row: run it again.

        If cancelled or killed, the next run continues.
        """
        async with _hold_lease(self._ownership, self._lease_s):
            state = await self._journal.state()
            if state is not None and state.is_open:
                self._agree(state)
            everything = await self._store.listed()
            if state is None or not state.is_open:
                state = await self._begin(everything)
            await self._copy_all(state, everything)
            await self._end(state, Phase.REMOVING if state.phase is Phase.REMOVING else Phase.COPIED)
            return state

    async def finish(self) -> State:
        """Copy records saved since, then remove each old record whose new one is in the lasting tier.

        Raises:
            InvalidRequest: Nothing was copied yet.
            Unavailable: As for `copy`.

        If cancelled or killed, calling it again continues.
        """
        async with _hold_lease(self._ownership, self._lease_s):
            state = await self._journal.state()
            if state is None or state.phase not in (Phase.COPIED, Phase.REMOVING):
                raise InvalidRequest("there is nothing to finish: run the migration first", field="migration")
            self._agree(state)
            everything = await self._store.listed()
            await self._copy_all(state, everything)
            await self._write(state, Phase.REMOVING)
            for namespace in namespaces_of(state):
                await self._remove(state, namespace, everything)
            if self._progress.totals["kept"]:
                await self._end(state, Phase.REMOVING)
            else:
                if not any(self._progress.totals[name] for name in NOT_MIGRATED):
                    tenants, tiers = state.targets, list(self._store.tiers.values())
                    await retry(lambda: self._step.conclude(tenants, tiers, deadline=soon()))
                    self._progress.on_step("concluded")
                await self._empty_sheets(state)
                await self._end(state, Phase.DONE)
            return state

    async def abort(self) -> State:
        """Cancel the migration. New records that were made stay, and are read; nothing is removed.

        Raises:
            InvalidRequest: There is none, or old records are being removed already.
        """
        async with _hold_lease(self._ownership, self._lease_s):
            state = await self._journal.state()
            if state is None or not state.is_open:
                raise InvalidRequest("there is no migration to abort", field="migration")
            if state.phase is Phase.REMOVING:
                raise InvalidRequest("old records are being removed already: finish it", field="migration")
            await self._empty_sheets(state)
            await self._end(state, Phase.ABORTED)
            return state

    # the lease and the state

    async def _begin(self, everything: Mapping[Level, Listed]) -> State:
        targets = {}
        for listed in everything.values():
            for namespace in listed:
                description = await self._store.describe(namespace)
                if description is not None and (target := self._step.target(description.tenant)) is not None:
                    targets[description.tenant] = target
        if not targets:
            raise InvalidRequest(
                "nothing to migrate: no tenant with records has a second key; put the new key in front of the old one",
                field="encryption_keys",
            )
        state = State(step=self._step.name, targets=targets, phase=Phase.COPYING, sheets={}, totals={})
        await self._write(state, Phase.COPYING)
        return state

    def _agree(self, state: State) -> None:
        """Refuse to continue a migration with other targets than it was started with."""
        now = {tenant: self._step.target(tenant) for tenant in state.targets}
        if state.step != self._step.name or now != state.targets:
            wrong = ", ".join(tenant or "''" for tenant in now if now[tenant] != state.targets[tenant])
            raise InvalidRequest(
                "a migration to other keys is under way: put these keys back in front and finish it, or abort it",
                step=state.step,
                tenants=wrong,
            )

    async def _write(self, state: State, phase: Phase) -> None:
        state.phase = phase
        await retry(lambda: self._journal.write(state))
        self._progress.on_step(f"state {phase.value}")

    async def _end(self, state: State, phase: Phase) -> None:
        state.totals = {name: number for name, number in self._progress.totals.items() if number}
        await self._write(state, phase)
        self._progress.report()

    # copying

    async def _copy_all(self, state: State, everything: Mapping[Level, Listed]) -> None:
        self._progress.num_expected = sum(len(held) for listed in everything.values() for held in listed.values())
        for level, listed in everything.items():
            for namespace, held in sorted(listed.items()):
                description = await self._store.describe(namespace)
                if description is None:
                    self._progress.totals["unknown"] += len(held)
                elif self._step.target(description.tenant) is not None:
                    await self._copier.copy_namespace(state, level, description, everything)

    # removing

    async def _remove(self, state: State, namespace: NamespaceId, everything: Mapping[Level, Listed]) -> None:
        """Remove the old records of a namespace, sheet by sheet. Sheets are kept until everything is removed: the next
        run finds its remaining work with them and a listing.
        """
        lasting = await self._store.lasting_records(namespace)
        for level in reversed(self._store.tiers):  # the hot tier first: no copy of a removed record remains there
            held = everything[level].get(namespace, {})
            for number in range(state.sheets.get(sheets_name(level, namespace), 0)):
                sheet = await retry(partial(self._journal.sheet, level, namespace, number))
                replaced = [old for old, new in sheet.items() if new in lasting]
                await self._remove_records(level, replaced, [old for old in replaced if old in held])
                self._progress.totals["kept"] += sum(old in held and new not in lasting for old, new in sheet.items())
                self._progress.report()

    async def _remove_records(self, level: Level, replaced: Sequence[RecordKey], held: Sequence[RecordKey]) -> None:
        """Remove records from the catalog, then from the tier, so that the catalog names none that is missing.

        Args:
            replaced: All that have a new record; reported to the catalog, since some may have been evicted unnoticed.
            held: Those of them that the tier still has.
        """
        removals = [Removal(old, level, None, LeaveReason.REMOVED) for old in replaced]
        if removals:
            await retry(lambda: self._store.catalog.remove(removals, deadline=soon()))
            self._progress.on_step("catalog removed")
        if held:
            await retry(lambda: self._store.tiers[level].delete_all(held, deadline=soon()))
            self._progress.on_step("deleted")
        self._progress.totals["removed"] += len(held)

    async def _empty_sheets(self, state: State) -> None:
        for level in self._store.tiers:
            for namespace in namespaces_of(state):
                for number in range(state.sheets.get(sheets_name(level, namespace), 0)):
                    await retry(partial(self._journal.write_sheet, level, namespace, number, {}))
                    self._progress.on_step("sheet emptied")


@asynccontextmanager
async def _hold_lease(ownership: Ownership, lease_s: float) -> AsyncIterator[None]:
    """Hold the lease during the block. Waits first, since the lease of a run that was killed must expire.

    Raises:
        Unavailable: Another run holds it, or it was lost since this run could not renew it in time.
    """
    ends = Deadline.after(lease_s * _WAIT_SHARE)
    while not await ownership.hold(_LEASE, deadline=soon()):
        if ends.expired:
            raise Unavailable("another run of this migration is active: wait for it, or end it", lease_s=lease_s)
        await asyncio.sleep(_POLL_S)
    main = asyncio.current_task()
    assert main is not None
    lost: list[str] = []

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease_s * _RENEW_SHARE)
            try:
                is_ours = await ownership.hold(_LEASE, deadline=soon())
            except Unavailable:
                continue  # two runs at once would repeat work, but do no harm
            if not is_ours:
                lost.append("another run has taken over this migration")
                main.cancel()
                return

    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(renew())
            try:
                yield
            finally:
                renewing.cancel()
    except asyncio.CancelledError:
        if lost:
            raise Unavailable(lost[0]) from None
        raise
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await ownership.release(_LEASE, deadline=soon())
