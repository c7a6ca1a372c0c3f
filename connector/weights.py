"""The weights id: a digest of the weight files, so that two checkpoints under one name never share pages."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.errors import InvalidRequest

__all__ = ["digest_weights", "find_weight_files"]

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CHUNK_BYTES = 8 << 20
_SHA256_HEX = re.compile("[0-9a-f]{64}")


def find_weight_files(model_path: str) -> list[Path]:
    """The weight files of a model folder (or the one file that `model_path` is), sorted by name.

    Raises:
        InvalidRequest: There is none: the operator has to set `weights_id`.
    """
    path = Path(model_path)
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES and file.is_file())
    if any(file.suffix == ".safetensors" for file in files):
        files = [file for file in files if file.suffix == ".safetensors"]
    if not files:
        raise InvalidRequest("found no weight files to digest; set weights_id", field="weights_id", model=model_path)
    return files


def digest_weights(files: Sequence[Path], cache_folder: Path) -> str:
    """SHA-256 over names and contents of `files`, as hex.

    Reads all bytes once (about 1 GB/s a core, files side by side); digests of single files are kept in `cache_folder`
    by path, size, modification time and inode, so that the next start costs nothing.
    """
    cache = cache_folder / "weights.json"
    known = _read_cache(cache)
    # before reading: a file that is replaced meanwhile must not be known by the digest of what it was
    identities = [_identity(file) for file in files]
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvstore-weights") as pool:
        digests = list(pool.map(lambda name, file: known.get(name) or _digest_file(file), identities, files))
    _write_cache(cache, {**known, **dict(zip(identities, digests, strict=True))})
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        name = file.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + bytes.fromhex(digest))
    return total.hexdigest()


def _identity(file: Path) -> str:
    stat = file.resolve().stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"


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
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as stream:
            json.dump(dict(list(content.items())[-1000:]), stream)
        os.replace(stream.name, cache)
    except OSError:
        return  # a cache that cannot be kept costs the next start a second, nothing else
