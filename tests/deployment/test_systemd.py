"""The systemd unit: options that systemd knows, a command and settings that exist, a service that says it is ready."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.serve import notify_ready
from kvstore.cli.verbs import VERBS
from kvstore.settings import Settings, load_settings
from tests.deployment.files import DEPLOY, ROOT
from tests.deployment.notifications import START_S, receiver

FOLDER = DEPLOY / "systemd"
RECEIVING_S = 5


def unit() -> dict[str, list[str]]:
    """Every value of `[Service]`, by its key."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (FOLDER / "kvstore.service").read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line and line[0] != "#":
            key, is_set, value = line.partition("=")
            assert is_set and key.isalpha(), line
            if section == "Service":
                found.setdefault(key, []).append(value)
    return found


def one(key: str) -> str:
    [value] = unit()[key]
    return value


def seconds(key: str) -> int:
    return int(one(key).removesuffix("s"))


def test_systemd_takes_it(tmp_path: Path) -> None:
    """Where the program is at hand it knows every option; the command is one that this machine has."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze on this machine")
    text = (FOLDER / "kvstore.service").read_text().replace("/opt/kvstore/bin/kvstore", "/bin/true")
    copy = tmp_path / "kvstore.service"
    copy.write_text(text)
    done = subprocess.run([program, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "kvstore.service" in line]
    assert said == [] and done.returncode == 0, done.stderr


def test_command_and_settings_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb, its flags, the variables, and each key of the settings beside it, the commented ones too."""
    program, verb, *flags = shlex.split(one("ExecStart"))
    assert Path(program).name == "kvstore" and verb in VERBS and flags == ["--config", "/etc/kvstore/kvstore.toml"]
    names = [value.partition("=")[0] for value in unit()["Environment"]]
    assert all(
        name == "XDG_CACHE_HOME" or name.removeprefix("KVSTORE_").lower() in Settings.model_fields for name in names
    )
    text = (FOLDER / "kvstore.toml").read_text()
    settings = load_settings({}, config=FOLDER / "kvstore.toml")
    assert str(settings.listen) == f"unix:/run/{one('RuntimeDirectory')}/kvstore.sock"
    assert settings.cold.path == Path("/var/lib", one("StateDirectory"), "records")  # type: ignore[union-attr]
    assert set(re.findall(r"^#? ?(\w+) = ", text, re.MULTILINE)) <= set(Settings.model_fields)


def test_it_is_hardened_and_stops_in_time() -> None:
    """Without rights of its own, on a file system that it may not write to, and with time to write what waits."""
    assert one("User") not in ("", "root") and one("NoNewPrivileges") == "yes" and one("CapabilityBoundingSet") == ""
    assert one("ProtectSystem") == "strict" and one("ProtectHome") == "yes" and one("LimitMEMLOCK") == "infinity"
    assert (one("Restart"), one("RestartPreventExitStatus")) == ("on-failure", "2") and seconds("RestartSec") >= 1
    receiving_s = Settings().drain_timeout_s + RECEIVING_S
    assert seconds("TimeoutStopSec") > receiving_s
    assert "PrivateUsers" not in unit()  # the socket tells its own user from others


def test_it_says_when_it_is_ready(tmp_path: Path) -> None:
    """Run as the unit runs it, it tells systemd once engines can connect, and SIGTERM ends it with 0."""
    assert one("Type") == "notify"
    config = tmp_path / "kvstore.toml"
    places = {"/run/kvstore": str(tmp_path), "/var/lib/kvstore": str(tmp_path)}
    text = (FOLDER / "kvstore.toml").read_text()
    for path, place in places.items():
        text = text.replace(path, place)
    config.write_text(text + 'memory_bytes = "16MiB"\nadmin_listen = "off"\n')
    command = one("ExecStart").replace("/etc/kvstore/kvstore.toml", str(config)).split()[1:]
    with receiver(tmp_path / "notify") as sock:
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": str(ROOT)}
        service = subprocess.Popen([sys.executable, "-m", "kvstore.cli", *command], env=environment)
        try:
            told = sock.recv(4096).decode().splitlines()
            assert told == ["READY=1", f"STATUS=serves engines at unix:{tmp_path}/kvstore.sock"]
            with socket.socket(socket.AF_UNIX) as engine:
                engine.connect(str(tmp_path / "kvstore.sock"))
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(START_S) == 0


def test_the_notification_of_other_starters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abstract address; none at all; and one where nobody receives, which is a warning and no more."""
    name = f"kvstore-test-{tmp_path.parent.name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(START_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify_ready("here")
        assert sock.recv(100) == b"READY=1\nSTATUS=here\n"
    for place in ("", "vsock:2:1234", str(tmp_path / "nobody")):
        monkeypatch.setenv("NOTIFY_SOCKET", place)
        notify_ready("here")
