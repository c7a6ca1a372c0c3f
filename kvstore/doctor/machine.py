"""Limits of this machine or container: locked memory, shared memory, memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvstore.doctor.finding import Finding, failed, ok, skipped, warning
from kvstore.doctor.running import Check, Report
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.machine import container_bytes, machine_bytes
from kvstore.runtime.sizes import format_bytes
from kvstore.settings import Settings

__all__ = ["MachineFacts", "judge_memlock", "judge_memory", "judge_shared_memory", "machine_check"]

_PINNED_BYTES = 1 << 30
"""The connector's default of `pinned_bytes` on a GPU, per rank, for most models."""
_SHM_BYTES_MIN = 1 << 30


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The limits of this process.

    Attributes:
        num_gpus: Nvidia GPUs.
        memlock_bytes: `RLIMIT_MEMLOCK`; `None`: unlimited.
        has_memfd: Whether sealed shared memory can be created.
        shm_bytes: Size of `/dev/shm`; `None`: there is none.
        memory_bytes: Memory of the machine.
        container_bytes: Memory limit of the container; `None`: none, or not below `memory_bytes`.
    """

    num_gpus: int
    memlock_bytes: int | None
    has_memfd: bool
    shm_bytes: int | None
    memory_bytes: int
    container_bytes: int | None


def machine_check(settings: Settings, *, is_here: bool) -> Check:
    """A check; `is_here` says whether the service with these settings runs on this machine."""

    async def run(report: Report, deadline: Deadline) -> None:
        facts = read_facts()
        report(judge_memlock(facts))
        report(judge_shared_memory(facts))
        report(
            judge_memory(facts, settings.memory_bytes)
            if is_here
            else skipped("limits.memory", "the service runs elsewhere: ask there")
        )

    names = ("limits.memlock", "limits.shared_memory", "limits.memory")
    return Check(names, run, "mount /proc and /sys into the container")


def judge_memlock(facts: MachineFacts) -> Finding:
    """Pinned memory is locked: if the limit is below what the ranks pin, an engine copies slowly or does not start."""
    name = "limits.memlock"
    if not facts.num_gpus:
        return skipped(name, "no Nvidia GPU is seen here, so no memory is pinned")
    wanted = facts.num_gpus * _PINNED_BYTES
    expected = (
        f"unlimited, or at least pinned_bytes for each rank ({format_bytes(wanted)} for {facts.num_gpus} by default)"
    )
    if facts.memlock_bytes is None:
        return ok(name, "unlimited", expected)
    if facts.memlock_bytes >= wanted:
        return ok(name, format_bytes(facts.memlock_bytes), expected)
    fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
    return warning(name, format_bytes(facts.memlock_bytes), expected, fix)


def judge_shared_memory(facts: MachineFacts) -> Finding:
    name, expected = "limits.shared_memory", "memfd_create works"
    if not facts.has_memfd:
        fix = "let the container's seccomp profile allow memfd_create and F_ADD_SEALS (docker's own does)"
        return warning(name, "memfd_create is refused: engines receive records by socket, slower", expected, fix)
    if facts.num_gpus > 1:
        expected += f", and /dev/shm has {format_bytes(_SHM_BYTES_MIN)} for vLLM's ranks"
        if (facts.shm_bytes or 0) < _SHM_BYTES_MIN:
            seen = f"/dev/shm has {format_bytes(facts.shm_bytes or 0)}"
            return warning(name, seen, expected, "docker run --ipc=host, or --shm-size=8g")
    return ok(name, "records are read from shared memory", expected)


def judge_memory(facts: MachineFacts, wanted_bytes: int) -> Finding:
    name, there = "limits.memory", min(facts.memory_bytes, facts.container_bytes or facts.memory_bytes)
    whose = "the container may use" if there < facts.memory_bytes else "the machine has"
    seen = f"memory_bytes {format_bytes(wanted_bytes)}, {whose} {format_bytes(there)}"
    expected = "memory_bytes is at most three quarters of it"
    fix = f"set memory_bytes (KVSTORE_MEMORY_BYTES) to at most {format_bytes(there * 3 // 4)}"
    if wanted_bytes > there:
        return failed(name, seen, expected, f"{fix}: the kernel kills the service once it is full")
    return ok(name, seen, expected) if wanted_bytes <= there * 3 // 4 else warning(name, seen, expected, fix)


def read_facts() -> MachineFacts:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MachineFacts(
        num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        has_memfd=_has_memfd(),
        shm_bytes=_total_bytes(Path("/dev/shm")),
        memory_bytes=machine_bytes(),
        container_bytes=container_bytes(),
    )


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError:
        return False
    return True


def _total_bytes(path: Path) -> int | None:
    try:
        seen = os.statvfs(path)
    except OSError:
        return None
    return seen.f_blocks * seen.f_frsize
