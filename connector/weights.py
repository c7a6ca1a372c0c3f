"""The content of weights: digests of weight files and of adapters, and the file with the id of weights that change.

Two checkpoints under one name must never share pages, so weights are identified by their bytes.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from connector.facts import ModelFacts
from connector.logs import LOG
from connector.prefix_hash import AdapterRequest, UncacheableContent
from kvstore.errors import InvalidRequest
from kvstore.runtime.meters import Meters

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BY_SUFFIX = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "sharded_state")
"""Load formats that prefer safetensors if there are any."""
_ANY_FILE = ("pt", "npcache", "gguf", "bitsandbytes")
_GGUF_PART = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}\.gguf")
_INDEX = ".safetensors.index.json"
_CONSOLIDATED = "consolidated"
"""With these names begin the files of a second form of the weights, Mistral's own, which may be in the same folder."""

_CHUNK_BYTES = 8 << 20
_ID_BYTES_MAX = 1024
_WEIGHTS_ID = re.compile(rb"[!-~]([ -~]{0,254}[!-~])?")
_SHA256_HEX = re.compile("[0-9a-f]{64}")

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_SUFFIXES = (".safetensors", ".bin", ".pt")
_ADAPTERS_MAX = 10_000


def find_weight_files(model_path: str, load_format: str = "auto") -> list[Path]:
    """The weight files of a model folder (or the file that `model_path` is, with its other parts), sorted by name.

    Args:
        load_format: vLLM's setting: which of the files it reads, or that the weights come from elsewhere.

    Raises:
        InvalidRequest: There are none, or the weights are not from files: the operator has to set `weights_id`.
    """
    if load_format not in (*_BY_SUFFIX, *_ANY_FILE):
        raise InvalidRequest(
            "these weights are not those of the model's files; set weights_id",
            field="weights_id",
            load_format=load_format,
        )
    path = Path(model_path)
    if path.is_file():
        part = _GGUF_PART.fullmatch(path.name)
        return [path] if part is None else sorted(path.parent.glob(f"{glob.escape(part[1])}-?????-of-?????.gguf"))
    files = sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES and file.is_file())
    if load_format in _BY_SUFFIX and any(file.suffix == ".safetensors" for file in files):
        files = [file for file in files if file.suffix == ".safetensors"]
    if not files:
        raise InvalidRequest("found no weight files to digest; set weights_id", field="weights_id", model=model_path)
    return files


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files of any form."""
    return any(file.suffix in _SUFFIXES for file in folder.glob("*"))


def digest_weights(files: Sequence[Path], cache_folder: Path, on_read: Callable[[], None] = lambda: None) -> str:
    """SHA-256 over names and contents of `files`, as hex.

    Reads all bytes once (about 1 GB/s per core, files in parallel). Digests of single files are cached in
    `cache_folder` by path, size, dates and inode, so that the next start reads nothing.

    Args:
        on_read: Called before the first file is read, if not all digests are cached.
    """
    cache = cache_folder / "weights.json"
    known = _read_cache(cache)
    # before reading: a file that is replaced during it must not be cached under the digest of its old content
    identities = [file_identity(file) for file in files]
    if not known.keys() >= set(identities):
        on_read()
        with ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvstore-weights") as pool:
            digests = pool.map(lambda name, file: known.get(name) or _digest_file(file), identities, files)
            known |= dict(zip(identities, digests, strict=True))
        _write_cache(cache, known)
    total = hashlib.sha256()
    for file, identity in zip(files, identities, strict=True):
        name = file.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + bytes.fromhex(known[identity]))
    return total.hexdigest()


def digest_files(paths: Iterable[Path], folder: Path) -> str:
    """SHA-256 over names and contents of files, as hex; empty: there are none.

    Args:
        folder: Names are relative to it.
    """
    found = sorted(path for path in paths if path.is_file())
    digest = hashlib.sha256()
    for path in found:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest() if found else ""


def digest_model(
    model_path: str, load_format: str, cache_folder: Path, on_read: Callable[[], None] = lambda: None
) -> str:
    """The digest of a model's weight files, and of what chooses among them if the engine does not read all.

    Raises:
        InvalidRequest: They cannot be digested: the operator has to set `weights_id`.
        OSError: A file cannot be read.
    """
    files = find_weight_files(model_path, load_format)
    digest = digest_weights(files, cache_folder, on_read)
    choice = _choice_among(files, load_format)
    return hashlib.sha256(f"{digest} read as {choice}".encode()).hexdigest() if choice else digest


def _choice_among(files: Sequence[Path], load_format: str) -> str:
    """What chooses the files that are read: the load format, and the indexes. Empty: all of them are read.

    An engine reads one of several forms, and of safetensors only the files that an index names, if there is one.
    """
    safetensors = {file.name for file in files if file.suffix == ".safetensors"}
    forms = {_CONSOLIDATED if file.name.startswith(_CONSOLIDATED) else file.suffix for file in files}
    indexes = sorted(files[0].parent.glob(f"*{_INDEX}")) if safetensors else []
    if len(forms) == 1 and all(_names_in(index) == safetensors for index in indexes):
        return ""
    digests = {index.name: _digest_file(index) for index in indexes}
    return json.dumps([load_format, digests], sort_keys=True)


def _names_in(index: Path) -> set[str] | None:
    """The files that an index names; `None`: it is none."""
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def stamp_weights(paths: Sequence[str], load_format: str) -> str:
    """Changes if a weight file is replaced; empty: there are no files. Unlike a file's identity it has only what every
    file system keeps.
    """
    try:
        found = [file for path in paths for file in find_weight_files(path, load_format)]
        files = [(file.resolve(), file.stat()) for file in found]
    except (InvalidRequest, OSError):
        return ""
    text = json.dumps([[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in files])
    return hashlib.sha256(text.encode()).hexdigest()


def are_unchanged(facts: ModelFacts) -> bool:
    """Whether the weight files are still those that the engine read at its start. False if that is not known."""
    stamp = stamp_weights((facts.model_path, *facts.part_paths), facts.load_format)
    return stamp != "" and stamp == facts.weights_stamp


def find_weights_id(facts: ModelFacts, cache_folder: Path, on_read: Callable[[], None] = lambda: None) -> str:
    """The id of an engine's weights, including a draft model's: a digest, which reads all of their bytes once.

    Args:
        on_read: Called before a file is read whose digest is not cached.

    Raises:
        InvalidRequest: They cannot be digested, or changed after the engine had read them. For the former the operator
            has to set `weights_id`.
        OSError: A file cannot be read.
    """
    own = digest_model(facts.model_path, facts.load_format, cache_folder, on_read)
    for path in facts.part_paths:
        part = digest_model(path, facts.load_format, cache_folder, on_read)
        own = hashlib.sha256(f"{own} with the part {part}".encode()).hexdigest()
    # the engine has the files that were there at its start, and these are digested later, for minutes
    if facts.weights_stamp and not are_unchanged(facts):
        raise InvalidRequest(
            "the weight files changed while the engine started: restart it",
            field="weights_id",
            model=facts.model_path,
        )
    if facts.draft_path is None:
        return own
    draft = digest_model(facts.draft_path, facts.load_format, cache_folder, on_read)
    return hashlib.sha256(f"{own} with the draft model {draft}".encode()).hexdigest()


class WeightsIdFile:
    """The file to which an operator writes the id of new weights.

    Its content at the start is ignored: it may be from an earlier run, and the engine has the model's files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken = self._stamp()

    def read(self) -> str | None:
        """The id that was written since the last `take`, or `None`.

        Raises:
            InvalidRequest: The content is no id, or the file is being written.
            OSError: The file cannot be read.
        """
        stamp = self._stamp()
        if stamp is None or stamp == self._taken:
            return None
        with self._path.open("rb") as file:
            data = file.read(_ID_BYTES_MAX).strip()
        if self._stamp() != stamp:
            raise InvalidRequest("the file changes while it is read: write another one and rename it", path=self._path)
        if not _WEIGHTS_ID.fullmatch(data):
            raise InvalidRequest("expected one line of 1 to 256 printable ASCII characters", path=self._path)
        return data.decode("ascii")

    def take(self) -> None:
        """Note that the file's current content has been used."""
        self._taken = self._stamp()

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


def file_identity(file: Path) -> str:
    """Changes with a file's content, as far as metadata shows it: no tool sets the time of the last status change."""
    stat = file.resolve().stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"


def _digest_file(file: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        content = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str) and _SHA256_HEX.fullmatch(value)}


def _write_cache(cache: Path, content: dict[str, str]) -> None:
    with suppress(OSError):  # without a cache the next start reads the files again
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:  # removed on a full disk too
            written = Path(folder) / cache.name
            written.write_text(json.dumps(dict(list(content.items())[-1000:])))
            written.replace(cache)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The content of an adapter's number in this engine: vLLM keeps the weights that it read first."""

    identities: tuple[str, ...]
    digest: bytes


def find_adapter_files(path: Path) -> list[Path]:
    """An adapter's config and its weight files, sorted by name.

    Raises:
        InvalidRequest: The folder is not there, or holds no adapter.
    """
    config = path / _ADAPTER_CONFIG
    weights = sorted(file for file in path.glob("*") if file.suffix in _ADAPTER_SUFFIXES and file.is_file())
    if not config.is_file() or not weights:
        raise InvalidRequest(f"expected a folder with {_ADAPTER_CONFIG} and weights", path=path)
    return [config, *weights]


def adapter_identities(path: str) -> tuple[str, ...]:
    """The identities of an adapter's files; empty: they are not known."""
    try:
        return tuple(map(file_identity, find_adapter_files(Path(path).expanduser())))
    except (InvalidRequest, OSError):
        return ()


class Adapters:
    """Digests of the adapters that requests name. Belongs to one event loop; files are read in its threads.

    An adapter's number is bound to the content that is seen first. If its files change later, or changed before since
    vLLM may have read them, it is not known which weights vLLM uses, since it may read them again at any time. Then
    that number is no longer cached.

    Args:
        cache_folder: Where digests of files are cached.
        rules: The engine's settings that change what an adapter does, if any.
    """

    def __init__(self, cache_folder: Path, rules: Mapping[str, str], meters: Meters) -> None:
        self._cache_folder = cache_folder
        self._meters = meters
        self._rules = json.dumps(dict(rules), sort_keys=True).encode() if rules else b""
        self._bound: OrderedDict[int, _Bound] = OrderedDict()
        self._refused: dict[int, str] = {}
        self._locks: dict[int, asyncio.Lock] = {}

    async def digest_of(self, adapter: AdapterRequest) -> bytes:
        """SHA-256 of the adapter's content. Concurrent requests read its files once.

        Raises:
            UncacheableContent: Its files are missing, or have changed since the engine first used it.

        If cancelled, the next caller starts over.
        """
        try:
            async with self._locks.setdefault(adapter.number, asyncio.Lock()):
                return await self._find(adapter)
        except UncacheableContent as error:
            self._meters.add("connector_uncacheable_requests", reason=error.reason)
            raise

    async def _find(self, adapter: AdapterRequest) -> bytes:
        if adapter.number in self._refused:
            raise UncacheableContent("adapter_changed", self._refused[adapter.number])
        bound = self._bound.get(adapter.number)
        try:
            seen = await asyncio.get_running_loop().run_in_executor(None, self._read, adapter.path, bound)
        except (InvalidRequest, OSError) as error:
            raise UncacheableContent("adapter_files", str(error)) from error
        known = adapter.identities
        is_changed = known not in (None, seen.identities) if bound is None else bound.digest != seen.digest
        if is_changed:
            self._refuse(adapter)
            raise UncacheableContent("adapter_changed", self._refused[adapter.number])
        self._bind(adapter.number, seen)
        return seen.digest

    def _bind(self, number: int, seen: _Bound) -> None:
        self._bound[number] = seen
        self._bound.move_to_end(number)
        if len(self._bound) > _ADAPTERS_MAX:
            oldest, _ = self._bound.popitem(last=False)
            del self._locks[oldest]

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
        reason = f"the files of the adapter in {adapter.path} changed, and the engine may use the old ones"
        self._refused[adapter.number] = reason
        LOG.warning("kvstore: %s: requests with it are not cached; load a new version from a new folder", reason)
