"""Records of a tier that the catalog does not tell of, although it knows of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import EntryTable, Level
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.service.admin.context import AdminContext
from kvstore.service.credentials import Grant
from kvstore.store.upkeep.operations import PIECE_RECORDS_MAX
from kvstore.tiers.base import Entry

__all__ = ["Orphans"]

_BATCH = 1024
_FOUND_MAX = 65_536
_CALL_S = 30.0


class _Case(Enum):
    """Which records of a namespace are orphans."""

    ALL = "nobody knows of it"
    COMPARE = "those that the catalog lacks"
    LEAVE = "it may be mended"


class Orphans:
    """Collects them from a listing. A service stores a record first and tells the catalog then, so each is looked at
    again before it counts: the second look comes no sooner than the end of its batch, and before it is deleted.

    Args:
        context: The way to catalog and tiers.
        catalog: Complete.
        grant: An operator's.
        level: Which tier is listed.

    Attributes:
        found: Records with their bytes, 65,536 at most.
        is_full: There are more.
    """

    def __init__(self, context: AdminContext, catalog: Catalog, grant: Grant, level: Level) -> None:
        self.found: dict[RecordKey, int] = {}
        self.is_full = False
        self._context = context
        self._catalog = catalog
        self._grant = grant
        self._level = level
        self._batch: dict[RecordKey, int] = {}
        self._cases: dict[NamespaceId, _Case] = {}

    async def look_at(self, entry: Entry) -> None:
        """One more record of the listing."""
        self._batch[entry.key] = entry.num_bytes
        if len(self._batch) >= _BATCH:
            await self.look()

    async def look(self) -> None:
        """Compare what was listed with the catalog, and what it lacks with the tier: a listing may be old."""
        batch, self._batch = self._batch, {}
        lacking = await self._lacking(list(batch))
        for key in await self._still_there(lacking):
            if len(self.found) >= _FOUND_MAX:
                self.is_full = True
                return
            self.found[key] = batch[key]

    async def delete(self) -> None:
        """Delete what is still unknown to the catalog.

        Raises:
            Unavailable: A tier or the catalog does not answer; what was deleted stays so.
        """
        keys = list(self.found)
        for start in range(0, len(keys), PIECE_RECORDS_MAX):
            piece = await self._lacking(keys[start : start + PIECE_RECORDS_MAX])
            if piece:
                await self._delete(piece)

    async def _delete(self, piece: Sequence[RecordKey]) -> None:
        context, deadline = self._context, self._context.soon(_CALL_S)
        await context.bridge.call(
            lambda: context.operations.delete(piece, self._level, deadline=deadline), deadline=deadline
        )

    async def _lacking(self, keys: Sequence[RecordKey]) -> list[RecordKey]:
        by_namespace: dict[NamespaceId, list[RecordKey]] = {}
        for key in keys:
            by_namespace.setdefault(key.namespace, []).append(key)
        lacking: list[RecordKey] = []
        for namespace, listed in by_namespace.items():
            case = await self._case_of(namespace)
            if case is not _Case.COMPARE:
                lacking += listed if case is _Case.ALL else []
                continue
            rows: dict[PrefixHash, int] = {}
            for key in listed:
                rows.setdefault(key.prefix, len(rows))
            table = await self._catalog.lookup(namespace, list(rows), deadline=self._context.soon())
            lacking += [key for key in listed if not self._tells_of(table, rows[key.prefix], key)]
        return lacking

    def _tells_of(self, table: EntryTable, row: int, key: RecordKey) -> bool:
        is_leaving = table.leaves(row, self._level)  # somebody is deleting it
        return is_leaving or table.has(row, self._level, key.group, key.slice)

    async def _case_of(self, namespace: NamespaceId) -> _Case:
        """What is known of a namespace. One that the catalog has and nobody describes, or that is described and the
        catalog does not have, may yet be mended: by the engine that opens it, or by a reindex.

        Raises:
            Unavailable: A tier that may have its description does not answer.
        """
        if namespace not in self._cases:
            context, deadline = self._context, self._context.soon()
            tenant = await context.catalog.tenant_of(namespace, deadline=deadline)
            manifest = await context.bridge.call(
                lambda: context.operations.manifest(namespace, deadline=deadline), deadline=deadline
            )
            if tenant is not None and manifest is not None:
                await context.catalog.find(namespace, self._grant, deadline=context.soon())  # entries can be read now
                self._cases[namespace] = _Case.COMPARE
            else:
                self._cases[namespace] = _Case.ALL if tenant is None and manifest is None else _Case.LEAVE
        return self._cases[namespace]

    async def _still_there(self, keys: Sequence[RecordKey]) -> list[RecordKey]:
        there: list[RecordKey] = []
        for start in range(0, len(keys), PIECE_RECORDS_MAX):
            piece = keys[start : start + PIECE_RECORDS_MAX]
            sizes = await self._sizes(piece)
            there += [key for key, size in zip(piece, sizes, strict=True) if size is not None]
        return there

    async def _sizes(self, piece: Sequence[RecordKey]) -> Sequence[int | None]:
        context, deadline = self._context, self._context.soon(_CALL_S)
        return await context.bridge.call(
            lambda: context.operations.stored_sizes(piece, self._level, deadline=deadline), deadline=deadline
        )
