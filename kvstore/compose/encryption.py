"""The store that a service serves: encrypted where the settings name keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from kvstore.compose.store import missing_package, open_store
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.tracing import Tracing
from kvstore.settings import Settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.encryption.key_ring import watch_keys
from kvstore.store.tiered import TieredStore

__all__ = ["open_served_store"]


@asynccontextmanager
async def open_served_store(
    settings: Settings, *, tracing: Tracing | None = None
) -> AsyncIterator[TieredStore | EncryptedStore]:
    """`open_store`, behind an `EncryptedStore` where `encryption_keys` is set.

    Raises:
        InvalidRequest: The keys cannot be used, or the package for it is not installed; else as `open_store`.
    """
    instruments = Instruments(tracing=tracing)
    if settings.encryption_keys is None:
        async with open_store(settings, instruments) as store:
            yield store
        return
    if find_spec("cryptography") is None:
        raise missing_package("encryption", "encryption_keys", "cryptography")
    keys = watch_keys(settings.encryption_keys)  # before anything is opened: a wrong key file opens nothing
    async with open_store(settings, instruments) as store:
        encrypted = EncryptedStore(store, keys)
        try:
            yield encrypted
        finally:
            await encrypted.aclose()
