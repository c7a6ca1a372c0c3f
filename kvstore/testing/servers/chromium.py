"""Where the system's Chromium is; installed like a server when it is absent."""

from __future__ import annotations

import os
import shutil

from kvstore.testing.servers.install import CannotInstall, find_or_install

__all__ = ["chromium_program"]


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
