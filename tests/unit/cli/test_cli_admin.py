"""Verbs that ask the administration interface, against a real service: tables, JSON, statuses, errors, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import Outcome
from kvstore.cli.admin import AdminClient, admin_client, report_of
from kvstore.errors import Unavailable
from kvstore.model.keys import PlainChain
from kvstore.service.admin.jobs.board import JobBoard
from kvstore.service.admin.jobs.job import Job
from kvstore.service.admin.listing import Page, list_entries
from kvstore.service.authentication import Grant
from kvstore.settings import Settings
from kvstore.store.upkeep.reindexing import ReindexReport
from kvstore.testing.catalog_contract import mark_complete
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_address
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of
from tests.unit.cli.conftest import Run


@pytest.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceHarness]:
    """A service that the environment names, with an operator's token there."""
    async with open_service(tmp_path) as opened:
        monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", opened.url.removeprefix("http://"))
        monkeypatch.setenv("KVSTORE_TOKEN", "operator token")
        yield opened


async def told(run: Run, *arguments: str) -> Any:
    """What a verb says with --json."""
    status, out, err = await run(*arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


async def hit(made: ServiceHarness, prompt: Prompt) -> int:
    return (await made.store.lookup(prompt.query(), deadline=soon())).resume_tokens


async def test_a_list_says_what_it_lacks(made: ServiceHarness, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace without pins, or without boundaries; a page with the flag that continues it; entries that could not
    be read in time; boundaries whose position is not known.
    """
    prompt = await made.save(prompt_of("a"))
    namespace = prompt.namespace.hex()
    status, out, _ = await run("ls", namespace, "--pins")
    assert status == 0 and out.endswith("is pinned: `kvstore pin NAMESPACE PREFIX` pins one\n")
    _, out, _ = await run("ls", namespace, "--limit", "4")
    listed, _, flag = out.partition("there are more: ")
    _, rest, _ = await run("ls", namespace, "--limit", "4", *flag.split())
    assert listed.count(" filesystem ") == 4 and rest.count(" filesystem ") == 2 and "there are more" not in rest

    async def read_in_part(*arguments: Any, **options: Any) -> Page:
        page = await list_entries(*arguments, **options)
        return replace(page, entries=[replace(entry, tokens=0) for entry in page.entries], is_complete=False)

    monkeypatch.setattr("kvstore.service.admin.resources.prefixes.list_entries", read_in_part)
    _, out, _ = await run("ls", namespace)
    assert out.count("│      ? │") == 6 and out.endswith("not read to its end in time: entries may be missing\n")
    assert (await run("rm", namespace, "--yes"))[0] == 0
    assert (await run("ls", namespace))[1].startswith("the namespace holds no boundaries")


async def test_what_is_stored_is_listed_and_shown(made: ServiceHarness, run: Run) -> None:
    """Namespaces, boundaries and pins as tables with whole names and as JSON; a start of a namespace's id is enough."""
    prompt = await made.save(prompt_of("a"))
    namespace, prefix = prompt.namespace.hex(), prompt.boundary(128).prefix.hex()
    status, out, err = await run("ls")
    assert (status, err) == (0, "") and namespace in out and "filesystem 14.0 KiB" in out
    listed = (await told(run, "ls"))["namespaces"][0]
    assert (listed["num_boundaries"], listed["door"]) == (6, "connector") and "connector" in out
    status, out, _ = await run("ls", namespace[:6], "--order", "age", "--limit", "2")
    assert status == 0 and out.count("filesystem") == 2 and "--cursor" in out
    assert len((await told(run, "ls", namespace[:6], "--order", "stored"))["prefixes"]) == 6
    status, out, _ = await run("show", namespace[:6])
    assert status == 0 and "layout.page_tokens" in out and "64" in out
    status, out, _ = await run("show", namespace, prefix)
    assert status == 0 and "filesystem 2/2" in out and prompt.boundary(192).prefix.hex() in out
    assert (await told(run, "show", namespace, prefix))["tokens"] == 128
    status, out, _ = await run("pin", namespace[:6], prefix, "--for", "2h")
    assert status == 0 and out.startswith("pinned until ")
    status, out, _ = await run("ls", namespace, "--pins")
    assert status == 0 and prefix in out
    status, out, _ = await run("unpin", namespace, prefix)
    assert status == 0 and out.startswith("unpinned, it was pinned until ") and prefix in out
    assert (await told(run, "ls", namespace, "--pins"))["pins"] == []


@pytest.mark.parametrize("is_complete", [True, False])
async def test_an_incomplete_catalog_is_not_an_empty_store(made: ServiceHarness, run: Run, is_complete: bool) -> None:
    """A catalog that lost its entries: an empty list says that records may be stored, and how to find them."""
    await made.catalog.mark_incomplete(deadline=soon())
    if is_complete:
        await mark_complete(made.catalog)
    status, out, err = await run("ls")
    assert (status, err, "no engine has saved a page yet" in out) == (0, "", is_complete)
    assert ("`kvstore reindex`" in out) is ("`kvstore reindex`" in (await run("top", "--once"))[1]) is not is_complete
    assert (await told(run, "ls"))["is_complete"] is is_complete


async def test_an_incomplete_catalog_lists_what_it_has(made: ServiceHarness, run: Run) -> None:
    prompt = await made.save(prompt_of("a"))
    await made.catalog.mark_incomplete(deadline=soon())
    status, out, _ = await run("ls")
    assert status == 0 and prompt.namespace.hex() in out and "`kvstore reindex`" in out
    status, out, _ = await run("rm", prompt.namespace.hex(), "--yes")
    assert status == 0 and "note: the catalog may lack records that are stored: repeat this" in out


async def test_interrupted_jobs_that_cannot_be_read(made: ServiceHarness, run: Run, tmp_path: Path) -> None:
    """A list without them says so, and a job that is not found may be one of them."""
    (tmp_path / "records" / "jobs.json").write_text("{")
    status, out, err = await run("jobs")
    assert status == 0 and "or was interrupted" not in out and "interrupted jobs are not known now" in err
    assert err.count("repair or delete the file") == 1
    assert "repair or delete the file" in (await told(run, "jobs"))["unread"]
    status, _, err = await run("jobs", "0" * 16)
    assert status == 1 and "no such job" not in err and "cannot be read" in err


async def test_deletion_asks_first(made: ServiceHarness, run: Run, tmp_path: Path) -> None:
    """Without --yes nothing goes; one boundary, all behind one, one user's prompts by salt, a whole namespace."""
    prompt = await made.save(prompt_of("a"))
    namespace, prefix = prompt.namespace.hex(), prompt.boundary(336).prefix.hex()
    status, out, _ = await run("rm", namespace, prefix)
    assert status == 0 and out.startswith("would delete: 1 boundary in memory") and "add --yes" in out
    assert await hit(made, prompt) == 336
    status, out, _ = await run("rm", namespace, prefix, "--yes")
    assert status == 0 and out.startswith("deleted: ") and await hit(made, prompt) == 320
    job = await told(run, "rm", namespace, prompt.boundary(256).prefix.hex(), "--recursive", "--yes")
    assert job["report"]["by_tier"]["filesystem"]["num_boundaries"] == 2 and await hit(made, prompt) == 192
    (tmp_path / "ids").write_text(json.dumps([1] * 64))
    (tmp_path / "salt").write_text("anna\n")
    user = ("--token-ids", str(tmp_path / "ids"), "--salt-file", str(tmp_path / "salt"))
    assert PlainChain("anna").extend([1] * 64)
    assert (await told(run, "rm", namespace, *user, "--yes"))["report"]["by_tier"] == {}
    status, out, _ = await run("rm", namespace, "--unused", "1h", "--yes")
    assert (status, out) == (0, "deleted: nothing\n")
    status, out, _ = await run("rm", namespace[:8], "--yes")
    assert status == 0 and out.startswith("deleted: 3 boundaries in filesystem") and await hit(made, prompt) == 0


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": 1}'])
async def test_token_ids_are_a_list(made: ServiceHarness, run: Run, tmp_path: Path, text: str) -> None:
    """Whatever else the file has is named, also lists in lists without end."""
    (tmp_path / "ids").write_text(text)
    status, out, err = await run("rm", "0" * 64, "--token-ids", str(tmp_path / "ids"))
    assert (status, out) == (2, "") and "expected a JSON list of token ids in" in err and "bug" not in err, err


async def test_orders_are_given(made: ServiceHarness, run: Run) -> None:
    """Quotas are set, shown and removed; weights are retired, collected and taken back; each asks where it deletes."""
    old = await made.save(Prompt(ATTENTION, "a", 128, tenant="red", weights_id="old"))
    await made.save(Prompt(ATTENTION, "b", 64, tenant="blue"))  # evicted if a run begins while the quota is small
    status, out, _ = await run("quota")
    assert status == 0 and out.startswith("no quotas: a tenant's token shows only what is that tenant's")
    status, out, _ = await run("quota", "red", "--guaranteed", "1MiB", "--maximum", "2MiB")
    assert status == 0 and "1.0 MiB" in out and "an operator" in out
    assert (await told(run, "quota"))["quotas"][0]["maximum_bytes"] == 2 << 20
    status, out, _ = await run("quota", "red", "--remove")
    assert status == 0 and out.startswith("removed the quota of red") and "no quota of red" in out
    status, out, _ = await run("quota", "red", "--remove")
    assert status == 0 and out.startswith("nothing to do: no operator has set a quota of red")
    out = (await run("quota", "nobody", "--maximum", "1KiB"))[1]
    assert "no credential and no stored namespace is of a tenant nobody" in out and "above" not in out
    out = (await run("quota", "blue", "--maximum", "1KiB"))[1]
    assert "above its maximum" in out and "check its name" not in out
    await run("quota", "blue", "--remove")
    status, out, _ = await run("weights", "list")
    assert status == 0 and "old" in out
    status, out, _ = await run("weights", "retire", "old")
    assert status == 0 and "add --yes" in out and await hit(made, old) == 128
    assert (await told(run, "weights", "retire", "old", "--yes"))["weights"]["is_retired"]
    assert await hit(made, old) == 0
    status, out, _ = await run("weights", "retire", "old", "--yes")
    assert status == 0 and out.endswith("nothing to do: they are retired already\n")
    status, out, _ = await run("gc")
    assert status == 0 and "would delete, of retired weights: 2 boundaries in filesystem" in out
    status, out, _ = await run("weights", "restore", "old", "--yes")
    assert status == 0 and "restored: every service serves within seconds" in out and await hit(made, old) == 128
    status, out, _ = await run("weights", "restore", "old")
    assert status == 0 and out.endswith("nothing to do: they are not retired\n")
    assert (await told(run, "gc", "--yes"))["report"]["retired"] == {}
    await run("weights", "retire", "old", "--yes")
    assert (await told(run, "gc", "--yes"))["report"]["retired"]["filesystem"]["num_records"] == 4


def test_a_report_of_another_release() -> None:
    """A job's report is read whatever a newer service tells beside it, or an older one does not."""
    report = report_of(ReindexReport, {"num_records": 3, "num_levitated": 1})
    assert (report.num_records, report.num_stale) == (3, 0)


async def test_the_service_is_shown_as_it_works(
    made: ServiceHarness, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, as tables or JSON: counters, tiers, namespaces, requests; a tenant's token shows what is its own."""
    prompt = await made.save(prompt_of("a"))
    made.store.report(Outcome("chatcmpl-1", prompt.namespace, 336, 320, 0, 0, "nothing_stored", tenant="red"))
    status, out, err = await run("top", "--once", "--timeout", "60")
    assert (status, err) == (0, "")
    for text in (
        "since its start: 0% of 336 prompt tokens came from here; 0 of 1 requests resumed; ",
        "filesystem",
        "healthy",
        prompt.namespace.hex(),
        "chatcmpl-1",
    ):
        assert text in out
    seen = await told(run, "top", "--timeout", "60")
    assert seen["counters"]["saves"] == 12 and [tier["level"] for tier in seen["tiers"]] == ["memory", "cold"]
    monkeypatch.setenv("KVSTORE_TOKEN", "blue token")
    seen = await told(run, "top", "--timeout", "60")
    assert (seen["counters"], seen["namespaces"], seen["requests"]) == (None, [], [])
    assert (
        "(no counters: this concerns all tenants: it needs an operator's token"
        in (await run("top", "--once", "--timeout", "60"))[1]
    )

    def silent(*_: object) -> str:
        raise Unavailable("the service does not answer in time")

    monkeypatch.setattr(AdminClient, "text", silent)
    assert "(no counters: the service does not answer in time)" in (await run("top", "--once"))[1]


async def test_the_doctor_shows_the_token_of_the_environment(
    made: ServiceHarness, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all verbs do: with a right one the service answers, with a wrong one that is what is wrong. It makes logs
    quiet while it runs, and no longer."""
    call = ("doctor", "--url", f"unix:{tmp_path / 'socket'}", "--timeout", "60", "--json")
    for token, verdict in (("operator token", "ok"), ("wrong", "failed")):
        monkeypatch.setenv("KVSTORE_TOKEN", token)
        findings = {one["name"]: one for one in json.loads((await run(*call))[1])["findings"]}
        assert findings["service"]["verdict"] == verdict
        assert ("token" in findings["service"]["seen"]) == (verdict == "failed")
    assert [logging.getLogger(name).level for name in ("kvstore", "asyncio")] == [logging.NOTSET] * 2


async def test_requests_are_listed_by_their_whole_ids(made: ServiceHarness, run: Run, tmp_path: Path) -> None:
    """They are there to be copied; a part that several have asks for more, one that none has tells how to go on."""
    prompt = await made.save(prompt_of("a"))
    ids = [f"chatcmpl-{digit * 50}" for digit in "12"]
    for id_ in ids:
        made.store.report(Outcome(id_, prompt.namespace, 336, 320, 0, 0, "nothing_stored", tenant="red"))
    url = ("--url", f"unix:{tmp_path / 'socket'}")
    status, out, err = await run("explain", *url)
    assert (status, err) == (0, "") and all(id_ in out for id_ in ids)
    status, out, _ = await run("explain", "chatcmpl-1", *url)
    assert status == 0 and ids[0] in out
    status, _, err = await run("explain", "chatcmpl", *url)
    assert status == 2 and err.startswith("kvstore: REQUEST: several requests") and "write more of it" in err
    status, _, err = await run("explain", "cmpl", *url)
    assert status == 2 and err.startswith("kvstore: REQUEST: unknown request, got cmpl: ")
    assert "without an id to list recent ones" in err


@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        (["show", "0" * 32], 1, ["NAMESPACE: no such namespace", "kvstore ls"]),
        (["ls", "--pins"], 2, ["--pins needs a namespace", "kvstore ls"]),
        (["ls", "--cursor", "x"], 2, ["--cursor: not a cursor of this list, got x: start again"]),
        (["jobs", "abc"], 2, ["JOB: expected 16 hex digits", "got abc: `kvstore jobs` lists them"]),
        (["show", "f" * 31], 2, ["no namespace starts with", "kvstore ls"]),
        (["show", "x"], 2, ["32 hex digits"]),
        (["pin", "0" * 32, "1" * 64, "--for", "soon"], 2, ["for", "7d"]),
        (["pin", "0" * 32, "1" * 64, "--for", "900w"], 2, ["--for: expected at most ", "got 900w"]),
        (["show", "0" * 32, "--compare", "x"], 2, ["--compare: expected 32 hex digits", "got 'x'"]),
        (["rm", "0" * 32, "--recursive"], 2, ["--recursive"]),
        (["rm", "0" * 32, "", "--yes"], 2, ["PREFIX: expected 64 hex digits", "got ''"]),
        (["rm", "0" * 32, "--unused", "", "--yes"], 2, ["--unused: expected a time with its unit", "got ''"]),
        (["rm", "0" * 32, "--salt-file", "/dev/null", "--yes"], 2, ["--salt-file: ", "the file is empty"]),
        (["quota", "--maximum", "1GiB"], 2, ["need a tenant"]),
        (["quota", "red", "--maximum", "much"], 2, ["maximum", "100GiB"]),
        (["quota", "red", "--guaranteed", "1PiB"], 2, ["--guaranteed: ", "three quarters", "expected at most "]),
        (["quota", "red", "--maximum", "5"], 2, ["--maximum: expected a size with its unit", "5GiB"]),
        (["quota", "red", "--maximum", "0"], 2, ["--maximum: expected at least", "'0'"]),
        (["quota", "red", "--maximum", "1MiB", "--guaranteed", "2MiB"], 2, ["--maximum: expected", "2.0 MiB"]),
        (["weights", "retire", "nobody's"], 1, ["WEIGHTS_ID: these weights are unknown", "`kvstore weights list`"]),
        (["ls", "--admin-url", "ftp://x"], 2, ["http://host:port"]),
        (["ls", "--token-file", "/nonexistent"], 2, ["--token-file", "/nonexistent"]),
    ],
)
async def test_errors_name_the_next_step(
    made: ServiceHarness, run: Run, arguments: list[str], status: int, texts: list[str]
) -> None:
    """A wrong call is 2, what is not there or refused is 1; one line each."""
    code, out, err = await run(*arguments)
    assert (code, out, len(err.splitlines())) == (status, "", 1)
    assert err.startswith("kvstore: ") and all(text in err for text in texts)


async def test_a_token_that_is_refused_is_told(
    made: ServiceHarness, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None, a wrong one, one that may not: how to show another; a file is stronger than the environment. A service that
    is not there, and something else that listens, are told too, and no token is ever said.
    """
    monkeypatch.setenv("KVSTORE_TOKEN", "wrong")
    code, _, err = await run("ls")
    assert code == 1 and "--token-file" in err and "KVSTORE_TOKEN" in err and "wrong" not in err
    path = tmp_path / "token"
    path.write_text("red reader token\n")
    path.chmod(0o600)
    assert (await run("ls", "--token-file", str(path)))[0] == 0
    (operator := tmp_path / "operator").write_text("operator token\n")
    operator.chmod(0o600)
    monkeypatch.setenv("KVSTORE_COLD", f"file://{tmp_path / 'another'}")
    said = (await run("verify", "cold", "--token-file", str(operator)))[2]
    assert "run this with --url none for the store named here, or without cold in these settings for the" in said
    monkeypatch.delenv("KVSTORE_COLD")
    for verb in (("migrate", "status"), ("migrate", "run")):
        assert "does not report which store it uses" in (await run(*verb))[2]
        assert "there is nothing to migrate without keys" in (await run(*verb, "--token-file", str(operator)))[2]
    monkeypatch.delenv("KVSTORE_TOKEN")
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(path))
    code, _, err = await run("gc")
    assert code == 1 and "lacks the scope admin" in err and "another token" in err
    code, _, err = await run("ls", "--admin-url", f"http://{free_address()}")
    assert code == 1 and "kvstore serve" in err and "--admin-url" in err

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        code, _, err = await run("ls", "--admin-url", f"127.0.0.1:{port}")
    assert code == 1 and "not an administration interface of kvstore" in err


@pytest.mark.parametrize(
    ("typed", "url"),
    [("h:7070", "http://h:7070"), ("tls://h:7070/", "https://h:7070"), ("https://h/kv/store/", "https://h/kv/store")],
)
def test_the_path_of_an_address_is_kept(typed: str, url: str) -> None:
    """A proxy may serve the interface under one."""
    assert admin_client(Settings(), "", 1.0, url=typed).url == url


async def test_where_no_interface_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without the packages says so in its log alone, and an embedded one never has an interface."""
    code, _, err = await run("ls", "--admin-url", free_address())
    assert code == 1 and "its log for why it has none" in err and "`embedded:` has none" in err
    monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", "off")
    code, _, err = await run("ls")
    assert code == 2 and "admin_listen is off" in err and "`embedded:` has none" in err


async def test_a_service_behind_tls_is_asked(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its authority it is believed, without it is not; the address is spelled as the setting or as a url."""
    cert, key = make_certificate(tmp_path)
    flags = {"admin_listen": "tls://127.0.0.1:0", "tls_certificate_file": cert, "tls_key_file": key}
    monkeypatch.setenv("KVSTORE_TOKEN", "operator token")
    async with open_service(tmp_path, **flags) as made:
        code, _, err = await run("ls", "--admin-url", made.url)
        assert code == 1 and "is not believed" in err and "set tls_ca_file (KVSTORE_TLS_CA_FILE)" in err
        code, _, err = await run("ls", "--admin-url", made.url.replace("https://", "http://"))
        assert code == 1 and "write https:// if that is at tls://" in err
        monkeypatch.setenv("KVSTORE_TLS_CA_FILE", str(cert))
        for url in (made.url, made.url.replace("https://", "tls://")):
            assert (await run("ls", "--admin-url", url))[0] == 0
        monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", made.url.replace("https://", "tls://"))
        assert (await run("ls"))[0] == 0


async def test_an_interrupted_verb_cancels_its_job(made: ServiceHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the service deletes: the job is cancelled, the status is 130, and what was hidden is served."""
    prompt = await made.save(prompt_of("a"))
    watched = threading.Event()

    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def find(board: JobBoard, id_: str, grant: Grant) -> Job:
        watched.set()
        return await real_find(board, id_, grant)

    real_find = JobBoard.find
    monkeypatch.setattr(JobBoard, "find", find)
    monkeypatch.setattr(made.store.operations, "delete", hang)
    command = [sys.executable, "-m", "kvstore.cli", "rm", prompt.namespace.hex(), "--yes"]
    verb = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=dict(os.environ))
    assert await asyncio.to_thread(watched.wait, 60)
    verb.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(verb.communicate(), 60)
    assert verb.returncode == 130, err
    assert b"cancelled, after 0 boundaries" in err and b"Traceback" not in err
    async with made.client("operator") as client:
        assert [job["state"] for job in (await client.get("/v1/jobs")).json()["jobs"]] == ["cancelled"]
    monkeypatch.undo()
    assert (await made.store.stage(prompt.query(), deadline=soon())).resume_tokens == 336


async def test_top_is_live_in_a_terminal(made: ServiceHarness) -> None:
    """It goes on showing until Ctrl-C, which is an ordinary end."""
    await made.save(prompt_of("a"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvstore.cli", "top", "--interval", "0.2", "--timeout", "60"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    verb = await asyncio.create_subprocess_exec(*command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)

    def read_until(text: bytes) -> bytes:
        shown = b""
        while text not in shown and (more := os.read(ours, 65536)):
            shown += more
        return shown

    shown = await asyncio.wait_for(asyncio.to_thread(read_until, b"now: "), 60)
    assert b"largest namespaces" in shown and b"filesystem" in shown
    verb.send_signal(signal.SIGINT)
    drained = asyncio.create_task(asyncio.to_thread(drain, ours))
    assert await asyncio.wait_for(verb.wait(), 60) == 0
    await drained
    os.close(ours)


def drain(ours: int) -> None:
    """Read until the other side is gone: nobody may wait for room in the terminal."""
    with suppress(OSError):
        while os.read(ours, 65536):
            pass
