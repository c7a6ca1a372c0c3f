"""Checks that hang, fail and have bugs; what is hidden; and the command where nothing is installed or set."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from kvstore.cli import doctor
from kvstore.cli.main import main
from kvstore.doctor import directory
from kvstore.doctor.check import Check, Criterion, Finding, Verdict, run_checks, without
from kvstore.doctor.namespaces import namespaces_check
from kvstore.doctor.store_in_use import StoreInUse
from kvstore.errors import Unavailable
from kvstore.format.manifest import pack_manifest
from kvstore.format.names import manifest_name
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings, settings_from
from kvstore.testing.prompts import ATTENTION, describe

FIX = "start it again"


def test_checks_that_do_not_end_well() -> None:
    """One blocks its thread, one waits, one raises, one has a bug, one ends early: none delays another."""
    never = threading.Event()

    async def blocks(deadline: Deadline) -> AsyncIterator[Finding]:
        never.wait()
        yield Criterion("blocks").ok("too late")

    async def waits(deadline: Deadline) -> AsyncIterator[Finding]:
        yield Criterion("waits").ok("begun")
        async with deadline.scope("the answer"):
            await asyncio.Event().wait()

    async def raises(deadline: Deadline) -> AsyncIterator[Finding]:
        raise Unavailable("the peer is gone", address="h:1")
        yield

    async def has_a_bug(deadline: Deadline) -> AsyncIterator[Finding]:
        raise ZeroDivisionError("oh")
        yield

    async def ends_early(deadline: Deadline) -> AsyncIterator[Finding]:
        yield Criterion("early").failed("broken", FIX)

    checks = [
        Check(("blocks", "b2"), blocks, FIX),
        Check(("waits", "w2"), waits, FIX),
        Check(("raises",), raises, FIX),
        Check(("bug",), has_a_bug, FIX),
        Check(("early", "e2"), ends_early, FIX),
    ]
    found = run_checks(checks, timeout_s=0.1)
    never.set()
    assert [finding.name for finding in found] == ["blocks", "b2", "waits", "w2", "raises", "bug", "early", "e2"]
    told = {finding.name: (finding.verdict, finding.seen) for finding in found}
    assert told["blocks"] == (Verdict.FAILED, "no answer within 0.1 s")
    assert told["b2"] == (Verdict.SKIPPED, "see blocks")
    assert told["waits"] == (Verdict.OK, "begun")
    assert told["w2"][0] is Verdict.FAILED
    assert told["raises"] == (Verdict.FAILED, "the peer is gone (address h:1)")
    assert told["bug"] == (Verdict.FAILED, "a bug, please report it: ZeroDivisionError: oh")
    assert told["early"] == (Verdict.FAILED, "broken")
    assert told["e2"] == (Verdict.SKIPPED, "see early")
    assert {finding.fix for finding in found if finding.verdict is Verdict.FAILED} == {FIX}


def test_a_check_that_depends_on_others_concludes_when_all_have_ended() -> None:
    """Whichever ends first, and wherever it stands; the order stays."""

    async def first(deadline: Deadline) -> AsyncIterator[Finding]:
        yield Criterion("first").failed("b is not known", FIX)

    async def second(deadline: Deadline) -> AsyncIterator[Finding]:
        await asyncio.sleep(0.01)
        yield Criterion("second").ok("it is well")

    def conclude(found: Mapping[str, Finding]) -> Iterator[Finding]:
        yield Criterion("first").ok(found["second"].seen)

    found = run_checks([Check(("first",), first, FIX, conclude), Check(("second",), second, FIX)], timeout_s=20)
    assert [(one.name, one.seen) for one in found] == [("first", "it is well"), ("second", "it is well")]


def test_secrets_are_hidden() -> None:
    """Wherever they stand; an empty secret hides nothing."""
    finding = without(Criterion("x", "no hunter2").warning("said hunter2", "not hunter2"), ["hunter2"])
    assert (finding.seen, finding.expected, finding.fix) == ("said ***", "no ***", "not ***")


def test_an_embedded_user_needs_nothing(tmp_path: Path) -> None:
    """Python and our package alone, nothing set: what is not there is skipped with its reason, nothing failed."""
    blocked = ["redis", "hiredis", "aioboto3", "aiobotocore", "boto3", "botocore", "torch", "vllm"]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from kvstore.cli.main import main\nsys.exit(main(['doctor', '--json', '--timeout', '60']))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "AWS_"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "KVSTORE_ADMIN_LISTEN": "off"}  # others may run a service here
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    why = {name: finding["seen"] for name, finding in found.items() if finding["verdict"] == "skipped"}
    assert "no embedded service is running" in why["service"]
    assert "no Redis is used" in why["redis"] and "no S3 is used" in why["s3"]
    assert "no engine has opened one yet" in why["namespaces"]
    assert found["directory"]["verdict"] == "ok" and str(tmp_path) in found["directory"]["expected"]
    assert not (tmp_path / "kvstore").exists()  # looking makes nothing


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", "off")  # others may run a service here


@pytest.mark.usefixtures("unset")
def test_an_address_of_the_environment_is_not_said_to_be_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user who must correct it, or sees which service was asked, reads where it stands."""
    monkeypatch.setenv("KVSTORE_CONNECTOR_URL", "embeded:")
    assert main(["doctor"]) == 2
    assert "KVSTORE_CONNECTOR_URL: an address is unix:/path" in capsys.readouterr().err
    address = "unix:/nonexistent/socket"
    monkeypatch.setenv("KVSTORE_CONNECTOR_URL", address)
    store = StoreInUse(Settings(), service=address, found="given as --url")
    monkeypatch.setattr(doctor, "store_in_use", lambda *_: store)
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["store"]["found"] == "given as KVSTORE_CONNECTOR_URL"


@pytest.mark.usefixtures("unset")
def test_an_engines_node_without_the_services_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The url that its engines have is asked; of the tiers it is said where to ask."""
    monkeypatch.setenv("KVSTORE_CONNECTOR_URL", "tcp://127.0.0.1:1")
    assert main(["doctor", "--json", "--timeout", "30"]) == 1
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert [name for name, finding in found.items() if finding["verdict"] == "failed"] == ["service"]
    assert "tcp://127.0.0.1:1" in found["service"]["fix"]
    assert all("KVSTORE_HOT" in found[name]["seen"] for name in ("redis", "s3", "directory", "namespaces"))
    assert "runs elsewhere" in found["limits.memory"]["seen"]


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--url", "nowhere"], "unix:/path"),
        (["--timeout", "soon"], "timeout"),
        (["--timeout", "0"], "timeout"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["--loud"], "--loud"),
    ],
)
def test_wrong_calls(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """2, and one line that names what to change."""
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err and len(err.splitlines()) == 1


@pytest.mark.usefixtures("unset")
def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """People get a table, and below it a line for each fix that can be copied whole."""
    monkeypatch.setenv("KVSTORE_LISTEN", "unix:/nonexistent/socket")
    monkeypatch.setenv("KVSTORE_COLD", "memory:")
    monkeypatch.setenv("KVSTORE_MEMORY_BYTES", "900TiB")
    assert main(["doctor", "--timeout", "60"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "2 failed" in lines[-1]
    assert any("service" in line and "failed" in line for line in lines)
    fixes = [line for line in lines if line.startswith("service: ")]
    assert len(fixes) == 1 and "kvstore serve --listen unix:/nonexistent/socket" in fixes[0]
    assert any(line.startswith("limits.memory: set memory_bytes") for line in lines)


def test_the_progress_of_a_migration_hides_no_namespace(tmp_path: Path) -> None:
    """It is stored under names like those of namespaces, of which there may be hundreds."""
    for number in range(300):
        (tmp_path / "v1" / f"{number:032x}").mkdir(parents=True)
    one = describe(ATTENTION)
    path = tmp_path / manifest_name(one.id)
    path.parent.mkdir()
    path.write_bytes(pack_manifest(one))
    (finding,) = run_checks([namespaces_check(settings_from({"cold": f"file://{tmp_path}"}))], timeout_s=30)
    assert (finding.verdict, finding.seen) == (Verdict.OK, "one namespace, which all engines share")


def test_a_directory_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said who may not, and nothing is guessed of its space. (Tests may run as root, who may look anywhere.)"""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(directory, "read_facts", refuse)
    access, space, medium = run_checks([directory.directory_check(Path("/closed/records"), None)], timeout_s=30)
    assert access.verdict is Verdict.FAILED and "/closed/records" in access.seen and "chmod +x" in access.fix
    assert space.seen == medium.seen == "see directory"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("place", ["proc", "file", "below a file", "a file inside"])
def test_the_doctor_refuses_the_directories_that_serve_refuses(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also as root, whom rights do not stop: what cannot be made is tried, and what is in the way is looked at."""
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "v1").write_text("in the way")
    cold = {
        "proc": "/proc/kvstore/records",
        "file": f"{tmp_path}/file",
        "below a file": f"{tmp_path}/file/records",
        "a file inside": f"{tmp_path}/records",
    }[place]
    monkeypatch.setenv("KVSTORE_COLD", f"file://{cold}")
    assert main(["serve", "--listen", f"unix:{tmp_path}/s", "--admin-listen", "off", "--memory-bytes", "16MiB"]) == 1
    capsys.readouterr()
    main(["doctor", "--json", "--url", "none", "--timeout", "30"])
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["directory"]["verdict"] == "failed", found["directory"]
