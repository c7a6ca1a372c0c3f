"""Wires the store that a service serves: encrypted where the settings name keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from kvstore.compose import open_store
from kvstore.errors import InvalidRequest
from kvstore.runtime.tracing import Tracing
from kvstore.settings import Settings
from kvstore.store.encrypted import EncryptedStore
from kvstore.store.key_ring import watch_keys
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
    if settings.encryption_keys is None:
        async with open_store(settings, tracing=tracing) as store:
            yield store
        return
    if find_spec("cryptography") is None:
        raise InvalidRequest(
            "the setting encryption_keys needs a package that is not installed: pip install 'kvstore-vllm[encryption]'",
            missing="cryptography",
        )
    keys = watch_keys(settings.encryption_keys)  # before anything is opened: a wrong key file opens nothing
    async with open_store(settings, tracing=tracing) as store:
        encrypted = EncryptedStore(store, keys)
        try:
            yield encrypted
        finally:
            await encrypted.aclose()
