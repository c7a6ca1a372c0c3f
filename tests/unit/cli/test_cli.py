"""The `kvstore` command: statuses, errors of one line, its reference, a service that is started, queried and ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore.cli import programs as cli_programs
from kvstore.cli.main import main
from kvstore.cli.programs import BENCHMARKS
from kvstore.client import BlockingStore
from kvstore.client.embedded import EmbeddedOptions
from kvstore.format.names import format_name
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings
from kvstore.testing.records import make_key, make_record
from kvstore.testing.serve import IN_MEMORY, Service
from kvstore.testing.servers.ports import free_address
from kvstore.testing.waiting import eventually
from kvstore.tiers.filesystem import FilesystemTier
from tests.architecture.sources import ROOT

COMMAND = [sys.executable, "-m", "kvstore.cli"]
SOCKET = "unix:/nonexistent/s"


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


def test_the_process() -> None:
    """The release is one line; a wrong call is status 2 and one line on standard error."""
    assert run("--version") == (0, f"kvstore {kvstore.__version__}\n", "")
    code, out, err = run("serve", "--listen", "here")
    assert (code, out, len(err.splitlines())) == (2, "", 1) and err.startswith("kvstore: ")


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_a_frozen_service_is_called_frozen(tmp_path: Path, verb: str) -> None:
    """The message names the likelier cause first: a frozen service, then the wrong port."""
    with Service(tmp_path, IN_MEMORY) as service:
        service.freeze()
        code, _, err = run(verb, "--url", service.url, "--timeout-s", "1")
    assert code == 1 and len(err.splitlines()) == 1
    assert err.index("frozen or very busy") < err.index("administration interface")


@pytest.mark.parametrize(
    ("call", "status", "texts"),
    [
        ("frobnicate", 2, ["frobnicate"]),
        ("serve --lisen unix:/x", 2, ["--lisen", "--listen"]),
        ("serve --listen here", 2, ["listen", "unix:/path", "got 'here'"]),
        ("serve --memory-bytes lots", 2, ["memory_bytes", "8GiB", "got 'lots'"]),
        ("serve --listen tcp://127.0.0.1:0 --cold memory:", 2, ["token_file"]),
        ("serve --config /nonexistent.toml", 2, ["path /nonexistent.toml: No such file"]),
        ("serve --admin-listen 7070", 2, ["admin_listen", "host:port", "127.0.0.1:7070", "'7070'"]),
        ("serve --quotas team-a", 2, ["quotas", "guaranteed and maximum", "'team-a'"]),
        (f"status --url {SOCKET}", 1, ["not reachable", SOCKET, "`kvstore serve`", "--url", "KVSTORE_LISTEN"]),
        (f"explain some-id --url {SOCKET}", 1, ["not reachable", SOCKET]),
        ("status --url nowhere", 2, ["--url", "unix:/path", "'nowhere'"]),
        ("status --url embeded:", 2, ["unix:/path", "'embeded:'", "or embedded:"]),
        ("status --url embedded:", 1, ["no embedded service is running"]),
        ("status --token-file /nonexistent/token", 2, ["--token-file", "/nonexistent/token: No such file"]),
        ("status --timeout-s soon", 2, ["--timeout-s: expected a number, got 'soon'", "kvstore status --help"]),
        ("status --timeout 0", 2, ["--timeout: expected at least 0.01, got '0'", "kvstore status --help"]),
        ("ls --limit 0", 2, ["--limit: expected at least 1, got '0'", "kvstore ls --help"]),
        ("ls x --order foo", 2, ["--order: expected one of hits, bytes, age, idle, stored, got 'foo'"]),
        ("doctor --config", 2, ["--config", "kvstore doctor --help"]),
        ("weights retire", 2, ["WEIGHTS_ID is missing", "kvstore weights retire --help"]),
        (f"pin ab {'1' * 64} --for 7", 2, ["--for: ", "with its unit", ", got '7'"]),
        ("show ab abcd", 2, ["PREFIX: expected 64 hex digits", "kvstore ls", ", got 'abcd'"]),
        ("show AB", 2, ["NAMESPACE: expected 32 hex digits", ", got 'AB'"]),
        ("reindex foo", 2, ["expected nothing more, got foo", "kvstore reindex --help"]),
        ("unpin a b c", 2, ["expected nothing more, got c", "kvstore unpin --help"]),
        ("verify --url xx", 2, ["--url: an address is unix:/path", "or embedded: or none", "'xx'"]),
        ("doctor --url xx", 2, ["--url: an address is unix:/path", "'xx'"]),
        ("verify hot", 2, ["no such tier", "KVSTORE_HOT"]),
        ("verify lukewarm", 2, ["TIER: expected hot, cold or a location", ", got 'lukewarm'"]),
        ("verify memory:", 2, ["no such tier"]),
        ("verify tape://drive", 2, ["TIER must be s3://bucket/prefix", "tape://drive"]),
        ("verify file:///nonexistent/records", 1, ["there are no records: check the path"]),
        ("verify --rate quick", 2, ["--rate: expected a size with its unit, like 100MiB"]),
        ("verify --rate 5", 2, ["--rate: expected a size with its unit, like 5MiB"]),
        ("migrate run --rate 5", 2, ["--rate: expected a size with its unit, like 5MiB"]),
        ("verify /var/records", 2, ["like file:///var/records"]),
        ("serve --cold /var/records", 2, ["cold must be", "like file:///var/records, got '/var/records'"]),
        ("serve --hot redis:6379/1", 2, ["hot must be", "like redis://redis:6379/1, got 'redis:6379/1'"]),
        ("serve --hot user:secret", 2, ["or memory:, got 'user:secret'"]),
        ("serve --event-media tape=X", 2, ["event_media: expected a name of some tiers", "'s3=STORE,redis=SHARED'"]),
        (f"serve --listen {SOCKET} --cold memory: --events-replay-endpoint tcp://*:1", 2, ["events_endpoint: missing"]),
        (
            f"serve --listen {SOCKET} --cold memory: --events-endpoint tcp://*:1 --events-node a,pool:kvstore",
            2,
            ["events_node: expected names of this node", "got pool:kvstore"],
        ),
        ("verify --rate 0", 2, ["--rate: expected at least 1 B"]),
        ("verify --namespace all", 2, ["--namespace", "32 hex digits"]),
        ("bench stroe", 2, ["store, lookup", "stroe"]),
        ("simulate /nonexistent/trace", 2, ["trace", "No such file"]),
    ],
)
def test_errors_name_what_to_change(
    call: str,
    status: int,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A wrong call is 2, a failure is 1: one line in words, with the flag, the setting or the verb that helps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", "127.0.0.1:9")  # at the default address another service may answer
    code = main(call.split())
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (status, "", 1)
    assert err.startswith("kvstore: ") and [text for text in texts if text not in err] == []
    assert re.search(r" [a-z_]+=\S", err) is None


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    """At the start a command imports for a moment; the signal comes with the first of these modules."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code, out, err = run("status", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (code, out, err) == (130, "", "kvstore: interrupted\n")


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
    """`serve` says where, also where that looks like markup, and what does not fit; `status` shows it, a second `serve`
    there is refused, SIGTERM ends it well.
    """
    place = tmp_path / "[s]"
    url, cold = f"unix:{place}", f"file://{tmp_path / 'records'}"
    flags = ["--listen", url, "--cold", cold, "--memory-bytes", "16MiB", "--disk-bytes", "900TiB"]
    with subprocess.Popen([*COMMAND, "serve", *flags], stderr=subprocess.PIPE, text=True) as service:
        try:
            eventually(place.exists, 20)
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
            code, _, err = run("serve", *flags, "--cold", "memory:")
            assert code == 2
            assert "another program listens there" in err
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.stderr is not None
        said = service.stderr.read()
        assert f"set url to {url}\n" in said
        assert "disk_bytes is 900TiB, and the disk of cold has " in said
        assert service.wait(10) == 0
    assert not place.exists()


def test_all_verbs_look_for_a_service_in_one_order(tmp_path: Path) -> None:
    """The service that `admin_listen` names comes before the user's embedded one, for `status` as for `doctor`."""
    own, admin_listen = {"XDG_CACHE_HOME": str(tmp_path), "KVSTORE_TOKEN": ""}, free_address()
    with (
        BlockingStore("embedded:", embedded=EmbeddedOptions(tmp_path / "kvstore", memory_bytes=16 << 20)) as embedded,
        Service(tmp_path, {"cold": "memory:", "memory_bytes": "16MiB", "admin_listen": admin_listen}),
    ):
        embedded.wait_ready(deadline=Deadline.after(60))
        for verb in ("status", "doctor"):
            shown = " ".join(run(verb, **own, KVSTORE_ADMIN_LISTEN=admin_listen)[1].split())  # it may be wrapped
            assert f"at http://{admin_listen}, given as KVSTORE_ADMIN_LISTEN" in shown


def test_a_directory_is_verified_before_and_after_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All whole is 0; a corrupt record is 3, once, with its name and reason; then it is quarantined and 0 again."""

    async def fill() -> None:
        tier = await FilesystemTier.open(tmp_path / "records", budget_bytes=1 << 30)
        for number in range(5):
            await tier.put(make_record(number, 3000), deadline=Deadline.after(30))
        await tier.aclose()

    asyncio.run(fill())
    where = f"file://{tmp_path / 'records'}"
    assert main(["verify", where]) == 0
    assert f"{where}: 5 records, 5 whole (15.6 KiB" in capsys.readouterr().out
    path = tmp_path / "records" / format_name(make_key(3))
    path.write_bytes(path.read_bytes().replace(b"KVR1", b"KVR?"))
    assert main(["verify", where, "--json", "--rate", "1GiB"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["tier"], report["num_records"], report["num_whole"], report["num_bad"]) == (where, 5, 4, 1)
    assert report["bad"][0]["name"] == format_name(make_key(3)) and "magic" in report["bad"][0]["reason"]
    assert main(["verify", where]) == 0


@pytest.mark.parametrize("verb", ["verify", "reindex"])
def test_a_mistyped_directory_is_not_created(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verbs that read records create no directory for them."""
    monkeypatch.setenv("KVSTORE_COLD", f"file://{tmp_path / 'recrods'}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([verb, "--url", "none"]) == 1
    assert "there are no records: check the path" in capsys.readouterr().err
    assert not (tmp_path / "recrods").exists()


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


def test_a_simulation_ends_with_ctrl_c(tmp_path: Path) -> None:
    """From a terminal it interrupts all processes. What they had still to replay would take minutes."""
    trace, line = tmp_path / "trace", '{"timestamp": %d, "input_length": 5120, "hash_ids": %s}\n'
    trace.write_text("".join(line % (at, list(range(at * 10, at * 10 + 10))) for at in range(10_000)))
    budgets = ",".join(f"{share}%" for share in range(1, 100))
    command = [*COMMAND, "simulate", str(trace), "--policy", "auto", "--budget-blocks", budgets]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as verb:
        eventually(lambda: _busy_s(verb.pid) > 2)  # longer than they take to start
        os.killpg(verb.pid, signal.SIGINT)
        try:
            _, err = verb.communicate(timeout=20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(verb.pid, signal.SIGKILL)
    assert (verb.returncode, err) == (130, "kvstore: interrupted\n")


def _busy_s(parent: int) -> float:
    """Processor seconds of the child that used the most."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ticks = (int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11]) for child in children)
    return max(ticks, default=0) / os.sysconf("SC_CLK_TCK")


def test_every_verb_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/cli.md lists each verb, and no other; `kvstore --help` shows the same."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert main(["--help"]) == 0
    shown = set(re.findall(r"^│ (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert shown == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_shells_complete_verbs() -> None:
    """With the variables that a shell sets."""
    words = {"_KVSTORE_COMPLETE": "complete_bash", "COMP_WORDS": "kvstore w", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['kvstore']; from kvstore.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **words},
    )
    assert done.stdout.split() == ["weights"]


@pytest.mark.parametrize(("call", "option"), [("demo --help", "--backends"), ("bench store --help", "--in-flight")])
def test_options_of_a_program_are_its_own(call: str, option: str, tmp_path: Path) -> None:
    """From any folder, also from one with a program of that name."""
    (tmp_path / "demo.py").write_text("raise SystemExit('another one')")
    done = subprocess.run(
        [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", *call.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert option in done.stdout


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The list names programs that exist, and all of them but the parts of others."""
    found = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    found |= {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert {module for module, _ in BENCHMARKS.values()} == found - {"peer", "blend_model"}
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_an_installed_package_says_where_its_programs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no source tree around it."""
    monkeypatch.setattr(cli_programs, "_ROOT", tmp_path)
    assert main(["bench", "ttft"]) == 2
    assert "clone the repository" in capsys.readouterr().err
