"""Digests of LoRA adapters, which identify their content whatever their name, number or folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from connector.content import AdapterRequest, UncacheableContent
from connector.weights import digest_weights, file_identity
from kvstore.errors import InvalidRequest
from kvstore.runtime.meters import Meters

__all__ = ["Adapters", "find_adapter_files"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_CONFIG = "adapter_config.json"
_SUFFIXES = (".safetensors", ".bin", ".pt")
_BOUND_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Bound:
    """The content that an adapter's number is bound to in this engine: vLLM keeps the weights that it read first."""

    identities: tuple[str, ...]
    digest: bytes


def find_adapter_files(path: Path) -> list[Path]:
    """The files that say what an adapter is: its config and its weights, sorted by name.

    Raises:
        InvalidRequest: The folder is not there, or holds no adapter.
    """
    config = path / _CONFIG
    weights = sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not config.is_file() or not weights:
        raise InvalidRequest(f"expected a folder with {_CONFIG} and weights", path=path)
    return [config, *weights]


class Adapters:
    """Digests of the adapters that requests name. Belongs to one event loop; files are read in its threads.

    An adapter's number is bound to the content that is seen first. If its files change later, nobody can tell which
    weights vLLM uses, since it may read them again at any time: that number is no longer cached.

    Args:
        cache_folder: Where digests of files are cached.
        rules: The engine's settings that change what an adapter does, if any.
        meters: Counts requests whose adapter is not known.
    """

    def __init__(
        self, cache_folder: Path, rules: Mapping[str, str] | None = None, meters: Meters | None = None
    ) -> None:
        self._cache_folder = cache_folder
        self._meters = meters if meters is not None else Meters()
        self._rules = json.dumps(dict(rules), sort_keys=True).encode() if rules else b""
        self._bound: OrderedDict[int, _Bound] = OrderedDict()
        self._refused: dict[int, str] = {}
        self._turns: dict[int, asyncio.Lock] = {}

    async def digest_of(self, adapter: AdapterRequest) -> bytes:
        """SHA-256 of the adapter's content. Concurrent requests read its files once.

        Raises:
            UncacheableContent: Its files are missing, or have changed since the engine first used it.

        If cancelled, the next caller starts over.
        """
        try:
            async with self._turns.setdefault(adapter.number, asyncio.Lock()):
                return await self._look(adapter)
        except UncacheableContent as error:
            self._meters.add("connector_uncacheable_requests", reason=error.reason)
            raise

    async def _look(self, adapter: AdapterRequest) -> bytes:
        if adapter.number in self._refused:
            raise UncacheableContent("adapter_changed", self._refused[adapter.number])
        bound = self._bound.get(adapter.number)
        try:
            seen = await asyncio.get_running_loop().run_in_executor(None, self._read, adapter.path, bound)
        except (InvalidRequest, OSError) as error:
            raise UncacheableContent("adapter_files", str(error)) from error
        if bound is not None and bound.digest != seen.digest:
            self._refuse(adapter)
            raise UncacheableContent("adapter_changed", self._refused[adapter.number])
        self._bind(adapter.number, seen)
        return seen.digest

    def _bind(self, number: int, seen: _Bound) -> None:
        self._bound[number] = seen
        self._bound.move_to_end(number)
        if len(self._bound) > _BOUND_MAX:
            oldest, _ = self._bound.popitem(last=False)
            del self._turns[oldest]

    def _read(self, path: str, bound: _Bound | None) -> _Bound:
        files = find_adapter_files(Path(path).expanduser())
        identities = tuple(file_identity(file) for file in files)
        if bound is not None and bound.identities == identities:
            return bound
        digest = bytes.fromhex(digest_weights(files, self._cache_folder))
        if tuple(file_identity(file) for file in files) != identities:
            raise InvalidRequest("the adapter's files change while they are read", path=path)
        if self._rules:
            digest = hashlib.sha256(digest + self._rules).digest()
        return _Bound(identities, digest)

    def _refuse(self, adapter: AdapterRequest) -> None:
        reason = f"the files of the adapter in {adapter.path} changed while the engine may hold the old ones"
        self._refused[adapter.number] = reason
        _log.warning("kvstore: %s: requests with it are not cached; load a new version from a new folder", reason)
