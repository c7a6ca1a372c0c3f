"""What verbs print is right to the letter: help, numbers with their nouns, what was done, how a field was typed."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from kvstore.cli import admin, verify
from kvstore.cli.main import main
from kvstore.cli.printing import amounts_text, detail_text
from kvstore.cli.verbs import VERBS, app
from kvstore.doctor.store_in_use import StoreInUse
from kvstore.errors import Unavailable, next_step
from kvstore.runtime.sizes import counted
from kvstore.settings import Settings
from kvstore.tiers.locations import NoTier
from kvstore.wire.address import parse_address
from tests.unit.admin.service_harness import open_service, prompt_of

Run = Callable[..., Coroutine[Any, Any, tuple[int, str]]]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    async def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, arguments)
        said = capsys.readouterr()
        return status, " ".join((said.out + said.err).split())

    return call


@pytest.mark.parametrize("verb", ["", *(verb for verb in VERBS if verb not in ("bench", "demo"))])  # other programs
def test_no_flag_has_a_type_in_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag takes no value: `--json <bool>` would be typed as it stands there, and refused."""
    assert main([*([verb] if verb else []), "--help"]) == 0
    out = capsys.readouterr().out
    assert "--help" in out and "bool" not in out.lower().replace("boolean", "bool")


def test_the_help_of_serve_has_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    """As it would be typed; `not set` where there is none."""
    assert main(["serve", "--help"]) == 0
    out = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert out.count("[default: ") == len(Settings.model_fields)
    for default in ("127.0.0.1:7070", "unix:/run/kvstore.sock", "not set", "256MiB", "30.0", "memory:"):
        assert f"[default: {default}]" in out


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_wrong_setting_is_named_as_it_was_typed(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag as a flag, a variable as a variable, a key with its file."""
    (tmp_path / "a.toml").write_text('lease_s = "long"\n' if source == "file" else "")
    if source == "environment":
        monkeypatch.setenv("KVSTORE_LEASE_S", "long")
    flags = ["--lease-s", "long"] if source == "flag" else []
    assert main(["serve", "--config", str(tmp_path / "a.toml"), *flags]) == 2
    typed = {"flag": "as --lease-s", "environment": "as KVSTORE_LEASE_S", "file": f"in {tmp_path}/a.toml"}[source]
    said = capsys.readouterr().err
    assert "setting lease_s: " in said and f"(given {typed})" in said


def test_numbers_have_their_nouns() -> None:
    assert [counted(number, "boundary", "boundaries") for number in (0, 1, 2, 1024)] == [
        *("0 boundaries", "1 boundary", "2 boundaries", "1,024 boundaries")
    ]
    assert (
        amounts_text({"s3": {"num_boundaries": 1, "num_records": 1, "num_bytes": 5}})
        == "1 boundary in s3 (1 record, 5 B)"
    )


@pytest.mark.parametrize(
    ("name", "value", "words", "text"),
    [
        ("left_before_s", 90, "left before", "90 s"),
        ("fetch_s", 0.12345, "fetch", "0.1235 s"),
        ("needs_bytes", 3 << 20, "needs", "3.0 MiB"),
        ("bytes", 512, "bytes", "512 B"),
        ("first_not_saved_tokens", 1024, "first not saved", "1,024 tokens"),
        ("lost_by_request", "chatcmpl-1", "lost by request", "chatcmpl-1"),
        ("not_saved", {"save_busy": 2}, "not saved", "save busy 2"),
        ("layout.page_tokens", "64, 128", "layout.page_tokens", "64, 128"),
        ("is_complete", True, "is complete", "yes"),
    ],
)
def test_details_are_words_with_units(name: str, value: object, words: str, text: str) -> None:
    assert detail_text(name, value) == (words, text)


def test_an_error_is_split_at_its_next_step() -> None:
    """What happened, with its details, and the step: a caller with a step of its own shows one of the two."""
    said = next_step("cannot connect to Redis: check that a server runs there address=r:1 error=Connection refused")
    assert said == ("cannot connect to Redis, address r:1: Connection refused", "check that a server runs there")
    assert next_step("refused") == ("refused", "")


def test_simulate_names_all_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", str(tmp_path / "x.jsonl"), "--policy", "foo"]) == 2
    said = capsys.readouterr().err
    assert all(policy in said for policy in ("auto", "clairvoyant", "lru", "flops_per_byte"))
    assert "--policy: " in said and "did you mean" not in said


async def test_unpin_and_quota_say_what_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Of a pin whether there was one; of a quota what was removed. Setting a maximum keeps the guarantee, and the other
    way round."""
    async with open_service(tmp_path, with_tokens=False) as made:
        monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", made.url.removeprefix("http://"))
        prompt = await made.save(prompt_of("a"))
        place = (prompt.namespace.hex(), prompt.boundary(64).prefix.hex())
        assert "nothing to do, it was not pinned" in (await run("unpin", *place))[1]
        assert (await run("pin", *place))[0] == 0
        assert "it was pinned until 20" in (await run("unpin", *place))[1]
        await run("quota", "red", "--guaranteed", "1MiB")
        assert "1.0 MiB" in (await run("quota", "red", "--maximum", "20MiB"))[1]
        assert "20.0 MiB" in (await run("quota", "red", "--guaranteed", "2MiB"))[1]
        shown = (await run("quota", "red", "--maximum", "none"))[1]
        assert "2.0 MiB" in shown and "20.0 MiB" not in shown
        removed = (await run("quota", "red", "--remove"))[1]
        assert "removed the quota of red" in removed and "2.0 MiB guaranteed" in removed


async def test_a_wrong_token_is_not_an_absent_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The service answers: the verb says so, and where a token is given."""
    async with open_service(tmp_path) as made:
        await made.server.listen([parse_address("tcp://127.0.0.1:0")])
        url = str(made.server.addresses[-1])
        monkeypatch.setenv("KVSTORE_TOKEN", "nobody's token")
        status, said = await run("status", "--url", url, "--timeout", "30")
    assert status == 1 and "not reachable" not in said
    assert "the service refuses this token" in said and "--token-file" in said


async def test_another_program_is_not_an_absent_service(tmp_path: Path, run: Run) -> None:
    """What answers there is no service: that is said, with what it sent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "s"):
        status, said = await run("status", "--url", f"unix:{tmp_path}/s", "--timeout", "30")
    assert status == 1 and "another program listens there" in said and "got b'HTTP'" in said


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b'{"ok":true}', b"[]"])
async def test_another_program_that_answers_everything_is_no_service(run: Run, body: bytes) -> None:
    """An answer of another form is no bug of ours, and nothing but a question for its health is sent there."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        address = "{}:{}".format(*other.sockets[0].getsockname())
        status, said = await run("gc", "--yes", "--admin-url", address)
    assert status == 1 and "not an administration interface of kvstore (it answered HTTP 200)" in said
    assert asked == [b"GET /livez HTTP/1.1\r\n"]


async def test_a_frozen_service_is_known_soon(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port accepts and answers nothing: no verb waits for that as long as for a slow answer."""
    monkeypatch.setattr("kvstore.cli.admin.ALIVE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        async with asyncio.timeout(20):
            status, said = await run("ls", "--admin-url", address, "--timeout", "30")
    assert status == 1 and "does not answer in time: it is frozen" in said and "do not start a second one" in said


async def test_a_frozen_service_with_a_full_queue_is_no_absent_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What calls it for long fills the queue of its socket, which then refuses at once. Nobody should start another.
    No tool takes the store of the shell for that of a service which was named.
    """
    monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", "off")
    monkeypatch.setenv("KVSTORE_LISTEN", f"unix:{tmp_path / 's'}")
    with ExitStack() as stack:
        frozen = stack.enter_context(socket.socket(socket.AF_UNIX))
        frozen.bind(str(tmp_path / "s"))
        frozen.listen(0)
        with suppress(BlockingIOError):
            for _ in range(10):
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(tmp_path / "s"))
        for verb in ("status", "verify"):
            status, said = await run(verb)
            assert status == 1 and "frozen or very busy" in said and "do not start a second one" in said
        (tmp_path / "records" / "v1").mkdir(parents=True)
        monkeypatch.setenv("KVSTORE_COLD", f"file://{tmp_path / 'records'}")
        status, said = await run("verify")
        assert status == 0 and "(the settings of this shell; the service did not report its store)" in said
        status, said = await run("verify", "--url", f"unix:{tmp_path / 's'}")
        assert status == 1 and "does not report which store it uses" in said and "frozen or very busy" in said


async def test_the_doctor_looks_for_the_store_no_longer_than_that(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen service delays it for the time of one check, not for that of three."""
    monkeypatch.setattr("kvstore.cli.doctor.ALIVE_S", 0.2)
    monkeypatch.setattr("kvstore.cli.doctor.run_checks", lambda *_, **__: [])
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        monkeypatch.setenv("KVSTORE_LISTEN", f"tcp://127.0.0.1:{frozen.getsockname()[1]}")
        monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", "off")
        async with asyncio.timeout(20):
            assert (await run("doctor", "--timeout", "60"))[0] == 0


def test_a_job_whose_service_goes_away_is_named() -> None:
    """It may run on, or be interrupted: the user learns how to find out."""
    started = {"job": "5f0c6b1d2e7a4819", "kind": "gc", "state": "running", "progress": {"unit": "records"}}

    class Away:
        def call(self, *_: object, **__: object) -> object:
            return started

        def get(self, *_: object) -> object:
            raise Unavailable("no administration interface answers: check that it runs")

    with pytest.raises(Unavailable, match="check that it runs; `kvstore jobs 5f0c6b1d2e7a4819` shows later"):
        admin.run_job(cast(admin.AdminClient, Away()), "gc", query={}, quiet=True)


def test_verify_where_the_service_keeps_no_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user typed no name of a tier, so the setting that decided is named."""
    store = StoreInUse(Settings(cold=NoTier()), service="unix:/run/s", found="given as --url")
    monkeypatch.setattr(verify, "store_in_use", lambda *_: store)
    assert main(["verify"]) == 2
    assert "there is nothing to verify: cold of the service at unix:/run/s is memory:" in capsys.readouterr().err


def test_every_input_of_the_interface_is_named_as_it_is_typed() -> None:
    """Each parameter and field of a request that a verb sends has its flag or argument, and verbs have these."""
    described = json.loads((ROOT / "docs/openapi.json").read_text())
    inputs: set[str] = set()
    for calls in described["paths"].values():
        for call in calls.values():
            inputs |= {one["name"] for one in call.get("parameters", ())}
            if "requestBody" in call:
                schema = call["requestBody"]["content"]["application/json"]["schema"]
                named = schema.get("$ref", "").rpartition("/")[2]
                inputs |= set((described["components"]["schemas"][named] if named else schema).get("properties", ()))
    no_verb = {"children_limit", "confirm", "follow", "hours", "last-event-id", "request"}
    no_verb |= {
        "system_tokens",
        "document_tokens",
        "fixed_first",
        "fixed_last",
        "keep_duplicates",
        "within_ms",
        "compare",
    }
    no_verb |= {"demote", "model", "prefetch", "priority", "release", "retain_s", "session", "tenant_id"}
    assert set(admin.TYPED) == inputs - no_verb and no_verb <= inputs
    helps = " ".join(_parameters())
    assert all(re.search(rf"(?<!\S){re.escape(typed)}(?!\S)", helps) for typed, _ in admin.TYPED.values())


def _parameters() -> Iterator[str]:
    """The flags and arguments of all verbs, as they are typed."""
    root: Any = typer.main.get_command(app)
    for verb in set(VERBS).difference({"bench", "demo"}):
        command = root.get_command(None, verb)
        for one in (command, *getattr(command, "commands", {}).values()):
            for param in one.params:
                yield from param.opts if param.opts[0].startswith("-") else [str(param.name).upper()]
