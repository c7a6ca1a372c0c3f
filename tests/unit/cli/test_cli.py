"""The `kvstore` command as a process: statuses, one-line errors, a service that can be asked and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.catalog.entry import Level
from kvstore.cli.main import main
from kvstore.cli.reindex import SavedProgress
from kvstore.settings import Settings
from kvstore.testing.service_process import ServiceProcess
from kvstore.tiers.locations import FileLocation

COMMAND = [sys.executable, "-m", "kvstore.cli"]


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_a_frozen_service_is_called_frozen(tmp_path: Path, verb: str) -> None:
    """The likelier cause comes first; whoever answers nothing at all is seldom another port."""
    with ServiceProcess(f"unix:{tmp_path / 's'}") as service:
        service.freeze()
        code, _, err = run(verb, "--url", service.url, "--timeout-s", "1")
    assert code == 1 and len(err.splitlines()) == 1
    assert err.index("frozen or very busy") < err.index("administration interface")


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
        (["bench", "stroe"], 2, ["store, lookup", "stroe"]),
        (["status", "--url", "nowhere"], 2, ["unix:/path", "nowhere"]),
        (["status", "--timeout-s", "soon"], 2, ["timeout-s", "kvstore status --help"]),
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


@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        (["status", "--url", "unix:/nonexistent/s"], 1, ["`kvstore serve`", "--url", "KVSTORE_LISTEN"]),
        (["status", "--url", "embeded:"], 2, ["unix:/path", "'embeded:'", "or embedded:"]),
        (["status", "--url", "embedded:"], 1, ["no embedded service is running"]),
        (["status", "--token-file", "/nonexistent/token"], 2, ["--token-file", "No such file"]),
        (["weights", "retire"], 2, ["kvstore weights retire --help"]),
        (["serve", "--admin-listen", "7070"], 2, ["admin_listen", "host:port", "127.0.0.1:7070", "'7070'"]),
        (["serve", "--quotas", "team-a"], 2, ["quotas", "guaranteed and maximum", "'team-a'"]),
        (["pin", "ab", "1" * 64, "--for", "7"], 2, ["for", "with its unit", "'7'"]),
        (["show", "ab", "abcd"], 2, ["64 hex digits", "kvstore ls", "'abcd'"]),
        (["verify", "hot"], 2, ["no such tier", "KVSTORE_HOT"]),
        (["verify", "warm"], 2, ["hot, cold or a location"]),
        (["simulate", "/nonexistent/trace"], 2, ["trace", "No such file"]),
    ],
)
def test_what_helps_is_named(
    arguments: list[str],
    status: int,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Likewise for mistakes that are easily made: the message has the setting, the flag or the verb that helps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (status, "", 1)
    for text in texts:
        assert text in err


def test_serve_has_a_flag_and_a_help_for_every_setting() -> None:
    """The settings are the only list of flags and the only place that describes them."""
    from kvstore.cli import serve

    described = serve._described()
    assert set(described) == set(Settings.model_fields)
    _, out, _ = run("serve", "-h", COLUMNS="200")
    shown = " ".join(out.replace("│", " ").split())
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in out
        assert described[name] in shown  # whole, brackets too


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
            assert "working" in out and "of 16.0 MiB" in out and "none has connected" in out
            config = tmp_path / "settings.toml"
            config.write_text(f'listen = "{url}"\n')
            code, out, _ = run("status", "--config", str(config), "--timeout", "30", "--all")
            assert code == 0 and "16,777,216" in out
            code, out, _ = run("explain", "--config", str(config))
            assert code == 0 and "no engine has reported" in out
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


@pytest.mark.parametrize("arguments", [["verify"], ["reindex"]])
def test_a_path_with_a_typing_mistake_stays_without_a_directory(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks at records makes none of its own where there are none."""
    monkeypatch.setenv("KVSTORE_COLD", f"file://{tmp_path / 'recrods'}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(arguments) == 1
    assert "there are no records: check the path" in capsys.readouterr().err
    assert not (tmp_path / "recrods").exists()


def test_a_reindex_goes_on_where_it_can_remember_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container whose file system is not to be written to: it says so once."""
    remembered = SavedProgress(Path("/proc/nobody/kvstore"), {Level.COLD: FileLocation(Path("/r"))})
    for num_records in (1, 2):
        remembered.save(Level.COLD, num_records)
    remembered.finish(Level.COLD)
    assert remembered.num_records(Level.COLD) == 2 and remembered.is_done(Level.COLD)
    remembered.clear()
    assert not remembered.is_done(Level.COLD)
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1) and "--state" in err


def test_a_verb_that_is_interrupted_says_so(tmp_path: Path) -> None:
    """Ctrl-C while a trace comes in: 130, and one line."""
    trace = tmp_path / "trace"
    os.mkfifo(trace)
    with subprocess.Popen([*COMMAND, "simulate", str(trace)], stderr=subprocess.PIPE, text=True) as verb:
        with trace.open("wb"):  # returns when the verb reads
            verb.send_signal(signal.SIGINT)
            assert verb.stderr is not None
            assert verb.stderr.read() == "kvstore: interrupted\n"
        assert verb.wait(60) == 130
