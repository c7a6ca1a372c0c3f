"""Unpack the published package of SGLang to .work/sglang, for the tests of its storage backend. usage: sglang_files.py

Its dependencies, which need CUDA, are not installed: the tests import single modules.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "0.5.23"


def main() -> int:
    target = ROOT / ".work" / "sglang"
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        done = subprocess.run([sys.executable, "-m", "pip", *download, f"sglang=={RELEASE}"], check=False)
        if done.returncode:
            return done.returncode
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(("sglang/srt/", "sglang/kernels/"))]
                archive.extractall(target, [*names, "sglang/version.py", "sglang/_version.py"])
    print(f"SGLang {RELEASE} is in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
