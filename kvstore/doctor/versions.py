"""Python, vLLM and the packages that the settings ask for: read from what is installed, without importing it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from kvstore.doctor.finding import Finding, failed, ok, skipped, warning
from kvstore.doctor.running import Check, Report
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings
from kvstore.tiers.locations import RedisLocation, S3Location

__all__ = [
    "DISTRIBUTION",
    "PYTHON_MIN",
    "TESTED_VLLM",
    "judge_distribution",
    "judge_packages",
    "judge_python",
    "judge_vllm",
    "versions_check",
]

DISTRIBUTION = "kvstore-vllm"
"""What pip knows us by."""
_NOT_OURS = "kvstore"
"""Another project's name in the package index, and ours before that was known."""

PYTHON_MIN = (3, 11)
TESTED_VLLM = ((0, 30), (0, 31), (0, 32), (0, 33))
"""The same releases as in the connector's contract, which the store does not import; a test compares them."""

_EXTRAS = {
    "redis": ("redis", "hiredis"),
    "s3": ("aioboto3",),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def versions_check(settings: Settings) -> Check:
    async def run(report: Report, deadline: Deadline) -> None:
        report(judge_python(sys.version_info[:3]))
        report(judge_distribution(_distribution(DISTRIBUTION), _distribution(_NOT_OURS)))
        report(judge_vllm(_installed("vllm")))
        report(judge_packages(extras_of(settings), _is_installed))

    names = ("python", "distribution", "vllm", "packages")
    return Check(names, run, f"install {DISTRIBUTION} again, from its wheel or its clone")


def judge_python(seen: Sequence[int]) -> Finding:
    text, least = ".".join(map(str, seen)), ".".join(map(str, PYTHON_MIN))
    if tuple(seen) < PYTHON_MIN:
        return failed("python", text, f"{least} or later", f"create the environment with Python {least}")
    return ok("python", text, f"{least} or later")


def judge_distribution(ours: str | None, other: str | None) -> Finding:
    """Judge the installed versions, or `None`, of our distribution and of the one whose name is like our command's."""
    name, expected = "distribution", f"{DISTRIBUTION}, and no distribution {_NOT_OURS}"
    if other is not None:
        seen = f"{_NOT_OURS} {other} is installed: another project, or this one under its former name"
        fix = f"pip uninstall {_NOT_OURS}, then install {DISTRIBUTION} again, from its wheel or its clone"
        return warning(name, seen, expected, fix)
    if ours is None:
        return skipped(name, "this runs from a source tree that is not installed")
    return ok(name, f"{DISTRIBUTION} {ours}", expected)


def judge_vllm(seen: str | None) -> Finding:
    """Judge the installed version, or `None`."""
    expected = " or ".join(f"{major}.{minor}.x" for major, minor in TESTED_VLLM)
    if seen is None:
        return skipped("vllm", "vLLM is not installed in this Python: run this in the engine's")
    # as in connector/vllm/contract.py: a development build (0.33.1.dev12) may have what only the next release has
    numbers = re.fullmatch(r"v?([0-9]+)\.([0-9]+)(?:\.[0-9]+)*(?:\.post[0-9]+)?(?:\+[A-Za-z0-9.]+)?", seen)
    if numbers is None or (int(numbers[1]), int(numbers[2])) not in TESTED_VLLM:
        major, minor = TESTED_VLLM[-1]
        fix = (
            f"pip install 'vllm=={major}.{minor}.*', use a release of kvstore that was tested with vLLM {seen}, or set"
            " the connector's allow_untested_vllm to try it"
        )
        return failed("vllm", f"{seen}: engines run without the store", expected, fix)
    return ok("vllm", seen, expected)


def extras_of(settings: Settings) -> list[str]:
    """The extras of our package that the settings need."""
    needed = {
        "redis": isinstance(settings.hot, RedisLocation),
        "s3": isinstance(settings.cold, S3Location),
        "tracing": settings.otlp_traces_endpoint is not None,
    }
    return [extra for extra, is_needed in needed.items() if is_needed]


def judge_packages(extras: Sequence[str], is_installed: Callable[[str], bool]) -> Finding:
    missing = {extra: [name for name in _EXTRAS[extra] if not is_installed(name)] for extra in extras}
    incomplete = [extra for extra in extras if missing[extra]]
    expected = f"what {' and '.join(extras) or 'memory and a directory'} need"
    if incomplete:
        names = ", ".join(name for extra in incomplete for name in missing[extra])
        fix = f"pip install 'kvstore-vllm[{','.join(incomplete)}]'"
        return failed("packages", f"not installed: {names}", expected, fix)
    return ok("packages", "all installed" if extras else "the base installation is enough", expected)


def _distribution(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _installed(name: str) -> str | None:
    if (seen := _distribution(name)) is not None:
        return seen
    # another distribution may provide it, as for vLLM on CPUs
    return next((version(other) for other in packages_distributions().get(name, ())), None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
