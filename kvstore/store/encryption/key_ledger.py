"""Compares our keys with the ids that a tenant's records were written with, to detect wrong or missing keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import CorruptRecord, KVStoreError, UnsupportedFormat
from kvstore.format.encrypted import TenantKey
from kvstore.format.manifest import key_ids_place, pack_key_ids, parse_key_ids
from kvstore.runtime.deadline import Deadline
from kvstore.store.encryption.key_ring import Generation
from kvstore.tiers.base import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyState:
    """How our keys differ from those that a tenant's records were written with."""

    wrong: frozenset[int] = frozenset()
    """Ids whose secret is a different one here."""
    missing: frozenset[int] = frozenset()
    """Ids that are not here at all."""


class KeyLedger:
    """The notes of key ids beside the records of each slower tier. Best effort: names depend on the keys themselves, so
    a wrong key finds nothing, with or without a note.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    async def check(self, tenant: str, generations: Sequence[Generation], *, deadline: Deadline) -> KeyState:
        """Compare a tenant's keys with the notes, and note the current key if its id is new. An id belongs to the first
        secret that was noted for it.

        Raises:
            KVStoreError: A tier does not answer, or its note is of a newer release.
        """
        noted = [await self._read(tier, tenant, deadline) for tier in self._tiers]
        checks: dict[int, bytes] = {}
        for note in noted:
            checks = {**note, **checks}
        keys = {key.key_id: key for key in generations if key is not None}
        wrong = frozenset(key_id for key_id, key in keys.items() if checks.get(key_id, key.check) != key.check)
        missing = frozenset(checks.keys() - keys.keys())
        current = generations[0] if generations else None
        if current is not None and current.key_id not in wrong:
            checks[current.key_id] = current.check
        for tier, note in zip(self._tiers, noted, strict=True):
            if note != checks:
                await tier.put_manifest(key_ids_place(tenant), pack_key_ids(checks), deadline=deadline)
        return KeyState(wrong, missing)

    async def forget(self, tenant: str, keys: Sequence[TenantKey], *, deadline: Deadline) -> None:
        """Remove the notes of keys under which no record is left.

        Raises:
            KVStoreError: As for `check`.
        """
        gone = {key.key_id: key.check for key in keys}
        for tier in self._tiers:
            note = await self._read(tier, tenant, deadline)
            left = {key_id: check for key_id, check in note.items() if gone.get(key_id) != check}
            if left != note:
                await tier.put_manifest(key_ids_place(tenant), pack_key_ids(left), deadline=deadline)

    async def _read(self, tier: Tier, tenant: str, deadline: Deadline) -> dict[int, bytes]:
        data = await tier.get_manifest(key_ids_place(tenant), deadline=deadline)
        if data is None:
            return {}
        try:
            return parse_key_ids(bytes(data))
        except CorruptRecord as error:  # written again below; only warnings depend on it
            _log.warning("a note of key ids cannot be read, it is written again tier=%s: %s", tier.name, error)
            return {}
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{error.message}: upgrade this service", tier=tier.name) from error


def explain(tenant: str, state: KeyState) -> list[str]:
    """A sentence for the operator on each problem, with the next step to take."""
    who = f"tenant={tenant!r}"
    wrong = [
        f"the encryption key has another secret than the one that records were written with, so they are misses and "
        f"nothing is saved: give key {key_id} its old secret back, and a new secret a new id {who} id={key_id}"
        for key_id in sorted(state.wrong)
    ]
    missing = [
        f"records were written with a key that is not in encryption_keys, so they are misses: put key {key_id} back "
        f"behind the current one, or delete what it wrote by `kvstore migrate finish` {who} id={key_id}"
        for key_id in sorted(state.missing)
    ]
    return wrong + missing


def without_key(tenant: str) -> str:
    """As `explain`, for a tenant that has no key."""
    return f"a tenant has no key and stores nothing: add one to encryption_keys tenant={tenant!r}"


def unencrypted(tenant: str, state: KeyState) -> str:
    """As `explain`, for a tenant whose records this service stores plain, while others have keys for it."""
    ids = ", ".join(map(str, sorted(state.missing)))
    return (
        "other services encrypt what they store here, but this one has no key, so their records are misses, and all "
        "who can read a tier can read what this one saves: set encryption_keys to those of the others "
        f"(docs/encryption.md) tenant={tenant!r} ids={ids}"
    )


def failed(error: KVStoreError) -> str:
    """As `explain`, for a `check` that raised."""
    return f"the encryption keys could not be compared with those that records were written with: {error}"
