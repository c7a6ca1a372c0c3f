"""What this node's memory has of a namespace's boundaries, asked for in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext
from kvstore.store.operations import PIECE_RECORDS_MAX

__all__ = ["all_keys", "held_at", "memory_sizes"]


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
    context: AdminContext, namespace: Namespace, prefixes: Sequence[PrefixHash]
) -> dict[tuple[int, int], int]:
    """For each boundary's index and group a bit per slice in memory; those without any are not in it."""
    deadline = context.soon()
    there: list[int] = []
    for start in range(0, len(prefixes), PIECE_RECORDS_MAX):
        piece = prefixes[start : start + PIECE_RECORDS_MAX]

        async def ask(piece: Sequence[PrefixHash] = piece) -> list[bool]:
            return await context.operations.in_memory(namespace.id, piece)

        answers = await context.bridge.call(ask, deadline=deadline)
        there += [start + index for index, is_there in enumerate(answers) if is_there]
    keys = [(index, key) for index in there for key in all_keys(namespace, prefixes[index])]
    sizes = await memory_sizes(context, [key for _, key in keys])
    held: dict[tuple[int, int], int] = {}
    for (index, key), size in zip(keys, sizes, strict=True):
        if size is not None:
            held[index, key.group] = held.get((index, key.group), 0) | 1 << key.slice
    return held
