"""The namespaces of the store: which ones engines should share, and which fields keep them from it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import combinations, islice
from pathlib import Path

from kvstore.compose import open_catalog, open_tier
from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.manifest import MAX_MANIFEST_BYTES, parse_manifest
from kvstore.format.names import ROOT, manifest_name
from kvstore.model.keys import NamespaceId
from kvstore.model.namespace import NamespaceDescription, field_differences, flat_fields
from kvstore.runtime.background import gather_all
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.files import read_regular
from kvstore.runtime.sizes import counted
from kvstore.settings import Settings
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import FileLocation, NoTier, RedisLocation, S3Location

_NAME = "namespaces"
_READ_MAX = 200
_PAIRS_MAX = 3
_FIELDS_MAX = 4
_SHOWN_MAX = 48
_DIGEST = re.compile(r"[0-9a-f]{64}")

_FIXES = (
    ("format", "one release of kvstore for both engines"),
    ("architecture", "the same model"),
    ("weights_id", "the same weights_id for both engines, or for none: then both use the digest of their files"),
    ("compute_dtype", "the same --dtype"),
    ("quantization", "the same --quantization"),
    ("cache_dtype", "the same --kv-cache-dtype"),
    ("model_rules", "the same --max-model-len, --hf-overrides, quantisation settings and plugins of vLLM"),
    ("model_config", "the same config.json and --hf-overrides"),
    ("engine_settings", "the same of these settings of SGLang"),
    (r"pool\.", "the same --hicache-mem-layout and interface_v1 of SGLang, and as many ranks"),
    (r"layout\..*packing\.vllm", "one release of vLLM"),
    (r"layout\..*packing\.(isa|machine)", "processors of one instruction set, or GPUs"),
    (r"layout\..*packing\.(backend|cell|convolution)", "the same attention backend, on the same kind of device"),
    (r"layout\..*tensor_parallel_size", "the same --tensor-parallel-size, which recurrent states ask for"),
    (r"layout\..*drafts", "the same --speculative-config"),
    (r"layout\.", "the same --block-size"),
    ("", "the same settings of the engine"),
)
"""By a pattern that a field's path starts with: what the engines must have in common. The first match counts; causes
come before their consequences."""

_PARTS = ("group", "pool.name", "pipeline", "context")
"""Fields in which the namespaces of one engine differ, behind the doors that have several."""


def namespaces_check(settings: Settings) -> Check:
    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        try:
            found = await _read(settings, deadline)
        except ImportError:
            yield Criterion(_NAME).skipped("the client is not installed: see packages")
        except KVStoreError as error:
            yield Criterion(_NAME).skipped(f"they cannot be read: {error.message}")
        else:
            yield judge_namespaces(found)

    return Check((_NAME,), run, "check hot and cold first: their descriptions of namespaces are read")


def judge_namespaces(found: Sequence[NamespaceDescription]) -> Finding:
    """Judge whether engines that could share a namespace do so."""
    it = Criterion(_NAME, "engines of one model share one namespace")
    if not found:
        return it.skipped("no engine has opened one yet: run this command again when two have started")
    # as sets, since two hundred namespaces are twenty thousand pairs
    fields = {
        one.id: {(path, _as_json(value)) for path, value in flat_fields(one.fields) if value is not None}
        for one in found
    }
    pairs = [
        (len(paths), one, other)
        for one, other in combinations(found, 2)
        if one.tenant == other.tenant
        and _could_share(one, other, paths := {path for path, _ in fields[one.id] ^ fields[other.id]})
    ]
    if not pairs:
        seen = f"{len(found)} namespaces, no two of which could be one"
        return it.ok("one namespace, which all engines share" if len(found) == 1 else seen)
    nearest = [
        (field_differences(one.fields, other.fields), one, other)
        for _, one, other in sorted(pairs, key=lambda pair: pair[0])[:_PAIRS_MAX]
    ]
    seen = "; ".join(_describe(*pair) for pair in nearest)
    if len(pairs) > len(nearest):
        seen += f"; and {counted(len(pairs) - len(nearest), 'more pair')}"
    causes = dict.fromkeys(_FIXES[min(map(_rank, differs))][1] for differs, _, _ in nearest)
    return it.warning(seen, f"give these engines {'; '.join(causes)} (ignore a namespace that no engine uses any more)")


def _could_share(one: NamespaceDescription, other: NamespaceDescription, paths: Collection[str]) -> bool:
    """Whether the weights are the same, or only the weights id differs and an operator gave exactly one of the ids.
    Doors share nothing, nor do the parts of one engine.

    Args:
        paths: Of the fields that differ.
    """
    doors = [[word for word in it.door.split() if word.isalpha()] for it in (one, other)]  # without releases
    if doors[0] != doors[1] or any(path.partition("[")[0] in _PARTS for path in paths):
        return False
    if "weights_id" not in paths:
        return True
    are_digests = [_DIGEST.fullmatch(str(it.fields.get("weights_id"))) is not None for it in (one, other)]
    return len(paths) == 1 and any(are_digests) and not all(are_digests)


def _describe(
    differs: Mapping[str, tuple[object, object]], one: NamespaceDescription, other: NamespaceDescription
) -> str:
    """Two namespaces, and the fields in which they differ, causes before their consequences."""
    paths = sorted(differs, key=lambda path: (_rank(path), path))
    shown = ", ".join(f"{path}: {' / '.join(map(_short, differs[path]))}" for path in paths[:_FIELDS_MAX])
    more = f" and {counted(len(paths) - _FIELDS_MAX, 'more field')}" if len(paths) > _FIELDS_MAX else ""
    model = one.fields.get("architecture", "a model")
    return f"{model} has two, {one.id.hex()[:8]} and {other.id.hex()[:8]}, which differ in {shown}{more}"


def _rank(field: str) -> int:
    return next(rank for rank, (start, _) in enumerate(_FIXES) if re.match(start, field))


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    text = _as_json(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


async def _read(settings: Settings, deadline: Deadline) -> list[NamespaceDescription]:
    """The descriptions of the store's namespaces, from any tier; without lost and damaged ones."""
    if isinstance(settings.hot, NoTier) and isinstance(settings.cold, FileLocation):
        return _read_directory(settings.cold.path)
    async with AsyncExitStack() as stack:
        ids = await _ids(settings, stack, deadline)
        locations = [place for place in (settings.hot, settings.cold) if not isinstance(place, NoTier | FileLocation)]
        tiers: list[Tier] = []
        for location in locations:
            with suppress(Unavailable):  # another check says so
                tiers.append(await stack.enter_async_context(open_tier(location, settings)))
        folder = settings.cold.path if isinstance(settings.cold, FileLocation) else None

        async def describe(namespace: NamespaceId) -> NamespaceDescription | None:
            for tier in tiers:
                with suppress(KVStoreError):
                    manifest = await tier.get_manifest(namespace, deadline=deadline)
                    if manifest is not None:
                        return parse_manifest(manifest, namespace)
            return None if folder is None else _read_manifest(folder, namespace)

        described = await gather_all([describe(namespace) for namespace in ids])
    return [description for description in described if description is not None]


async def _ids(settings: Settings, stack: AsyncExitStack, deadline: Deadline) -> list[NamespaceId]:
    match settings.hot, settings.cold:
        case RedisLocation(), _:
            catalog = await stack.enter_async_context(open_catalog(settings))
            found = list(await catalog.namespaces(deadline=deadline))
        case _, S3Location() as location:
            from kvstore.tiers.s3.examine import open_examiner

            bucket = await stack.enter_async_context(open_examiner(location))
            found = [NamespaceId(bytes.fromhex(name)) for name in await bucket.namespaces() if _is_id(name)]
        case _:
            found = []
    return found[:_READ_MAX]


def _read_directory(root: Path) -> list[NamespaceDescription]:
    try:
        found = sorted(path.name for path in (root / ROOT).iterdir() if _is_id(path.name))
    except FileNotFoundError:
        return []
    described = (_read_manifest(root, NamespaceId(bytes.fromhex(name))) for name in found)
    # a migration keeps its progress under hundreds of such names
    return list(islice((description for description in described if description is not None), _READ_MAX))


def _read_manifest(root: Path, namespace: NamespaceId) -> NamespaceDescription | None:
    try:
        return parse_manifest(read_regular(root / manifest_name(namespace), MAX_MANIFEST_BYTES + 1), namespace)
    except (OSError, KVStoreError):
        return None


def _is_id(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", name) is not None
