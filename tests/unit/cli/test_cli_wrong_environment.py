"""What a newcomer gets wrong first: each is one line with the next step, within seconds, or a service that says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.cli.main import main
from kvstore.testing.servers.ports import free_ports
from tests.deployment.notifications import START_S, receiver

COMMAND = [sys.executable, "-m", "kvstore.cli"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('lisen = "unix:/x"', ["unknown key", "settings.toml", "lisen: did you mean listen?"]),
        ('[kvstore]\nlisten = "unix:/x"', ["settings.toml", "remove the line [kvstore]"]),
        ("listen = ", ["not TOML", "settings.toml", "line 1"]),
        ('memory_bytes = "lots"', ["memory_bytes", "8GiB", "'lots'"]),
        ('hot = "redis//redis:6379"', ["hot", "redis://host:port", "'redis//redis:6379'"]),
        ('cold = "s3:bucket"', ["cold", "s3://bucket/prefix", "'s3:bucket'"]),
        ('listen = "tcp://nohost.invalid:7"', ["its name is not known here", "listen", "tcp://nohost.invalid:7"]),
        ('listen = "tcp://192.0.2.1:7"', ["no such address", "listen", "tcp://192.0.2.1:7"]),
        ('listen = "unix:{folder}/settings.toml"', ["not a socket", "listen", "settings.toml"]),
        ('token_file = "{folder}/open"', ["chmod 600", "token_file", "open"]),
        ('token_file = "{folder}/none"', ["token_file", "No such file"]),
    ],
)
def test_wrong_settings_are_a_line_and_2(
    content: str, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setting, what is expected, what was seen."""
    (tmp_path / "open").write_text("a token that others may read")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "token").write_text("a token of some length")
    (tmp_path / "token").chmod(0o600)
    if "token_file" not in content and "[" not in content:
        content += f'\ntoken_file = "{tmp_path}/token"'
    (tmp_path / "settings.toml").write_text(content.replace("{folder}", str(tmp_path)) + "\n")
    small = [] if "memory_bytes" in content else ["--memory-bytes", "16MiB"]
    cold = [] if "cold" in content else ["--cold", "memory:"]
    code = main(["serve", "--config", str(tmp_path / "settings.toml"), "--admin-listen", "off", *small, *cold])
    said = capsys.readouterr().err.splitlines()
    assert code == 2 and said[-1].startswith("kvstore: ")
    assert len([line for line in said if line.startswith("kvstore: ")]) == 1
    for text in texts:
        assert text in said[-1]


def test_a_taken_port_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is another program's; the setting to change is told."""
    (tmp_path / "token").write_text("a token of some length")
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--listen", url, "--token-file", str(tmp_path / "token"), "--cold", "memory:", "--admin-listen", "off"]
        assert main(["serve", *flags]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("kvstore: cannot listen: another program listens there: end it") and url in said


@contextmanager
def served(folder: Path, *flags: str, **environment: str) -> Iterator[tuple[str, Path]]:
    """A service that is ready, and its log."""
    url, log = f"unix:{folder}/socket", folder / "log"
    variables: Mapping[str, str] = {**os.environ, **environment, "NOTIFY_SOCKET": str(folder / "notify")}
    with receiver(folder / "notify") as ready, log.open("wb") as stderr:
        command = [*COMMAND, "serve", "--listen", url, "--admin-listen", "off", "--memory-bytes", "16MiB", *flags]
        service = subprocess.Popen(command, env=variables, stderr=stderr)
        try:
            assert ready.recv(4096).startswith(b"READY=1")
            yield url, log
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(START_S) == 0


def test_a_tier_that_is_not_there_is_told_by_log_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Redis by a name that nobody knows, S3 where nothing listens: the service starts without them and says for each
    why; `status` answers with 0, that it works in part, and why; S3 too, which nobody has asked for anything since.
    """
    (port,) = free_ports(1)
    keys = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-a-real-secret"}
    endpoint = f"http://127.0.0.1:{port}"
    tiers = ("--hot", "redis://nohost.invalid:6379/0", "--cold", "s3://bucket/pages")
    with served(tmp_path, *tiers, **keys, AWS_ENDPOINT_URL_S3=endpoint, AWS_REGION="eu-1") as (url, log):
        assert main(["status", "--url", url, "--timeout", "60"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "working in part, 2 problems:" in out
        assert "redis does not answer" in out and "check that a server runs there" in out
        assert "s3 does not answer" in out and endpoint in out
        # the second where a busy machine had no time for all attempts
        assert "check the endpoint's address" in out or "check its load and the network" in out
        assert out.count("Next: ") == 2 and "Next: check " in out
        said = log.read_text()
        for tier in ("redis", "s3"):
            [line] = [one for one in said.splitlines() if "starting without it" in one and f"tier={tier}" in one]
            assert "it is used as soon as it answers" in line
    assert "never retrieved" not in log.read_text() and "Traceback" not in log.read_text()


def test_a_directory_that_cannot_be_used_is_a_line_and_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither made nor written to: it says which, and what to look at."""
    (tmp_path / "file").write_text("no directory")
    steps = {"/proc/kvstore": "check that the directory", f"{tmp_path}/file": "remove the file"}
    for cold, step in steps.items():
        assert main(["serve", "--listen", f"unix:{tmp_path}/s", "--cold", f"file://{cold}"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("kvstore: ") and cold in said and step in said


def test_a_name_that_nobody_knows_is_one_line(tmp_path: Path) -> None:
    """Of a service that is asked: the loop says nothing beside it."""
    (tmp_path / "token").write_text("a token of some length")
    (tmp_path / "token").chmod(0o600)
    asked = [*COMMAND, "status", "--url", "tcp://nohost.invalid:7", "--token-file", str(tmp_path / "token")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=START_S, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "--url" in done.stderr and "nohost.invalid" in done.stderr
