"""A secondary tier for vLLM's `TieringOffloadingSpec`: its chunks, under its own keys, in a kvstore service."""

from connector.offloading.tier import KVStoreTier

__all__ = ["KVStoreTier"]
