"""Makes the components of a service's store from its settings, which the components do not know."""

from __future__ import annotations

from kvstore.compose.retention import open_book
from kvstore.compose.store import open_catalog, open_served_store, open_store, open_tier

__all__ = ["open_book", "open_catalog", "open_served_store", "open_store", "open_tier"]
