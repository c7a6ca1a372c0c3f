"""What a migration has done so far, as bytes beside the records: whoever resumes it, on whatever node, reads it there.

A *state* tells what is being done, and how far it is. A *sheet* lists for a share of a namespace's records, by the
first byte of their prefixes, which record was copied to which: for the next run, which does not copy it again, and for
`finish`, which removes nothing else. Both stand where the manifests of namespaces without records would.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

import xxhash

from kvstore.catalog.entry import Level
from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Tier

__all__ = ["Journal", "Phase", "Sheet", "State", "namespaces_of", "num_sheets", "sheet_of", "sheets_name"]

_FORMAT = 1
_CALL_S = 60.0
_SHEETS_MAX = 256
_RECORDS_PER_SHEET = 1024
_MAGIC = b"KVS1"
_HEAD = struct.Struct("<4sI16s")
_PAIR = struct.Struct("<32s32sHH")


class Phase(Enum):
    """How far a migration is."""

    COPYING = "copying"
    COPIED = "copied"
    """Every record has its new one; the old ones stand too."""
    REMOVING = "removing"
    DONE = "done"
    ABORTED = "aborted"


@dataclass
class State:
    """What is being done.

    Attributes:
        step: Name of the step.
        targets: For each tenant what its records are to be: `Step.target`.
        phase: How far it is.
        sheets: Sheets of each level and namespace; fixed when the first record of it is copied.
        totals: Records by what became of them, of the run that ended last.
    """

    step: str
    targets: dict[str, str]
    phase: Phase = Phase.COPYING
    sheets: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self.phase in (Phase.COPYING, Phase.COPIED, Phase.REMOVING)


Sheet = dict[RecordKey, RecordKey]
"""For each old record the new one; only prefixes differ."""


class Journal:
    """Reads and writes states and sheets.

    Args:
        tier: The one that loses nothing by itself: the cold one, where there is one.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    async def state(self) -> State | None:
        """The migration that was begun last; `None`: there never was one.

        Raises:
            CorruptRecord: What stands there is no state.
            UnsupportedFormat: A newer release wrote it.
        """
        data = await self._tier.get_manifest(_place("state"), deadline=_soon())
        if data is None:
            return None
        try:
            content = json.loads(bytes(data))
            if content["kvstore_migration"] != _FORMAT:
                raise UnsupportedFormat(
                    "a migration was begun by a newer release: go on with that one",
                    expected=_FORMAT,
                    seen=content["kvstore_migration"],
                )
            return State(
                step=content["step"],
                targets=dict(content["targets"]),
                phase=Phase(content["phase"]),
                sheets=dict(content["sheets"]),
                totals=dict(content["totals"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord("the state of the migration cannot be read", error=type(error).__name__) from error

    async def write(self, state: State) -> None:
        """Keep a state; the one before is forgotten."""
        content = {"kvstore_migration": _FORMAT, **asdict(state), "phase": state.phase.value}
        await self._tier.put_manifest(_place("state"), json.dumps(content).encode(), deadline=_soon())

    async def sheet(self, level: Level, namespace: NamespaceId, number: int) -> Sheet:
        """A sheet; an empty one where none was written, or it is damaged: then records are copied again."""
        data = await self._tier.get_manifest(_place(f"sheet {level.name} {namespace.hex()} {number}"), deadline=_soon())
        return _unpacked(namespace, bytes(data)) if data is not None else {}

    async def write_sheet(
        self, level: Level, namespace: NamespaceId, number: int, sheet: Mapping[RecordKey, RecordKey]
    ) -> None:
        """Keep a sheet; the one before is forgotten."""
        place = _place(f"sheet {level.name} {namespace.hex()} {number}")
        await self._tier.put_manifest(place, _packed(sheet), deadline=_soon())


def num_sheets(num_records: int) -> int:
    """A power of two, so that a sheet lists about a thousand records."""
    number = 1
    while number < _SHEETS_MAX and number * _RECORDS_PER_SHEET < num_records:
        number *= 2
    return number


def sheet_of(key: RecordKey, number: int) -> int:
    """On which of so many sheets a record is listed."""
    return key.prefix[0] * number // 256


def _soon() -> Deadline:
    return Deadline.after(_CALL_S)


def _place(what: str) -> NamespaceId:
    return NamespaceId(hashlib.sha256(f"kvstore migration v1\0{what}".encode()).digest()[:NAMESPACE_BYTES])


def _packed(sheet: Mapping[RecordKey, RecordKey]) -> bytes:
    """Little-endian: magic, number of pairs, checksum over these; each the old and the new prefix, group, slice."""
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
    """What a state calls the sheets of a namespace at a level."""
    return f"{level.name} {namespace.hex()}"


def namespaces_of(state: State) -> list[NamespaceId]:
    """Of which there are sheets."""
    return sorted({NamespaceId(bytes.fromhex(name.split()[1])) for name in state.sheets})
