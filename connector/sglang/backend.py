"""`KVStoreHiCache`: SGLang's HiCache over a kvstore service (`--hicache-storage-backend dynamic`).

SGLang calls it from its scheduler's process: when it starts, and then from threads for prefetching and for backups. An
error in one of these ends prefetching for good, so no call but the constructor raises: what fails is a miss.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from connector.guard import never_raises
from connector.settings import STORE_SETTINGS, ConnectorSettings, cache_folder
from connector.sglang.engine import WeightsWatch, identify_weights, read_engine
from connector.sglang.pools import KV, PoolMemory, Ranks, view_of
from kvstore.client import PageDoor, describe_pages
from kvstore.codec import CodecPool
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.coverage import usable_lengths
from kvstore.model.keys import NamespaceId

_log = logging.getLogger("sglang.kvstore")

_SETTINGS = (*STORE_SETTINGS, "trust_mm_uuids")
_SGLANGS = {
    *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "hicache_storage_pass_prefix_keys"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "allocator"),
}
"""What SGLang itself reads of `--hicache-storage-backend-extra-config`, where our settings are too."""
_FORMAT = 1
_NUM_THREADS = 4
_CODEC_BYTES = 256 << 20
_ROUNDS_MAX = 16
"""How often a lookup of several pools is repeated for what turned out to be missing."""


def _say(backend: KVStoreHiCache, call: str, error: Exception) -> None:
    backend.say(call, error)


_harmless = partial(never_raises, _say)  # an error that left would end SGLang's thread
"""Makes a call that never raises: each kind of failure is logged once. Its argument is called with those of the call,
and returns the answer "nothing is there"."""


def _none(*_: object, **__: object) -> None:
    return None


def _no_page(keys: Sequence[str] = (), *_: object, **__: object) -> list[bool]:
    return [False] * len(keys or ())


def _no_transfer(transfers: Sequence[PoolTransfer] = (), *_: object, **__: object) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers or ()}


class KVStoreHiCache(HiCacheStorage):
    """A storage backend of HiCache.

    Args:
        storage_config: This rank, and `extra_config` with our settings.
        kwargs: What SGLang's factory passes on; nothing of it is used.

    Raises:
        InvalidRequest: A setting is wrong, or a file that it names.

    Attributes:
        identified: Set when the weights are known, or cannot be: then each call misses.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._config = storage_config
        extra = storage_config.extra_config or {}
        ours = {key: value for key, value in extra.items() if key not in _SGLANGS}
        self._settings = settings = ConnectorSettings.parse(ours, only=_SETTINGS)
        self._in_place = bool(extra.get("interface_v1", 0))
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._pools: dict[str, _Pool] = {}
        self.registered_pools: dict[str, Any] = {}
        self._fields: dict[str, Any] | None = None
        self.identified = threading.Event()
        self._weights_watch = WeightsWatch()
        self._weights: tuple[str, ...] = ()
        self._refusal = "dcp_size is not supported" if storage_config.dcp_size > 1 else ""
        name = f"sglang pid {os.getpid()} rank {storage_config.tp_rank}"
        self._store = settings.connect(name, settings.read_token(), saves=True)
        self._threads = CodecPool(num_threads=_NUM_THREADS, limit_bytes=_CODEC_BYTES)
        threading.Thread(target=self._identify, name="kvstore-weights", daemon=True).start()

    # what SGLang tells

    @_harmless(_none)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    @_harmless(_none)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        with self._lock:
            self.registered_pools[str(host_pool_name)] = host_pool
            self._pools.pop(str(host_pool_name), None)

    # pages in place, and whole pages

    @_harmless(_no_page)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        pool = self._readable(KV)
        num_read = pool.read(keys, host_indices) if pool is not None else 0
        return [index < num_read for index in range(len(keys))]

    @_harmless(_no_page)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        pool = self._writable(KV)
        return pool.write(keys, host_indices, _before(extra_info)) if pool is not None else [False] * len(keys)

    @_harmless(_none)
    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        pool = self._readable(KV)
        if pool is None:
            return None
        target = pool.memory.new_page() if target_location is None else target_location
        return target if pool.door.read_into([key], [[_contiguous(target)]]) else None

    @_harmless(lambda keys=(), *_, **__: [None] * len(keys or ()))
    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        pool = self._readable(KV)
        if pool is None:
            return [None] * len(keys)
        targets = [pool.memory.new_page() for _ in keys] if target_locations is None else target_locations
        num_read = pool.door.read_into(keys, [[_contiguous(target)] for target in targets])
        return [target if index < num_read else None for index, target in enumerate(targets)]

    @_harmless(lambda *_, **__: False)
    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return value is not None and self._set([key], [value])

    @_harmless(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return values is not None and self._set(keys, values)

    def _set(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> bool:
        pool = self._writable(KV)
        if pool is None or not pool.ranks.writes:
            return pool is not None
        return all(pool.door.write_from(keys, [[view_of(value)] for value in values]))

    @_harmless(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return bool(self._exists([key]))

    @_harmless(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._exists(keys, extra_info)

    def _exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        pool = self._readable(KV)
        if pool is None or not keys:
            return 0
        num_pages = pool.door.exists(keys, after=_before(extra_info))
        pool.door.report(keys[-1], keys, num_pages, reason="nothing_stored", held=_held(extra_info))
        return num_pages

    # several pools

    @_harmless(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        wanted = [one for one in pool_transfers or () if one.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        pools = [self._readable(KV), *(self._readable(str(one.name)) for one in wanted)]
        if any(pool is None for pool in pools):
            return PoolTransferResult.empty()
        found = _Found([pool for pool in pools if pool is not None], [None, *map(_last_pages, wanted)], keys)
        num_pages = found.fetch_longest(_before(extra_info))
        reach = [found.reach(index) for index in range(len(pools))]
        found.report(num_pages, reach[0], held=_held(extra_info))
        hits = {str(one.name): pages for one, pages in zip(wanted, reach[1:], strict=True) if pages}
        return PoolTransferResult(
            num_pages, {**({KV: reach[0]} if reach[0] else {}), **hits}, found.lengths(at_most=num_pages)
        )

    @_harmless(_no_transfer)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        answers = {}
        for transfer in transfers:
            answers[transfer.name] = self._get_pool(transfer.keys or [], transfer)
        return answers

    @_harmless(_no_page)
    def _get_pool(self, keys: Sequence[str], transfer: PoolTransfer) -> list[bool]:
        pool = self._readable(str(transfer.name))
        num_read = pool.read(keys, transfer.host_indices) if pool is not None else 0
        return [index < num_read for index in range(len(keys))]

    @_harmless(_no_transfer)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        answers = {}
        for transfer in transfers:
            answers[transfer.name] = self._set_pool(transfer.keys or [], transfer, _before(extra_info))
        return answers

    @_harmless(_no_page)
    def _set_pool(self, keys: Sequence[str], transfer: PoolTransfer, after: str | None) -> list[bool]:
        pool = self._writable(str(transfer.name))
        return pool.write(keys, transfer.host_indices, after) if pool is not None else [False] * len(keys)

    # life

    def clear(self) -> bool:
        """SGLang's wish to empty its storage: not followed, since other engines may use the same pages."""
        self.say("clear", InvalidRequest("pages are shared: remove them with `kvstore rm`"))
        return False

    @_harmless(_none)
    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._store.close()
        self._threads.close()

    # which pages

    def _identify(self) -> None:
        """Find out which weights the engine has, in the background for minutes: until then each call misses."""
        if fields := self._find_fields():
            self._fields = fields
            _log.info("kvstore: caching for SGLang at %s, weights %s", self._settings.url, fields["weights_id"])
        self.identified.set()

    def namespaces(self) -> dict[str, NamespaceId]:
        """The namespace of each pool that was used so far."""
        with self._lock:
            pools = dict(self._pools)
        return {name: pool.door.namespace for name, pool in pools.items() if pool.door.namespace is not None}

    @_harmless(_none)
    def _find_fields(self) -> dict[str, Any] | None:
        self._weights, engine = self._weights_watch.now(), read_engine()
        if engine.has_adapters:
            raise InvalidRequest("not cached: SGLang's page keys do not tell the content of adapters")
        if engine.takes_media and not self._settings.trust_mm_uuids:
            raise InvalidRequest("not cached: clients may choose the hashes of media; see trust_mm_uuids")
        config = self._config
        return {
            "format": _FORMAT,
            "engine": f"sglang {engine.release}",
            **identify_weights(engine, self._settings.weights_id, cache_folder()),
            "engine_settings": dict(engine.settings),
            "pipeline": [int(config.pp_rank), int(config.pp_size)],
            "context": [int(config.attn_cp_rank), int(config.attn_cp_size)],
        }

    def _readable(self, name: str) -> _Pool | None:
        """A pool to read from, if it is known and the operator wants that."""
        return self._pool(name) if self._settings.loads else None

    def _writable(self, name: str) -> _Pool | None:
        """A pool to write to, if it is known and the operator wants that."""
        return self._pool(name) if self._settings.saves else None

    def _pool(self, name: str) -> _Pool | None:
        """A pool's pages; `None`: the weights are not known, or have changed."""
        if self._fields is None or self._refusal:
            if self._refusal:
                self.say("refused", InvalidRequest(self._refusal))
            return None
        now = self._weights_watch.now()
        if now and self._weights and now != self._weights:
            self._refusal = "the engine's weights have changed: restart it, or attach the storage again"
            return None
        with self._lock:
            if name not in self._pools:
                self._pools[name] = self._open(name, self._fields)
            return self._pools[name]

    def _open(self, name: str, fields: dict[str, Any]) -> _Pool:
        if name not in self.registered_pools:
            raise InvalidRequest("SGLang did not register this pool", pool=name)
        ranks = Ranks.of(self._config, name, self.registered_pools[name])
        in_place = self._in_place or name != KV
        memory = PoolMemory(self.registered_pools[name], in_place=in_place, split=len(ranks.slices))
        description = describe_pages(
            {
                **fields,
                "model": f"{fields['architecture']} sglang {name}".strip(),
                "pool": {"name": name, **memory.describe()},
            },
            page_tokens=memory.page_tokens,
            num_slices=ranks.num_slices,
            chained=name == KV,
        )
        door = PageDoor(
            self._store,
            description,
            slices=ranks.slices,
            element_bytes=memory.element_bytes,
            timeout_s=self._settings.max_wait_ms / 1000,
            pool=self._threads,
        )
        return _Pool(memory, ranks, door)

    def say(self, call: str, error: Exception) -> None:
        """Log that a call failed: each kind of failure once."""
        kind = f"{call} {type(error).__name__}"
        if kind not in self._said and len(self._said) < 1000:
            self._said.add(kind)
            trace = None if isinstance(error, (KVStoreError, OSError)) else error
            _log.warning("kvstore: %s: %s (said once)", call, error, exc_info=trace)


class _Pool:
    """A pool and its pages in the store."""

    def __init__(self, memory: PoolMemory, ranks: Ranks, door: PageDoor) -> None:
        self.memory = memory
        self.ranks = ranks
        self.door = door

    def read(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> int:
        """Read pages into slots; returns how many from the first on."""
        if self.memory.in_place:
            return self.door.read_into(keys, self.memory.pages(host_indices, len(keys)))
        slots = self.memory.checked(host_indices, len(keys))
        pages = [self.memory.new_page() for _ in keys]
        num_read = self.door.read_into(keys, [[_contiguous(page)] for page in pages])
        self.memory.put(slots, pages[:num_read])
        return num_read

    def write(self, keys: Sequence[str], host_indices: torch.Tensor | None, after: str | None) -> list[bool]:
        """Store the pages of slots, if that is this rank's task."""
        if not self.ranks.writes:
            return [True] * len(keys)
        find = self.memory.pages if self.memory.in_place else self.memory.copies
        return self.door.write_from(keys, find(host_indices, len(keys)), after=after)


class _Found:
    """Which pages of a chain each pool has, and the longest beginning that all of them can restore."""

    def __init__(self, pools: Sequence[_Pool], last_pages: Sequence[int | None], keys: Sequence[str]) -> None:
        self._pools, self._last_pages, self._keys = pools, last_pages, keys
        first = pools[0].door.present(keys)
        end = first.index(False) if False in first else len(first)
        # What is behind the first pool's beginning is of no use. And a store without an index asks for a few pages of a
        # query alone, its last one among them: that is where a state is.
        behind = [False] * (len(keys) - end)
        self._present = [first, *(pool.door.present(keys[:end]) + behind for pool in pools[1:])]

    def lengths(self, *, at_most: int) -> list[int]:
        """The lengths that all pools can restore, ascending."""
        return usable_lengths(at_most, list(zip(self._present, self._last_pages, strict=True)))

    def reach(self, index: int) -> int:
        """The longest beginning that the first pool and this one can restore."""
        both = {0, index}
        lengths = usable_lengths(len(self._keys), [(self._present[at], self._last_pages[at]) for at in both])
        return lengths[-1] if lengths else 0

    def report(self, num_pages: int, num_first: int, *, held: int) -> None:
        """Report for `kvstore explain` how far a query reached, under its last key: SGLang names no request here.

        Args:
            num_pages: That all pools can restore.
            num_first: That the first one can.
            held: Pages before those of the query.
        """
        if self._keys:
            reason = "nothing_stored" if num_first <= num_pages else "group_incomplete"
            self._pools[0].door.report(self._keys[-1], self._keys, num_pages, reason=reason, held=held)

    def fetch_longest(self, after: str | None) -> int:
        """Fetch what the longest beginning needs. What is missing after all shortens it."""
        for _ in range(_ROUNDS_MAX):
            lengths = self.lengths(at_most=len(self._keys))
            if not lengths or self._fetch(lengths[-1], after):
                return lengths[-1] if lengths else 0
        return 0

    def _fetch(self, num_pages: int, after: str | None) -> bool:
        for pool, last, present in zip(self._pools, self._last_pages, self._present, strict=True):
            start = 0 if last is None else max(0, num_pages - last)
            found = pool.door.exists(self._keys[start:num_pages], after=after if last is None else None)
            if start + found < num_pages:
                present[start + found] = False
                return False
        return True


def _last_pages(transfer: PoolTransfer) -> int | None:
    """How many of the last pages a pool needs; `None`: all."""
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return max(1, len(transfer.keys or ()))
    return None


def _before(extra_info: HiCacheStorageExtraInfo | None) -> str | None:
    """The key of the page before those of a call, if SGLang passes it (`hicache_storage_pass_prefix_keys`)."""
    prefix_keys = extra_info.prefix_keys if extra_info is not None else None
    return prefix_keys[-1] if prefix_keys else None


def _held(extra_info: HiCacheStorageExtraInfo | None) -> int:
    """Pages before those of a call, if SGLang passes their keys."""
    return len(extra_info.prefix_keys or ()) if extra_info is not None else 0


def _contiguous(tensor: torch.Tensor) -> memoryview:
    if not tensor.is_contiguous():
        raise InvalidRequest("a page is read into contiguous memory")
    return view_of(tensor)
