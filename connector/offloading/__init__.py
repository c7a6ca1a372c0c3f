"""A secondary tier for vLLM's `TieringOffloadingSpec`: its chunks, under its own keys, in a kvstore service.

vLLM finds `KVStoreTier` here (`"module_path": "connector.offloading"`). It is imported on first access, so the other
modules of this package can be used and tested without vLLM.
"""

from typing import Any

__all__ = ["KVStoreTier"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreTier":
        from connector.offloading.tier import KVStoreTier

        return KVStoreTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
