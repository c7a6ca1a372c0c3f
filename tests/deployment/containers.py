"""Containers without a container engine: their commands, environment and files as processes of this machine.

What a container sees under a mount is a folder of ours, another container's name is a port of the loopback, and all
else is as the deployment's files say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.testing.servers.process import ServerProcess
from tests.deployment.files import ROOT

_START_S = 120.0
"""However busy the machine is."""


class Container:
    """One container.

    Args:
        folder: Its log and what is mounted into it; short, since Unix sockets have short names.
        arguments: Entry point and command.
        environment: Of the image and of whoever runs it.
        health: Its health check, or the probe.
        places: By what the files say, e.g. `valkey:6379` or `/run/secrets/x`, what it is here.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        health: Sequence[str],
        places: Mapping[str, str],
    ) -> None:
        self._places = dict(places)
        inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        given = {name: self.here(value) for name, value in environment.items() if name != "PATH"}
        self.environment = {**given, **inherited}
        self.health = self._program(health)
        self.process = ServerProcess(self._program(arguments), folder / "log", self.environment)

    @property
    def url(self) -> str:
        """Where the service listens."""
        return self.environment["KVSTORE_LISTEN"]

    def here(self, text: str) -> str:
        """The text with every place of the container's as it is here."""
        names = sorted(self._places, key=len, reverse=True)
        pattern = "|".join(map(re.escape, names))
        return re.sub(pattern, lambda match: self._places[match[0]], text) if names else text

    def start(self) -> None:
        """Return when it listens."""
        self.process.start()
        socket = Path(self.url.removeprefix("unix:"))
        self.process.wait_ready(socket.exists, _START_S)

    def check_health(self) -> subprocess.CompletedProcess[str]:
        """Run the health check once."""
        return self._run(self.health)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `kvstore` in the container, as `docker compose exec` would."""
        return self._run(self._program(["kvstore", *arguments]))

    def stop(self, grace_s: float = 20.0) -> int | None:
        """SIGTERM, and SIGKILL after `grace_s`; returns the exit status."""
        self.process.stop(grace_s)
        return self.process.exit_status

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=_START_S, check=False
        )

    def _program(self, arguments: Sequence[str]) -> list[str]:
        program, *rest = (self.here(argument) for argument in arguments)
        assert program == "kvstore", program
        return [sys.executable, "-m", "kvstore.cli", *rest]
