"""What this node's memory has of a namespace's boundaries, asked for in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext
from kvstore.store.upkeep.operations import PIECE_RECORDS_MAX

__all__ = ["all_keys", "held_at", "memory_sizes"]

_KEYS_MAX = 65_536
_PAUSE_BOUNDARIES = 64


def all_keys(namespace: Namespace, prefix: PrefixHash) -> list[RecordKey]:
    """Every record that a boundary may have."""
    return [
        RecordKey(namespace.id, prefix, group, slice_)
        for group, layout in enumerate(namespace.layout.groups)
        for slice_ in range(layout.num_slices)
    ]


async def memory_sizes(context: AdminContext, keys: Sequence[RecordKey]) -> list[int | None]:
    """For each record its bytes in memory; `None`: it is not there."""
    deadline = context.soon()
    sizes: list[int | None] = []
    for start in range(0, len(keys), PIECE_RECORDS_MAX):
        piece = keys[start : start + PIECE_RECORDS_MAX]

        async def ask(piece: Sequence[RecordKey] = piece) -> list[int | None]:
            return await context.operations.memory_sizes(piece, deadline=deadline)

        sizes += await context.bridge.call(ask, deadline=deadline)
    return sizes


async def held_at(
    context: AdminContext, namespace: Namespace, prefixes: Sequence[PrefixHash], indexes: Sequence[int]
) -> dict[tuple[int, int], int]:
    """For each boundary's index and group a bit per slice in memory; those without any are not in it.

    Args:
        context: The way there.
        namespace: Whose boundaries.
        prefixes: All of a prompt's.
        indexes: Which of them to look for, chosen without knowledge of what others have: the time of the answer must
            not tell of it. Of more than 65,536 records the first are looked for.
    """
    keys: list[tuple[int, RecordKey]] = []
    for index in indexes:
        keys += [(index, key) for key in all_keys(namespace, prefixes[index])]
        if len(keys) >= _KEYS_MAX:
            break
        if index % _PAUSE_BOUNDARIES == 0:
            await asyncio.sleep(0)
    sizes = await memory_sizes(context, [key for _, key in keys])
    held: dict[tuple[int, int], int] = {}
    for (index, key), size in zip(keys, sizes, strict=True):
        if size is not None:
            held[index, key.group] = held.get((index, key.group), 0) | 1 << key.slice
    return held
