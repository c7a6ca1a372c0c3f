"""A small real disk, which only the process that a test starts on it can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["run_on_disk"]


def run_on_disk(folder: Path, size: str, program: str, *arguments: str) -> str:
    """Run a Python program with a new, empty disk at `folder`, which is its first argument.

    Args:
        folder: Made here.
        size: As `mount` takes it, like `3m`.
        program: Source text.
        arguments: Further ones.

    Returns:
        What it printed.

    Raises:
        AssertionError: It failed; the text is its standard error.
        pytest.skip.Exception: This machine allows no mount.
    """
    folder.mkdir()
    namespace = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
    tried = subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("this machine allows no mount")
    mounted = f'mount -t tmpfs -o size={size} none "{folder}" && exec "$@"'
    done = subprocess.run(
        [*namespace, "sh", "-c", mounted, "sh", sys.executable, "-c", program, str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
