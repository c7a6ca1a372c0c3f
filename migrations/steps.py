"""The steps of a migration: each is a pure rewrite of one record. The runner does everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.errors import CorruptRecord
from kvstore.format.encrypted import ENCRYPTION_BYTES, decrypt_record, encrypt_record
from kvstore.format.record import Record
from kvstore.runtime.deadline import Deadline
from kvstore.store.encryption.key_ledger import KeyLedger
from kvstore.store.encryption.key_ring import KeyRing
from kvstore.tiers.base import Tier


class Verdict(Enum):
    """A step's verdict for a record."""

    CURRENT = "current"
    """The record is in its target form already."""
    REWRITTEN = "rewritten"
    """There is a new record for it, under a new name."""
    FOREIGN = "foreign"
    """It was encrypted with a key that is not available. It stays as it is."""
    REFUSED = "refused"
    """It cannot be authenticated, though its checksums match. It stays as it is."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The result for one record; `record` is the new one, for `REWRITTEN`."""

    verdict: Verdict
    record: Record | None = None


class Step(ABC):
    """One change of stored records. Pure except for nonces and `conclude`: no I/O, no clock. A released step does not
    change.

    Attributes:
        name: Its name for operators, stored in the state of a migration.
        text: Its change, in a sentence.
    """

    name: str
    text: str

    @abstractmethod
    def target(self, tenant: str) -> str | None:
        """A short text that identifies the target form of a tenant's records. A run continues only a migration with the
        same target. `None`: there is nothing to do for this tenant.
        """

    @abstractmethod
    def rewrite(self, record: Record, tenant: str) -> Rewrite:
        """The new record for a stored one, whose checksums were verified."""

    @abstractmethod
    def is_same(self, old: Record, new: Record, tenant: str) -> bool:
        """Whether a new record, as read back from the tier, has bit by bit the content of the old one."""

    @abstractmethod
    async def conclude(self, tenants: Collection[str], tiers: Sequence[Tier], *, deadline: Deadline) -> None:
        """Called when no old record of these tenants is left, before the migration counts as done; also again.

        Raises:
            KVStoreError: A tier does not answer.
        """


class KeyStep(Step):
    """Rewrites records under an earlier key of their tenant, or plain ones, under its current key; names change too.

    Repeated whenever keys change. During a migration services read all generations: first under the current key's name,
    then under the others'.

    Args:
        ring: The keys of all tenants, including those that encrypted the stored records.
    """

    name = "keys"
    text = "every record of a tenant under its current key: a change of keys, or encryption turned on or off"

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def target(self, tenant: str) -> str | None:
        generations = self._ring.generations(tenant)
        if len(generations) < 2:
            return None
        key = generations[0]
        return "plain" if key is None else f"{key.key_id}:{key.check.hex()}"

    def rewrite(self, record: Record, tenant: str) -> Rewrite:
        generations = self._ring.generations(tenant)
        ids = [0 if key is None else key.key_id for key in generations]
        if not ids or record.header.key_id == ids[0]:
            return Rewrite(Verdict.CURRENT)
        if record.header.key_id not in ids:
            return Rewrite(Verdict.FOREIGN)
        try:
            plain = self._plain(record, tenant)
        except CorruptRecord:
            return Rewrite(Verdict.REFUSED)
        current = generations[0]
        if current is None:
            return Rewrite(Verdict.REWRITTEN, plain)
        return Rewrite(Verdict.REWRITTEN, encrypt_record(plain, current, bytearray(plain.num_bytes + ENCRYPTION_BYTES)))

    def is_same(self, old: Record, new: Record, tenant: str) -> bool:
        try:
            return bytes(self._plain(old, tenant).data) == bytes(self._plain(new, tenant).data)
        except CorruptRecord:
            return False

    async def conclude(self, tenants: Collection[str], tiers: Sequence[Tier], *, deadline: Deadline) -> None:
        """Remove the earlier keys from the stored list of key ids. If they stayed there, services would report them as
        missing after an operator deletes them.
        """
        ledger = KeyLedger(tiers)
        for tenant in tenants:
            earlier = [key for key in self._ring.generations(tenant)[1:] if key is not None]
            await ledger.forget(tenant, earlier, deadline=deadline)

    def _plain(self, record: Record, tenant: str) -> Record:
        """Decrypt a record with the key that its header names.

        Raises:
            CorruptRecord: It was not encrypted with that key, or there is no such key.
        """
        for key in self._ring.generations(tenant):
            if (0 if key is None else key.key_id) == record.header.key_id:
                if key is None:
                    return record
                return decrypt_record(record, key, bytearray(max(0, record.num_bytes - ENCRYPTION_BYTES)))
        raise CorruptRecord("no key of this id", key_id=record.header.key_id)
