"""Finds records of a tier that a complete catalog does not have."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.service.admin.context import AdminContext
from kvstore.service.credentials import Grant
from kvstore.store.operations import PIECE_RECORDS_MAX
from kvstore.tiers.base import Entry

__all__ = ["Orphans"]

_BATCH = 1024
_FOUND_MAX = 65_536
_CALL_S = 30.0


class _Case(Enum):
    """Which records of a namespace are orphans."""

    ALL = "all: neither the catalog nor a manifest has the namespace"
    COMPARE = "those that the catalog lacks"
    NONE = "none: an engine or a reindex may repair the namespace"


class Orphans:
    """Collects orphans from a listing. A service stores a record first and updates the catalog then, so each orphan is
    checked twice: at the end of its batch, and before it is deleted.

    Args:
        context: For calls to the catalog and the tiers.
        catalog: Complete.
        grant: An operator's.
        level: The tier that is listed.

    Attributes:
        found: Orphans with their bytes, at most 65,536.
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

    async def add(self, entry: Entry) -> None:
        """Add a record of the listing."""
        self._batch[entry.key] = entry.num_bytes
        if len(self._batch) >= _BATCH:
            await self.flush()

    async def flush(self) -> None:
        """Compare the batch with the catalog, and what the catalog lacks with the tier: a listing may be outdated."""
        batch, self._batch = self._batch, {}
        missing = await self._missing(list(batch))
        operations = self._context.operations
        sizes = await self._context.data_loop.call_in_pieces(
            missing,
            lambda piece, deadline: operations.stored_sizes(piece, self._level, deadline=deadline),
            _CALL_S,
        )
        for key, size in zip(missing, chain.from_iterable(sizes), strict=True):
            if size is None:
                continue
            if len(self.found) >= _FOUND_MAX:
                self.is_full = True
                return
            self.found[key] = batch[key]

    async def delete(self) -> None:
        """Delete what the catalog still lacks.

        Raises:
            Unavailable: A tier or the catalog does not answer; what was deleted stays deleted.
        """
        keys, operations = list(self.found), self._context.operations
        for start in range(0, len(keys), PIECE_RECORDS_MAX):
            await self._context.data_loop.call_in_pieces(
                await self._missing(keys[start : start + PIECE_RECORDS_MAX]),
                lambda piece, deadline: operations.delete(piece, self._level, deadline=deadline),
                _CALL_S,
            )

    async def _missing(self, keys: Sequence[RecordKey]) -> list[RecordKey]:
        """Those that the catalog lacks."""
        by_namespace: dict[NamespaceId, list[RecordKey]] = {}
        for key in keys:
            by_namespace.setdefault(key.namespace, []).append(key)
        missing: list[RecordKey] = []
        for namespace, listed in by_namespace.items():
            case = await self._case_of(namespace)
            if case is _Case.ALL:
                missing += listed
            elif case is _Case.COMPARE:
                rows: dict[PrefixHash, int] = {}
                for key in listed:
                    rows.setdefault(key.prefix, len(rows))
                table = await self._catalog.lookup(namespace, list(rows), deadline=self._context.soon())
                missing += [
                    key
                    for key in listed
                    # a leaving boundary is being deleted by its owner
                    if not table.leaves(rows[key.prefix], self._level)
                    and not table.has(rows[key.prefix], self._level, key.group, key.slice)
                ]
        return missing

    async def _case_of(self, namespace: NamespaceId) -> _Case:
        """What to do with a namespace's records. A namespace without a manifest is repaired by an engine that opens it,
        and one that the catalog lacks by a reindex.

        Raises:
            Unavailable: A tier that may have its manifest does not answer.
        """
        if namespace not in self._cases:
            context = self._context
            tenant = await context.catalog.tenant_of(namespace)
            manifest = await context.data_loop.call(
                lambda deadline: context.operations.manifest(namespace, deadline=deadline)
            )
            if tenant is not None and manifest is not None:
                await context.catalog.find(namespace, self._grant)  # registers the layout, so entries can be read
                self._cases[namespace] = _Case.COMPARE
            else:
                self._cases[namespace] = _Case.ALL if tenant is None and manifest is None else _Case.NONE
        return self._cases[namespace]
