"""Where a server's programs are: on this machine, or made so from Debian packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 600
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CannotInstall(RuntimeError):
    """A server is not here and could not be installed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Programs of a server.

    Attributes:
        root: The folder that packages were unpacked into, or `/` for the system's own.
    """

    root: Path

    def program(self, name: str) -> str | None:
        """The full path of a program, or `None`."""
        return shutil.which(name, path=self._path())

    def _path(self) -> str:
        return os.pathsep.join(str(self.root / folder.lstrip("/")) for folder in _SYSTEM_PATH.split(":"))

    def libraries(self) -> list[Path]:
        """Folders with shared libraries, the architecture's own first."""
        return [*sorted((self.root / "usr/lib").glob("*-linux-gnu*")), self.root / "usr/lib"]

    def environment(self) -> dict[str, str]:
        """The environment that its programs need; nothing of our own Python environment leaks into it."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "CEPH"))}
        env["PATH"] = self._path() + os.pathsep + _SYSTEM_PATH
        if self.root != Path("/"):
            folders = self.libraries() + sorted((self.root / "lib").glob("*-linux-gnu*"))
            folders += [folder / "ceph" for folder in self.libraries()]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
            env["PYTHONPATH"] = str(self.root / "usr/lib/python3/dist-packages")
        return env


def find_or_install(programs: Sequence[str], packages: Sequence[str]) -> Installation:
    """Programs that are all here, from the system, from an earlier call, or from packages installed now.

    As root the packages are installed with apt (their services are not started); else they are downloaded with what
    they depend on and unpacked into `~/.cache/kvstore-testing`.

    Raises:
        CannotInstall: Neither way worked.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore-testing"
    unpacked = Installation(cache / packages[0])
    if (here := _first_whole([Installation(Path("/")), unpacked], programs)) is not None:
        return here
    if shutil.which("apt-get") is None:
        raise CannotInstall(
            f"{', '.join(programs)} are not on this machine, and apt-get is not either: install them with the system's "
            f"package manager (Debian packages: {' '.join(packages)}) and run again"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once: the second finds what the first installed
        if (here := _first_whole([Installation(Path("/")), unpacked], programs)) is not None:
            return here
        if os.geteuid() == 0:
            _install_as_root(packages)
        else:
            _unpack(packages, cache, unpacked.root)
    here = _first_whole([Installation(Path("/")), unpacked], programs)
    if here is None:
        raise CannotInstall(f"packages {' '.join(packages)} were installed but lack {', '.join(programs)}")
    return here


def chromium_program() -> str:
    """The full path of a Chromium. As root it is installed when it is absent.

    Raises:
        CannotInstall: There is none; the message says what to do.
    """
    if (program := shutil.which("chromium")) is not None:
        return program
    if os.geteuid() == 0 and (program := find_or_install(["chromium"], ["chromium"]).program("chromium")) is not None:
        return program
    raise CannotInstall("a browser is needed: as root run `apt-get install --no-install-recommends chromium`")


def _first_whole(candidates: Sequence[Installation], programs: Sequence[str]) -> Installation | None:
    for candidate in candidates:
        if all(candidate.program(name) for name in programs):
            return candidate
    return None


def _install_as_root(packages: Sequence[str]) -> None:
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if _run(install) is not None:
        _run(["apt-get", "update"])
        if (problem := _run(install)) is not None:
            raise CannotInstall(_advice(packages, problem))


def _unpack(packages: Sequence[str], cache: Path, root: Path) -> None:
    """Unpack `packages` and what they need beyond the system, without root."""
    state = cache / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    own = ["-o", f"Dir::State::Lists={state}/lists", "-o", f"Dir::Cache={state}/cache", "-o", "Debug::NoLocking=1"]
    if (problem := _run(["apt-get", *own, "update"])) is not None:
        raise CannotInstall(_advice(packages, problem))
    simulate = ["apt-get", *own, "install", "-s", "--no-install-recommends", *packages]
    plan = subprocess.run(simulate, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    needed = [line.split()[1] for line in plan.stdout.splitlines() if line.startswith("Inst ")]
    if plan.returncode != 0 or not needed:
        raise CannotInstall(_advice(packages, plan.stderr))
    if (problem := _run(["apt-get", *own, "download", *needed], folder=state / "debs")) is not None:
        raise CannotInstall(_advice(packages, problem))
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for deb in sorted((state / "debs").glob("*.deb")):
        if (problem := _run(["dpkg", "-x", str(deb), str(partial)])) is not None:
            raise CannotInstall(_advice(packages, problem))
    shutil.rmtree(root, ignore_errors=True)
    partial.rename(root)  # an interrupted unpacking is never taken for a whole one
    shutil.rmtree(state, ignore_errors=True)


def _run(command: Sequence[str], folder: Path | None = None) -> str | None:
    """Run to the end; `None` when it went well, else what it said."""
    # RUNLEVEL=1: the packages' services are not started on a machine with an init system.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr or done.stdout)[-2000:]


def _advice(packages: Sequence[str], problem: str) -> str:
    return (
        f"could not install {' '.join(packages)}: check that apt has a reachable package source, or install them by "
        f"hand (apt-get install --no-install-recommends {' '.join(packages)}), and run again\n{problem}"
    )
