"""Engines that reach the store by another door than our vLLM connector: their release, and the interface we use."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.doctor.versions import installed_version
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import format_bytes

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_BYTES_MIN = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineDoor:
    """One door, and what an engine needs for it.

    Attributes:
        package: The engine's package.
        releases: Major and minor numbers, or also the patch, of the releases that the door was tested with.
        module: File of the interface, in the package.
        base: Our base class there.
        calls: Its methods that we implement.
        offloads: Its host memory is mapped in `/dev/shm`.
    """

    package: str
    releases: Sequence[str]
    module: str
    base: str
    calls: Sequence[str]
    offloads: bool = False


DOORS: Mapping[str, EngineDoor] = {
    "offloading": EngineDoor(
        package="vllm",
        releases=("0.32",),
        module="v1/kv_offload/tiering/base.py",
        base="SecondaryTierManager",
        calls=(
            *("lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs", "on_new_request"),
            *("on_request_finished", "on_schedule_end", "take_events", "get_stats", "shutdown"),
        ),
        offloads=True,
    ),
    "sglang": EngineDoor(
        package="sglang",
        releases=("0.5.23",),
        module="srt/mem_cache/hicache_storage.py",
        base="HiCacheStorage",
        calls=(
            *("register_mem_pool_host", "register_mem_host_pool_v2", "get", "batch_get", "set", "batch_set", "exists"),
            *("batch_exists", "batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2"),
        ),
    ),
}


def engine_check(name: str) -> Check:
    """The check of the engine in this Python environment, for a door of `DOORS`."""
    door = DOORS[name]
    names = ("engine.release", "engine.interface", *(("engine.shared_memory",) if door.offloads else ()))

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        seen = installed_version(door.package)
        yield judge_engine(door, seen)
        if seen is None:
            return
        yield judge_interface(door, await asyncio.to_thread(_methods, door))
        if door.offloads:
            free_bytes = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
            yield judge_offloading_room(free_bytes)

    return Check(names, run, f"run this command in {door.package}'s Python environment")


def judge_engine(door: EngineDoor, seen: str | None) -> Finding:
    """Judge the engine's installed version, or `None`."""
    expected = " or ".join(f"{door.package} {release}" for release in door.releases)
    it = Criterion("engine.release", expected)
    if seen is None:
        fix = f"install kvstore-vllm in {door.package}'s Python environment, and run this command there"
        return it.failed(f"{door.package} is not installed in this Python", fix)
    numbers = re.match(r"v?([0-9]+(?:\.[0-9]+)*)", seen)
    is_tested = numbers is not None and any(
        numbers[1] == release or numbers[1].startswith(f"{release}.") for release in door.releases
    )
    if not is_tested:
        return it.warning(
            f"{seen}: this door was not tested with it", f"pip install '{door.package}=={door.releases[-1]}.*'"
        )
    return it.ok(seen)


def judge_interface(door: EngineDoor, methods: Sequence[str] | None) -> Finding:
    """Judge the methods of the interface's base class; `None`: the class was not found."""
    it = Criterion("engine.interface", f"{door.base} of {door.module} has every call that we implement")
    fix = f"use {door.package} {door.releases[-1]}"
    if methods is None:
        return it.failed(f"{door.package} has no {door.base} in {door.module}", fix)
    missing = [call for call in door.calls if call not in methods]
    return it.failed(f"not there: {', '.join(missing)}", fix) if missing else it.ok(f"all {len(door.calls)} are there")


def judge_offloading_room(free_bytes: int | None) -> Finding:
    """Judge the free space of `/dev/shm`; `None`: there is none."""
    it = Criterion("engine.shared_memory", "room for vLLM's cpu_bytes_to_use")
    fix = "docker run --shm-size with cpu_bytes_to_use and 1 GiB; mount -o remount,size=... /dev/shm"
    if free_bytes is None:
        return it.failed(f"{_SHARED_MEMORY} is not there", fix)
    seen = f"{format_bytes(free_bytes)} free in {_SHARED_MEMORY}"
    return it.ok(seen) if free_bytes >= _SHARED_BYTES_MIN else it.warning(seen, fix)


def _methods(door: EngineDoor) -> list[str] | None:
    """Methods of the base class, read from the installed source: nothing of the engine is imported."""
    found = importlib.util.find_spec(door.package)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder) / door.module
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == door.base:
                return [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
    return None
