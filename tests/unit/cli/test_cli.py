"""The `kvstore` command as a process: statuses, one-line errors, a service that can be asked and ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.settings import Settings

COMMAND = [sys.executable, "-m", "kvstore.cli"]


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_version() -> None:
    """One line."""
    assert run("--version") == (0, f"kvstore {kvstore.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        (["frobnicate"], 2, ["frobnicate"]),
        (["serve", "--lisen", "unix:/x"], 2, ["--lisen", "--listen"]),
        (["serve", "--listen", "here"], 2, ["listen", "unix:/path", "'here'"]),
        (["serve", "--memory-bytes", "lots"], 2, ["memory_bytes", "8GiB", "'lots'"]),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--cold", "memory:"], 2, ["token_file"]),
        (["serve", "--config", "/nonexistent.toml"], 2, ["/nonexistent.toml"]),
        (["status", "--url", "unix:/nonexistent/s"], 1, ["not reachable", "/nonexistent/s"]),
        (["explain", "some-id", "--url", "unix:/nonexistent/s"], 1, ["not reachable", "/nonexistent/s"]),
        (["status", "--url", "nowhere"], 2, ["unix:/path", "nowhere"]),
        (["status", "--timeout-s", "soon"], 2, ["timeout-s"]),
    ],
)
def test_errors_are_one_line_that_names_what_to_change(arguments: list[str], status: int, texts: list[str]) -> None:
    """A wrong call is 2, a failure is 1; neither shows a traceback."""
    code, out, err = run(*arguments)
    assert (code, out) == (status, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("kvstore: ")
    for text in texts:
        assert text in err


def test_serve_has_a_flag_and_a_help_for_every_setting() -> None:
    """The settings are the only list of flags and the only place that describes them."""
    from kvstore.cli import serve

    described = serve._described()
    assert set(described) == set(Settings.model_fields)
    _, out, _ = run("serve", "--help")
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in out


def test_a_service_is_served_asked_and_ended(tmp_path: Path) -> None:
    """`serve` says where, `status` shows it, a second `serve` there is refused, SIGTERM ends it well."""
    url = f"unix:{tmp_path / 's'}"
    flags = ["--listen", url, "--cold", "memory:", "--memory-bytes", "16MiB"]
    with subprocess.Popen([*COMMAND, "serve", *flags], stderr=subprocess.PIPE, text=True) as service:
        try:
            ends_s = time.monotonic() + 20
            while not (tmp_path / "s").exists():
                assert time.monotonic() < ends_s
                time.sleep(0.02)
            code, out, err = run("status", "--json", "--url", url)
            assert (code, err) == (0, "")
            values = json.loads(out)
            assert values["service"]["pid"] == service.pid
            assert values["tiers"]["memory"]["limit_bytes"] == 16 << 20
            code, out, _ = run("status", "--url", url)
            assert code == 0
            assert "16,777,216 (16.0 MiB)" in out
            code, _, err = run("serve", *flags)
            assert code == 2
            assert "another program listens there" in err
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.stderr is not None
        said = service.stderr.read()
        assert f"set url to {url}" in said
        assert service.wait(10) == 0
    assert not (tmp_path / "s").exists()
