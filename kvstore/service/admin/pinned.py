"""What a pin protects: its boundary, and every boundary before it."""

from __future__ import annotations

import numpy as np

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import PINNED_AT
from kvstore.errors import Unavailable
from kvstore.model.keys import PrefixHash
from kvstore.service.admin.catalog_access import Namespace
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.listing import entry_at, steps_of

__all__ = ["protected_by_pins"]

_WALK_S = 30.0


async def protected_by_pins(
    context: AdminContext, catalog: Catalog, namespace: Namespace, *, walk_s: float = _WALK_S
) -> set[PrefixHash]:
    """The boundaries of a namespace that stay: retention keeps the same ones.

    Args:
        context: The way there.
        catalog: Where to look.
        namespace: Whose.
        walk_s: How long a look at every entry may take.

    Raises:
        Unavailable: The catalog does not answer, or not all of it could be looked at in time.
    """
    deadline, now_s = context.soon(walk_s), context.now_s()
    protected: set[PrefixHash] = set()
    cursor: str | None = ""
    async for _, step in steps_of(catalog, namespace.id, "", deadline):
        for row in np.flatnonzero(step.table.present() & (step.table.numbers(PINNED_AT) > now_s)).tolist():
            entry = entry_at(namespace.id, step, row)
            protected.add(entry.prefix)
            parent = entry.parent
            while parent is not None and parent not in protected:
                protected.add(parent)
                before = await catalog.get(namespace.id, parent, deadline=context.soon())
                parent = before.parent if before is not None else None
        cursor = step.cursor
    if cursor is not None:
        raise Unavailable("the pins of the namespace could not be looked at in time")
    return protected
