"""The progress of a migration, stored beside the records, so that a run on any node can continue it.

A *state* says which migration it is, and its phase. A *sheet* lists, for a share of a namespace's records (by the first
byte of their prefixes), which record was copied to which: the next run does not copy these again, and `finish` removes
only these. Both are stored as manifests of namespaces without records.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from enum import Enum

import xxhash
from pydantic import BaseModel

from kvstore.catalog.entry import Level
from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Tier

_FORMAT = 1
_CALL_S = 60.0
_SHEETS_MAX = 256
_RECORDS_PER_SHEET = 1024
_MAGIC = b"KVS1"
_HEAD = struct.Struct("<4sI16s")
_PAIR = struct.Struct("<32s32sHH")


class Phase(Enum):
    """The phases of a migration."""

    COPYING = "copying"
    COPIED = "copied"
    """Every record has its new one; the old ones still exist."""
    REMOVING = "removing"
    DONE = "done"
    ABORTED = "aborted"


class State(BaseModel):
    """The state of a migration.

    Attributes:
        step: Name of the step.
        targets: Per tenant the target of its records: `Step.target`.
        sheets: Number of sheets per level and namespace (`sheets_name`); fixed before the first record is copied.
        totals: Records by outcome, of the run that ended last.
    """

    step: str
    targets: dict[str, str]
    phase: Phase
    sheets: dict[str, int]
    totals: dict[str, int]

    @property
    def is_open(self) -> bool:
        """Whether it is neither done nor aborted."""
        return self.phase in (Phase.COPYING, Phase.COPIED, Phase.REMOVING)


Sheet = dict[RecordKey, RecordKey]
"""Old record to new record; only their prefixes differ."""


class Journal:
    """Reads and writes states and sheets.

    Args:
        tier: The lasting one: the cold one, where there is one.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    async def state(self) -> State | None:
        """The latest migration; `None`: there never was one.

        Raises:
            CorruptRecord: The stored state cannot be read.
            UnsupportedFormat: A newer release wrote it.
        """
        data = await self._tier.get_manifest(place("state"), deadline=_soon())
        if data is None:
            return None
        try:
            content = json.loads(bytes(data))
            if content["kvstore_migration"] != _FORMAT:
                raise UnsupportedFormat(
                    "a migration was started by a newer release: continue with that release",
                    expected=_FORMAT,
                    seen=content["kvstore_migration"],
                )
            return State.model_validate(content)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord("the state of the migration cannot be read", error=type(error).__name__) from error

    async def write(self, state: State) -> None:
        """Store a state, replacing the previous one."""
        content = {"kvstore_migration": _FORMAT, **state.model_dump(mode="json")}
        await self._tier.put_manifest(place("state"), json.dumps(content).encode(), deadline=_soon())

    async def sheet(self, level: Level, namespace: NamespaceId, number: int) -> Sheet:
        """Read a sheet; empty where none was written, or it is damaged: then its records are copied again."""
        data = await self._tier.get_manifest(place(f"sheet {level.name} {namespace.hex()} {number}"), deadline=_soon())
        return _unpacked(namespace, bytes(data)) if data is not None else {}

    async def write_sheet(
        self, level: Level, namespace: NamespaceId, number: int, sheet: Mapping[RecordKey, RecordKey]
    ) -> None:
        """Store a sheet, replacing the previous one."""
        name = place(f"sheet {level.name} {namespace.hex()} {number}")
        await self._tier.put_manifest(name, _packed(sheet), deadline=_soon())


def num_sheets(num_records: int) -> int:
    """The number of sheets for a number of records: a power of two up to 256. Below 256 a sheet has at most 1,024."""
    number = 1
    while number < _SHEETS_MAX and number * _RECORDS_PER_SHEET < num_records:
        number *= 2
    return number


def sheet_of(key: RecordKey, number: int) -> int:
    """The index of a record's sheet, of `number` sheets."""
    return key.prefix[0] * number // 256


def _soon() -> Deadline:
    return Deadline.after(_CALL_S)


def place(what: str) -> NamespaceId:
    return NamespaceId(hashlib.sha256(f"kvstore migration v1\0{what}".encode()).digest()[:NAMESPACE_BYTES])


def _packed(sheet: Mapping[RecordKey, RecordKey]) -> bytes:
    """Little-endian: magic, number of pairs, checksum of the pairs, pairs: old prefix, new prefix, group, slice."""
    pairs = b"".join(_PAIR.pack(old.prefix, new.prefix, old.group, old.slice) for old, new in sheet.items())
    return _HEAD.pack(_MAGIC, len(sheet), xxhash.xxh3_128_digest(pairs)) + pairs


def _unpacked(namespace: NamespaceId, data: bytes) -> Sheet:
    if len(data) < _HEAD.size:
        return {}
    magic, count, checksum = _HEAD.unpack_from(data)
    pairs = data[_HEAD.size :]
    if magic != _MAGIC or len(pairs) != count * _PAIR.size or xxhash.xxh3_128_digest(pairs) != checksum:
        return {}
    return {
        RecordKey(namespace, PrefixHash(old), group, slice_): RecordKey(namespace, PrefixHash(new), group, slice_)
        for old, new, group, slice_ in _PAIR.iter_unpack(pairs)
    }


def sheets_name(level: Level, namespace: NamespaceId) -> str:
    """The key of `State.sheets` for a level of a namespace."""
    return f"{level.name} {namespace.hex()}"


def namespaces_of(state: State) -> list[NamespaceId]:
    """The namespaces that have sheets, sorted."""
    return sorted({NamespaceId(bytes.fromhex(name.split()[1])) for name in state.sheets})
