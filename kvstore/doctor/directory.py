"""The directory for records: access, space, kind of file system."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.format.names import ROOT
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import format_bytes

DIRECTORY_NAMES = ("directory", "directory.space", "directory.medium")
_FOLDERS = (ROOT, "tmp", "quarantine")
"""The folders that the service has there."""
_FILES_COUNTED_MAX = 50_000
_PROBE_BYTES = 64 << 10
_USEFUL_BYTES = 1 << 30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs")
_MEMORY = ("tmpfs", "ramfs")
_CONTAINER = ("overlay", "aufs")


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Facts about a directory.

    Attributes:
        path: Where records are, or will be.
        exists: Whether it exists and is a directory.
        problem: Why a small file could not be written there, or why it cannot be created; empty: no problem.
        free_bytes: Free space that we may use.
        total_bytes: Size of the file system.
        used_bytes: Bytes of the records there; `None`: too many files to count.
        medium: The file system's type, as the kernel names it.
    """

    path: Path
    exists: bool
    problem: str
    free_bytes: int
    total_bytes: int
    used_bytes: int | None
    medium: str


def directory_check(path: Path, disk_bytes: int | None) -> Check:
    """A check of `path`; `disk_bytes` is the setting, `None`: not set."""

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        try:
            facts = read_facts(path)
        except PermissionError as error:
            fix = f"chmod +x the folders above {path} for this user; or run this command as the service's user"
            yield Criterion("directory", f"{path} can be read by this user").failed(
                f"{error.filename} cannot be read: {error.strerror}", fix
            )
            return
        yield judge_access(facts)
        yield judge_space(facts, disk_bytes)
        yield judge_medium(facts)

    return Check(
        DIRECTORY_NAMES, run, f"check that the file system of {path} is not a network mount that hangs: df {path}"
    )


def judge_access(facts: DirectoryFacts) -> Finding:
    """Judge whether records can be stored there at all."""
    it = Criterion("directory", f"{facts.path} can be written to by this user")
    if not facts.problem:
        return it.ok("a file was written and removed" if facts.exists else "does not exist yet: created at start")
    fix = f"mkdir -p {facts.path} && chown $(id -un) {facts.path}, or name another in cold (KVSTORE_COLD=file:///dir)"
    if "Read-only" in facts.problem:
        fix = f"mount -o remount,rw the file system of {facts.path}, or name another directory in cold (KVSTORE_COLD)"
    elif "No space" in facts.problem or "quota" in facts.problem:
        fix = f"free some space: du -xsh {facts.path}; or lower disk_bytes (KVSTORE_DISK_BYTES)"
    return it.failed(facts.problem, fix)


def judge_space(facts: DirectoryFacts, disk_bytes: int | None) -> Finding:
    """Judge whether the directory has space for all that it may hold."""
    used = facts.used_bytes or 0
    space = facts.free_bytes + used
    seen = f"{format_bytes(facts.free_bytes)} of {format_bytes(facts.total_bytes)} are free"
    if used:
        seen += f", records take {format_bytes(used)}"
    if disk_bytes is None:
        least = format_bytes(_USEFUL_BYTES)
        it = Criterion("directory.space", f"at least {least}, of which a tenth is used unless disk_bytes is set")
        if space >= _USEFUL_BYTES:
            return it.ok(seen)
        return it.warning(seen, f"free space there, or name a directory on a larger disk in cold, not {facts.path}")
    it = Criterion("directory.space", f"space for disk_bytes, {format_bytes(disk_bytes)}")
    fix = f"free space there, or set disk_bytes (KVSTORE_DISK_BYTES) to at most {format_bytes(space * 9 // 10)}"
    if disk_bytes <= space:
        return it.ok(seen)
    if facts.used_bytes is None and disk_bytes <= facts.total_bytes:
        return it.warning(f"{seen}; the space that records take was not counted", fix)
    return it.failed(seen, fix)


def judge_medium(facts: DirectoryFacts) -> Finding:
    it = Criterion("directory.medium", "a local disk that outlives the process")
    fix = f"name a directory on a local disk in cold (KVSTORE_COLD=file:///dir) instead of {facts.path}"
    if facts.medium in _MEMORY:
        seen = f"{facts.medium}: records use the machine's memory, and a restart of the machine loses them"
        return it.warning(seen, fix)
    if facts.medium in _NETWORK or facts.medium.startswith("fuse"):
        seen = f"{facts.medium}: a network file system, which may be slower than computing, and may hang"
        return it.warning(seen, f"{fix}; to share records use Redis and S3")
    if facts.medium in _CONTAINER:
        seen = f"{facts.medium}: inside the container's own layer, deleted with the container"
        return it.warning(seen, f"mount a volume there: docker run -v kvstore:{facts.path}")
    return it.ok(facts.medium or "unknown")


def medium_of(path: Path, mountinfo: str) -> str:
    """The type of the file system of `path`; empty: not known.

    Args:
        path: Absolute and without links.
        mountinfo: The text of `/proc/self/mountinfo`; of two mounts at one place the later one hides the other.
    """
    best, found = -1, ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mounted = Path(fields[4].replace("\\040", " "))
        if path.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, found = len(mounted.parts), after.split(" ")[0]
    return found


def read_facts(path: Path) -> DirectoryFacts:
    """Examine a directory. If it exists, a small file is written there, flushed and removed.

    Raises:
        OSError: Neither it nor its parents can be read.
    """
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    seen = os.statvfs(place)
    mountinfo = ""
    with suppress(OSError):
        mountinfo = Path("/proc/self/mountinfo").read_text()
    return DirectoryFacts(
        path=path,
        exists=place == path and path.is_dir(),
        problem=_problem_of(place, is_there=place == path),
        free_bytes=seen.f_bavail * seen.f_frsize,
        total_bytes=seen.f_blocks * seen.f_frsize,
        used_bytes=_used_bytes(path / ROOT),
        medium=medium_of(place.resolve(), mountinfo),
    )


def _problem_of(place: Path, *, is_there: bool) -> str:
    if not place.is_dir():
        return f"{place} is not a directory"
    probe = place / f"doctor-{secrets.token_hex(8)}"
    if not is_there:  # rights alone do not show whether the service can create it: create another one
        try:
            probe.mkdir(mode=0o700)
            probe.rmdir()
        except OSError as error:
            return f"it does not exist, and cannot be created in {place}: {error.strerror}"
        return ""
    for folder in _FOLDERS:
        if (place / folder).exists() and not (place / folder).is_dir():
            return f"{place / folder} is not a directory"
        if (place / folder).exists() and not os.access(place / folder, os.W_OK | os.X_OK):
            return f"{place / folder} cannot be written to"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = _PROBE_BYTES
            while left:  # a disk that becomes full may write a part only
                left -= os.write(descriptor, bytes(left))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"a file cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def _used_bytes(root: Path) -> int | None:
    total = num_files = 0
    for folder, _, names in os.walk(root):
        for name in names:
            num_files += 1
            if num_files > _FILES_COUNTED_MAX:
                return None
            with suppress(OSError):
                total += os.lstat(Path(folder, name)).st_size
    return total
