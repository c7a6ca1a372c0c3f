"""Python, vLLM and the packages that the settings ask for: read from what is installed, without importing it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings
from kvstore.tiers.locations import RedisLocation, S3Location

DISTRIBUTION = "kvstore-vllm"
"""Our name for pip."""
_NOT_OURS = "kvstore"
"""The name of another project in the package index, and our former name."""
_INSTALL_FIX = f"install {DISTRIBUTION} again, from its wheel or its clone"

PYTHON_MIN = (3, 11)
TESTED_VLLM = ((0, 30), (0, 31), (0, 32), (0, 33))
"""The same releases as in the connector's contract, which the store does not import; a test compares them."""

_EXTRAS = {
    "redis": ("redis", "hiredis"),
    "s3": ("aioboto3",),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "encryption": ("cryptography",),
    "events": ("zmq",),
}


def versions_check(settings: Settings) -> Check:
    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        yield judge_python(sys.version_info[:3])
        yield judge_distribution(_distribution(DISTRIBUTION), _distribution(_NOT_OURS))
        yield judge_vllm(installed_version("vllm"))
        yield judge_packages(extras_of(settings), _is_installed)

    return Check(("python", "distribution", "vllm", "packages"), run, _INSTALL_FIX)


def judge_python(seen: Sequence[int]) -> Finding:
    text, least = ".".join(map(str, seen)), ".".join(map(str, PYTHON_MIN))
    it = Criterion("python", f"{least} or later")
    return it.ok(text) if tuple(seen) >= PYTHON_MIN else it.failed(text, f"create the environment with Python {least}")


def judge_distribution(ours: str | None, other: str | None) -> Finding:
    """Judge the installed versions, or `None`, of our distribution and of the one whose name is like our command's."""
    it = Criterion("distribution", f"{DISTRIBUTION}, and no distribution {_NOT_OURS}")
    if other is not None:
        seen = f"{_NOT_OURS} {other} is installed: another project, or this one under its former name"
        return it.warning(seen, f"pip uninstall {_NOT_OURS}, then {_INSTALL_FIX}")
    if ours is None:
        return it.skipped("this runs from a source tree that is not installed")
    return it.ok(f"{DISTRIBUTION} {ours}")


def judge_vllm(seen: str | None) -> Finding:
    """Judge the installed version, or `None`."""
    it = Criterion("vllm", " or ".join(f"{major}.{minor}.x" for major, minor in TESTED_VLLM))
    if seen is None:
        return it.skipped("vLLM is not installed in this Python: run this command in the engine's")
    # as in connector/vllm/contract.py: a development build (0.33.1.dev12) may have what only the next release has
    numbers = re.fullmatch(r"v?([0-9]+)\.([0-9]+)(?:\.[0-9]+)*(?:\.post[0-9]+)?(?:\+[A-Za-z0-9.]+)?", seen)
    if numbers is None or (int(numbers[1]), int(numbers[2])) not in TESTED_VLLM:
        major, minor = TESTED_VLLM[-1]
        fix = (
            f"pip install 'vllm=={major}.{minor}.*', or use a release of kvstore that was tested with vLLM {seen}, or "
            "set the connector's allow_untested_vllm to try it"
        )
        return it.failed(f"{seen}: engines run without the store", fix)
    return it.ok(seen)


def extras_of(settings: Settings) -> list[str]:
    """The extras of our package that the settings need."""
    needed = {
        "redis": isinstance(settings.hot, RedisLocation),
        "s3": isinstance(settings.cold, S3Location),
        "tracing": settings.otlp_traces_endpoint is not None,
        "encryption": settings.encryption_keys is not None,
        "events": bool(settings.events_endpoint),
    }
    return [extra for extra, is_needed in needed.items() if is_needed]


def judge_packages(extras: Sequence[str], is_installed: Callable[[str], bool]) -> Finding:
    it = Criterion("packages", f"the packages for {' and '.join(extras) or 'memory and a directory'}")
    missing = {extra: [name for name in _EXTRAS[extra] if not is_installed(name)] for extra in extras}
    incomplete = [extra for extra in extras if missing[extra]]
    if incomplete:
        names = ", ".join(name for extra in incomplete for name in missing[extra])
        return it.failed(f"not installed: {names}", f"pip install 'kvstore-vllm[{','.join(incomplete)}]'")
    return it.ok("all installed" if extras else "the base installation is enough")


def _distribution(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_version(name: str) -> str | None:
    if (seen := _distribution(name)) is not None:
        return seen
    # another distribution may provide it, as for vLLM on CPUs
    return next((version(other) for other in packages_distributions().get(name, ())), None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
