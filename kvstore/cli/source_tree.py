"""Runs programs of the source tree that are not part of the installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import kvstore
from kvstore.errors import InvalidRequest

__all__ = ["PASS_ALL", "become"]

PASS_ALL = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Settings of a verb that passes all options, including `--help`, to another program."""

_ROOT = Path(kvstore.__file__).resolve().parents[1]


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module` of the source tree that this package was imported from.

    Raises:
        InvalidRequest: It was imported from an installed package, not from a source tree.
    """
    if not (_ROOT / "pyproject.toml").is_file():
        raise InvalidRequest(
            f"{module} is not part of the installed package: clone the repository and run `make env` there, "
            f"then `.venv/bin/python -m {module}`",
            seen=_ROOT,
        )
    environment = os.environ  # noqa: TID251 - passed on
    path = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
    sys.stdout.flush()
    # -P: do not import a folder of that name in the current directory
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], {**environment, "PYTHONPATH": path})
