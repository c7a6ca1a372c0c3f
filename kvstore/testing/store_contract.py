"""The contract of `PageStore`: subclass `PageStoreContract`, give it a `node`, and every promise is tested.

    class TestMyStore(PageStoreContract):
        @pytest.fixture
        async def node(self):
            async with my_store(lease_s=LEASE_S) as store:
                yield StoreNode(store, ...)

The node's store must have an empty memory of at least 4 MiB, nothing stored, and leases of `LEASE_S`.
"""

from __future__ import annotations

from kvstore.testing.store_contract_care import CareContract
from kvstore.testing.store_contract_hits import HitContract
from kvstore.testing.store_node import LEASE_S, StoreNode

__all__ = ["LEASE_S", "PageStoreContract", "StoreNode"]


class PageStoreContract(HitContract, CareContract):
    """What every `PageStore` promises. Subclasses provide the fixture `node`."""
