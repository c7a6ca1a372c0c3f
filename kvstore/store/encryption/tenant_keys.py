"""The keys of the tenants of a service, and whether their records were written with the same ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from kvstore.errors import Closed, KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.watched_file import Watched
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.encryption import key_ledger
from kvstore.store.encryption.key_ledger import KeyLedger, KeyState
from kvstore.store.encryption.key_ring import Generation, KeyRing

_log = logging.getLogger(__name__)

_CHECK_S = 10.0
_CHECK_AGAIN_S = 300.0
_SHOWN_MAX = 4
_NO_STATE = KeyState()


class TenantKeys(StorePart):
    """Compares the keys of each tenant with the notes beside its records: when the tenant first opens a namespace, when
    keys change, and every few minutes. Warns once of each difference.

    Args:
        context: Of the store that the tenants use.
        keys: Where the keys come from; read again while the store is open.
    """

    def __init__(self, context: StoreContext, keys: Watched[KeyRing]) -> None:
        super().__init__(context)
        self._keys = keys
        self._ledger = KeyLedger(context.slower)
        self._states: dict[str, KeyState] = {}  # of tenants that have opened a namespace
        self._counted: dict[str, str] = {}  # the problem that each of them is counted with
        self._warned: set[str] = set()
        self._background.keep_running(self._refresh, "keys")

    def generations(self, tenant: str) -> tuple[Generation, ...]:
        """As `KeyRing.generations`. Safe from any thread."""
        return self._keys.value.generations(tenant)

    def know(self, tenant: str) -> None:
        """Note that a tenant has opened a namespace."""
        if tenant not in self._states:
            self._states[tenant] = _NO_STATE
            self._background.spawn(self.check(tenant), "check of keys")

    def is_wrong(self, tenant: str, key_id: int) -> bool:
        """Whether a key is known to have another secret than the one that records were written with."""
        return key_id in self._states.get(tenant, _NO_STATE).wrong

    def reason(self, tenant: str) -> str:
        """Why a tenant's keys may cost hits, as a key of `REASONS`; empty: they do not."""
        state = self._states.get(tenant, _NO_STATE)
        if not self.generations(tenant):
            return "no_key"
        return "wrong_key" if state.wrong else "missing_key" if state.missing else ""

    def status(self) -> Mapping[str, object]:
        """`keys`: their number. `problems`: by reason a sentence with the next step for each of the first tenants."""
        problems: dict[str, list[str]] = {}
        for tenant in self._states:
            for text in self._problems(tenant):
                shown = problems.setdefault(self.reason(tenant), [])
                if len(shown) < _SHOWN_MAX:
                    shown.append(text)
        return {"keys": len(self._keys.value), "problems": problems}

    async def check(self, tenant: str) -> KeyState:
        """Compare a tenant's keys with those that its records were written with, and warn about differences."""
        state = _NO_STATE
        if generations := self.generations(tenant):
            try:
                state = await self._ledger.check(tenant, generations, deadline=Deadline.after(_CHECK_S, self._clock))
            except Closed:
                return _NO_STATE
            except KVStoreError as error:
                self._warn(key_ledger.failed(error))
                return self._states.get(tenant, _NO_STATE)
        self._states[tenant] = state
        self._count(tenant)
        for text in self._problems(tenant):
            self._warn(text)
        return state

    def _count(self, tenant: str) -> None:
        before, now = self._counted.get(tenant, ""), self.reason(tenant)
        if before != now:
            self._counted[tenant] = now
            for reason, change in ((before, -1), (now, 1)):
                if reason:
                    num = self._meters.get("encryption_problems", reason=reason) + change
                    self._meters.set("encryption_problems", num, reason=reason)

    def _problems(self, tenant: str) -> list[str]:
        if not self.generations(tenant):
            return [key_ledger.without_key(tenant)]
        state = self._states.get(tenant, _NO_STATE)
        if state.missing and not any(self.generations(tenant)):
            return [key_ledger.unencrypted(tenant, state)]
        return key_ledger.explain(tenant, state)

    def _warn(self, text: str) -> None:
        """Log each text once."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    async def _refresh(self) -> None:
        """Reload the keys when they change; check each tenant's keys then, and every few minutes."""
        rests_s = _CHECK_AGAIN_S
        while True:
            await asyncio.sleep(self._keys.poll_s)
            rests_s -= self._keys.poll_s
            if await asyncio.to_thread(self._keys.poll) or rests_s <= 0:
                rests_s = _CHECK_AGAIN_S
                for tenant in list(self._states):
                    await self.check(tenant)
