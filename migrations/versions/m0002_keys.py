"""Step 2: brings records under an earlier key of their tenant, or plain ones, under its current key; names change too.

Repeated whenever keys change. Meanwhile services read all generations: first under the current key's name, then under
the others'.
"""

from __future__ import annotations

from kvstore.errors import CorruptRecord
from kvstore.format.encrypted import ENCRYPTION_BYTES, decrypt_record, encrypt_record
from kvstore.format.record import Record
from kvstore.store.encryption.key_ring import KeyRing
from migrations.plan import Rewrite, Step, Verdict

__all__ = ["KeyStep"]


class KeyStep(Step):
    """Rewrites records under the current key of their tenant.

    Args:
        ring: The keys of all tenants, including those that encrypted the stored records.
    """

    number = 2
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
