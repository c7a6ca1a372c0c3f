"""This machine or container: locked memory, shared memory, memory, and its clock beside that of another machine."""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.machine import container_bytes, machine_bytes
from kvstore.runtime.sizes import format_bytes
from kvstore.settings import Settings

_PINNED_BYTES = 1 << 30
"""The connector's default of `pinned_bytes` on a GPU, per rank, for most models."""
_SHM_BYTES_MIN = 1 << 30
_CLOCK_USUAL_S = 2.0
_CLOCK_REFUSED_S = 900.0
"""S3 refuses signatures that are older. Also, ages of records and leases are compared between machines."""


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

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        facts = read_facts()
        yield judge_memlock(facts)
        yield judge_shared_memory(facts)
        if is_here:
            yield judge_memory(facts, settings.memory_bytes)
        else:
            yield Criterion("limits.memory").skipped("the service runs elsewhere: run this command there")

    names = ("limits.memlock", "limits.shared_memory", "limits.memory")
    return Check(names, run, "mount /proc and /sys into the container")


def judge_memlock(facts: MachineFacts) -> Finding:
    """Pinned memory is locked: if the limit is below what the ranks pin, an engine copies slowly or does not start."""
    wanted = facts.num_gpus * _PINNED_BYTES
    it = Criterion(
        "limits.memlock",
        f"unlimited, or at least pinned_bytes for each rank ({format_bytes(wanted)} for {facts.num_gpus} by default)",
    )
    if not facts.num_gpus:
        return it.skipped("this machine has no Nvidia GPU, so engines pin no memory")
    if facts.memlock_bytes is None:
        return it.ok("unlimited")
    if facts.memlock_bytes >= wanted:
        return it.ok(format_bytes(facts.memlock_bytes))
    fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
    return it.warning(format_bytes(facts.memlock_bytes), fix)


def judge_shared_memory(facts: MachineFacts) -> Finding:
    needs_shm = facts.has_memfd and facts.num_gpus > 1
    more = f", and /dev/shm has {format_bytes(_SHM_BYTES_MIN)} for vLLM's ranks" if needs_shm else ""
    it = Criterion("limits.shared_memory", f"memfd_create works{more}")
    if not facts.has_memfd:
        fix = "let the container's seccomp profile allow memfd_create and F_ADD_SEALS (docker's own does)"
        return it.warning("memfd_create is refused: engines receive records over the socket, which is slower", fix)
    if needs_shm and (facts.shm_bytes or 0) < _SHM_BYTES_MIN:
        seen = f"/dev/shm has {format_bytes(facts.shm_bytes or 0)}"
        return it.warning(seen, "docker run --ipc=host, or --shm-size=8g")
    return it.ok("engines read records from shared memory")


def judge_memory(facts: MachineFacts, wanted_bytes: int) -> Finding:
    it = Criterion("limits.memory", "memory_bytes is at most three quarters of it")
    limit = min(facts.memory_bytes, facts.container_bytes or facts.memory_bytes)
    whose = "the container may use" if limit < facts.memory_bytes else "the machine has"
    seen = f"memory_bytes is {format_bytes(wanted_bytes)}, {whose} {format_bytes(limit)}"
    fix = f"set memory_bytes (KVSTORE_MEMORY_BYTES) to at most {format_bytes(limit * 3 // 4)}"
    if wanted_bytes > limit:
        return it.failed(seen, f"{fix}: otherwise the kernel kills the service once its memory is full")
    return it.ok(seen) if wanted_bytes <= limit * 3 // 4 else it.warning(seen, fix)


def judge_clock(name: str, whose: str, offset_s: float, error_s: float) -> Finding:
    """Judge how far another machine's clock is from ours.

    Args:
        name: Name of the finding.
        whose: The other machine, in words.
        offset_s: How far its clock is ahead of ours.
        error_s: The uncertainty of `offset_s`.
    """
    it = Criterion(name, f"at most {_CLOCK_USUAL_S:g} s apart")
    apart_s = max(0.0, abs(offset_s) - error_s)
    if apart_s <= _CLOCK_USUAL_S:
        return it.ok(f"the clock of {whose} agrees with ours")
    seen = f"the clock of {whose} is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} ours"
    fix = "set the clocks by NTP on both machines: timedatectl set-ntp true (or start chronyd)"
    return (it.failed if apart_s >= _CLOCK_REFUSED_S / 3 else it.warning)(seen, fix)


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
