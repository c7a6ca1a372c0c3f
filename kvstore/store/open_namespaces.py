"""The namespaces that are open on a node: so many; one more takes the place of one that nobody uses any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.model.layout import Layout
from kvstore.runtime.budget import Shares
from kvstore.runtime.clock import Clock

__all__ = ["OpenNamespaces"]

_IDLE_S = 600.0
"""What was used since stays open, whoever else comes: an engine whose weights change opens a namespace for each."""


@dataclass(slots=True)
class _Open:
    layout: Layout
    tenant: str
    num_bytes: int
    used_s: float


class OpenNamespaces:
    """Knows the layout and the tenant of each, and which was used longest ago. Tenants share the places, and the bytes
    of descriptions.

    Args:
        limit: So many at a time.
        clock: For the time of use.
        description_bytes: So many bytes of descriptions at a time.
    """

    def __init__(self, limit: int, clock: Clock, description_bytes: int = 64 << 20) -> None:
        self._places = Shares(limit)
        self._bytes = Shares(description_bytes)
        self._clock = clock
        self._open: OrderedDict[NamespaceId, _Open] = OrderedDict()  # the one that was used longest ago first

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[NamespaceId]:
        return iter(self._open)

    def open(self, namespace: NamespaceId, layout: Layout, tenant: str = "", num_bytes: int = 0) -> list[NamespaceId]:
        """Open one, or use it again; returns those that were closed for it: of the same tenant if it has its share,
        else whoever's were not used for longest.

        Args:
            namespace: Its id.
            layout: Its layout.
            tenant: Whose it is.
            num_bytes: Bytes of its description.

        Raises:
            Unavailable: All that would have to be closed are in use.
        """
        closed: list[NamespaceId] = []
        if namespace not in self._open:
            while not self._has_room(tenant, num_bytes):
                oldest = self._idle(tenant)
                if oldest is None:
                    raise Unavailable(
                        "too many namespaces are in use on this node, or their descriptions are too long",
                        limit=self._places.limit,
                        limit_bytes=self._bytes.limit,
                        tenant=tenant,
                    )
                self._close(oldest)
                closed.append(oldest)
            self._places.take(tenant, 1)
            self._bytes.take(tenant, num_bytes)
            self._open[namespace] = _Open(layout, tenant, num_bytes, 0.0)
        self.use(namespace)
        return closed

    def _has_room(self, tenant: str, num_bytes: int) -> bool:
        return self._places.left_for(tenant) >= 1 and self._bytes.left_for(tenant) >= num_bytes

    def _idle(self, tenant: str) -> NamespaceId | None:
        """The namespace to close: the tenant's own that was not used for longest, else anybody's."""
        now_s, others = self._clock.monotonic_s(), None
        for namespace, held in self._open.items():
            if now_s - held.used_s < _IDLE_S:
                break
            if held.tenant == tenant:
                return namespace
            others = others or namespace
        return others

    def _close(self, namespace: NamespaceId) -> None:
        held = self._open.pop(namespace)
        self._places.give_back(held.tenant, 1)
        self._bytes.give_back(held.tenant, held.num_bytes)

    def use(self, namespace: NamespaceId) -> Layout | None:
        """The layout of a namespace that is used now; `None`: it is not open."""
        held = self._open.get(namespace)
        if held is None:
            return None
        held.used_s = self._clock.monotonic_s()
        self._open.move_to_end(namespace)
        return held.layout

    def tenant_of(self, namespace: NamespaceId) -> str:
        """Whose an open namespace is; empty: nobody's, or it is not open."""
        held = self._open.get(namespace)
        return held.tenant if held is not None else ""

    def of_tenant(self, tenant: str) -> int:
        """How many a tenant has open."""
        return self._places.used_by(tenant)
