"""`kvstore migrate` on a directory: what each verb prints and does, statuses, and what it does not change."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Ack
from kvstore.catalog.entry import Level
from kvstore.cli.main import main
from kvstore.cli.migrate import open_runner
from kvstore.compose import open_catalog, open_served_store, open_tier
from kvstore.errors import Unavailable, UnsupportedFormat
from kvstore.format.manifest import STORE_VERSION, STORE_VERSION_PLACE
from kvstore.format.names import manifest_name
from kvstore.model.keys import RecordKey
from kvstore.settings import Settings, load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import tenant_key, write_keys
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.waiting import soon
from migrations.copying import Progress
from migrations.journal import Journal, Sheet, place
from migrations.steps import KeyStep, Verdict

PROMPT = Prompt(HYBRID, "prompt", 64 * 4, tenant="red", payload_bytes=2000)
OTHER = replace(PROMPT, name="other", tenant="blue")
NUM = len(PROMPT.records())


def store_version(version: int) -> bytes:
    return b'{"kvstore_store_version": %d}' % version


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key file that the environment names, beside a directory for records; plain for both tenants at first."""
    monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", "off")  # no other test's service is asked
    path = write_keys(tmp_path / "keys.toml", [("red", 0, 0), ("blue", 5, 5)])
    for name, text in {
        "COLD": f"file://{tmp_path / 'records'}",
        "DISK_BYTES": "1GiB",
        "MEMORY_BYTES": "32MiB",
        "STALL_TIMEOUT_MS": "5000",
        "ENCRYPTION_KEYS": str(path),
    }.items():
        monkeypatch.setenv(f"KVSTORE_{name}", text)
    return path


@asynccontextmanager
async def service() -> AsyncIterator[EncryptedStore]:
    async with open_served_store(load_settings()) as store:
        assert isinstance(store, EncryptedStore)
        yield store


async def save(*prompts: Prompt) -> None:
    async with service() as store:
        for prompt in prompts:
            await store.open_namespace(prompt.description, deadline=soon())
            await store.lookup(prompt.query(), deadline=soon())
            for record in prompt.records():
                await store.save(record, ack=Ack.COLD, deadline=soon())
            await store.tenant_keys.check(prompt.tenant)
        assert await store.drain(soon()) == 0


async def resumes(prompt: Prompt) -> int:
    """How far the prompt is resumed, all of it exact."""
    async with service() as store:
        await store.open_namespace(prompt.description, deadline=soon())
        await store.tenant_keys.check(prompt.tenant)
        await store.lookup(prompt.query(), deadline=soon())
        staged = await store.stage(prompt.query(), deadline=soon())
        saved = {record.key: bytes(record.data) for record in prompt.records()}
        for key in staged.keys:
            assert staged.lease is not None
            assert bytes((await store.load(staged.lease, key, deadline=soon())).data) == saved[key]
        if staged.resume_tokens < prompt.num_tokens:
            assert store.meters.get("encryption_misses", reason="missing_key") >= 0
        return staged.resume_tokens


async def names(settings: Settings) -> set[RecordKey]:
    async with open_tier(settings.cold, settings) as tier:
        return {entry.key async for entry in tier.scan()}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    """A verb with `--json`: status, what it printed, and its complaint."""
    status = main(["migrate", *arguments, "--json"])
    out, err = capsys.readouterr()
    complaints = [line for line in err.splitlines(keepends=True) if not line.startswith("store: ")]
    return status, json.loads(out) if out else {}, "".join(complaints)


def in_loop(call: object) -> object:
    import asyncio

    return asyncio.run(call)  # type: ignore[arg-type]


def test_encryption_is_turned_on_over_plain_records_and_the_key_is_changed_then(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain records come under a first key and then under a second one; the other tenant's stay; plans count
    and change nothing; pins and the catalog follow; what an earlier key left is not missed.
    """
    in_loop(save(PROMPT, OTHER))
    settings = load_settings()
    before = in_loop(names(settings))

    async def pin() -> None:
        async with open_catalog(settings) as catalog:
            layout, until_s = PROMPT.description.layout(), 4_000_000_000
            await catalog.register(PROMPT.namespace, layout, "red", deadline=soon())
            assert await catalog.pin(PROMPT.namespace, [PROMPT.boundary(128).prefix], until_s, deadline=soon()) == 1

    in_loop(pin())
    assert run(capsys, "status") == (0, {"migration": None}, "")
    assert run(capsys, "plan") == (0, {"step": "keys", "plan": []}, "")
    status, _, complaint = run(capsys, "run")
    assert status == 2 and "put the new key in front of the old one" in complaint
    status, _, complaint = run(capsys, "finish")
    assert status == 2 and "run the migration first" in complaint

    generations = [("red", 0, 0)]
    for number in (1, 2):
        generations = [("red", number, number), generations[0]]
        write_keys(keys, [*generations, ("blue", 5, 5)])
        _, planned, _ = run(capsys, "plan")
        (row,) = planned["plan"]  # type: ignore[misc]
        assert (row["tier"], row["tenant"], row["num_records"], row["num_copied"]) == ("filesystem", "red", NUM, 0)
        assert in_loop(names(settings)) == before
        status, ran, _ = run(capsys, "run", "--rate", "1GiB")
        assert status == 0
        assert ran["migration"]["totals"] == {"rewritten": NUM}  # type: ignore[index]
        assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens
        _, told, _ = run(capsys, "status")
        assert told["migration"]["phase"] == "copied"  # type: ignore[index]
        status, finished, _ = run(capsys, "finish")
        assert status == 0
        assert finished["migration"]["totals"]["removed"] == NUM  # type: ignore[index]
        assert finished["migration"]["phase"] == "done"  # type: ignore[index]
        new = {tenant_key(number, "red").named(record.key) for record in PROMPT.records()}
        before = {key for key in before if key.namespace == OTHER.namespace} | new  # type: ignore[union-attr]
        assert in_loop(names(settings)) == before
        write_keys(keys, [generations[0], ("blue", 5, 5)])
        assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens
        assert in_loop(resumes(OTHER)) == OTHER.num_tokens

    async def told_by_catalog() -> set[RecordKey]:
        async with open_catalog(settings) as catalog:
            layout = PROMPT.description.layout()
            await catalog.register(PROMPT.namespace, layout, "red", deadline=soon())
            entries = [entry async for entry in catalog.iterate(PROMPT.namespace)]
            pinned = {entry.prefix: entry.pinned_until_s for entry in entries if entry.pinned_until_s}
            assert pinned == {tenant_key(2, "red").name_of(PROMPT.boundary(128).prefix): 4_000_000_000}
            return {key for entry in entries for key in entry.keys(Level.COLD)}

    assert in_loop(told_by_catalog()) == new


def test_a_migration_is_aborted_and_goes_back(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a run the operator puts the old key in front again: finishing is refused, aborting is not, and a migration
    back removes what the first one made.
    """
    write_keys(keys, [("red", 1, 1)])
    in_loop(save(PROMPT))
    before = in_loop(names(load_settings()))
    write_keys(keys, [("red", 2, 2), ("red", 1, 1)])
    assert run(capsys, "run")[0] == 0
    write_keys(keys, [("red", 1, 1), ("red", 2, 2)])
    status, _, complaint = run(capsys, "finish")
    assert status == 2 and "a migration to other keys is under way" in complaint and "abort it" in complaint
    assert run(capsys, "abort")[1]["migration"]["phase"] == "aborted"  # type: ignore[index]
    assert run(capsys, "abort")[0] == 2
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens
    assert run(capsys, "run")[0] == 0
    assert run(capsys, "finish")[0] == 0
    assert in_loop(names(load_settings())) == before


def test_records_of_keys_that_are_not_here_are_left_alone(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 3, and their number; with the key back, the next run takes them along."""
    write_keys(keys, [("red", 1, 1)])
    in_loop(save(PROMPT))
    write_keys(keys, [("red", 3, 3), ("red", 2, 2)])
    status, ran, _ = run(capsys, "run")
    assert (status, ran["migration"]["totals"]) == (3, {"foreign": NUM})  # type: ignore[index]
    write_keys(keys, [("red", 3, 3), ("red", 2, 2), ("red", 1, 1)])
    status, ran, _ = run(capsys, "run")
    assert (status, ran["migration"]["totals"]) == (0, {"rewritten": NUM})  # type: ignore[index]
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens


def test_people_get_tables_and_the_next_step(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--json`."""
    in_loop(save(PROMPT))
    write_keys(keys, [("red", 1, 1), ("red", 0, 0)])
    said = {}
    for verb in ("status", "plan", "run", "finish", "status"):
        assert main(["migrate", verb]) == 0
        said[verb] = capsys.readouterr().out
    assert f"{NUM}" in said["plan"] and "next: kvstore migrate run" in said["plan"]
    assert "rewritten" in said["run"] and "next: kvstore migrate finish" in said["run"]
    assert "removed" in said["finish"] and "take the earlier keys out of encryption_keys" in said["finish"]
    assert "done" in said["status"]


def test_ctrl_c_ends_a_run_and_the_next_one_goes_on(
    keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 130 and no traceback; nothing is lost, and the rest is copied by the next run."""
    in_loop(save(PROMPT))
    write_keys(keys, [("red", 1, 1), ("red", 0, 0)])
    command = [sys.executable, "-m", "kvstore.cli", "migrate", "run", "--rate", "1kB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun = tmp_path / "records" / manifest_name(place("state"))
    ends_s = time.monotonic() + 120
    while not begun.exists():
        assert process.poll() is None and time.monotonic() < ends_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in complaint) == (130, False)
    status, ran, _ = run(capsys, "run")
    assert status == 0
    assert sum(ran["migration"]["totals"].values()) >= NUM  # type: ignore[index, attr-defined]
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens


@pytest.mark.parametrize(
    ("word", "num_left"), [("state removing", 2), ("catalog removed", 2), ("deleted", 1), ("sheet emptied", 0)]
)
def test_what_a_run_was_cut_off_from_is_done_by_the_next_without_reading_again(
    keys: Path, capsys: pytest.CaptureFixture[str], word: str, num_left: int
) -> None:
    """Of two namespaces: a `finish` that continues reads only what is left. A copy that was lost is made again."""
    prompts = (PROMPT, replace(PROMPT, model="another"))
    in_loop(save(*prompts))
    write_keys(keys, [("red", 1, 1), ("red", 0, 0)])
    assert run(capsys, "run")[0] == 0
    lost = tenant_key(1, "red").named(PROMPT.records()[0].key)

    async def lose() -> None:
        async with open_tier(load_settings().cold, load_settings(), is_owner=True) as tier:
            assert await tier.delete(lost, deadline=soon())

    in_loop(lose())
    assert run(capsys, "run")[1]["migration"]["totals"] == {"copied_before": 2 * NUM - 1, "rewritten": 1}  # type: ignore[index]

    class CutOff(Exception):
        pass

    def on_step(seen: str) -> None:
        if seen == word:
            raise CutOff

    async def finish() -> None:
        async with open_runner(load_settings(), progress=Progress(on_step=on_step)) as runner:
            await runner.finish()

    with pytest.raises(CutOff):
        in_loop(finish())
    status, ran, _ = run(capsys, "finish")
    assert (status, ran["migration"]["phase"]) == (0, "done")  # type: ignore[index]
    left = {"copied_before": num_left * NUM, "removed": num_left * NUM} if num_left else {"current": NUM}
    assert ran["migration"]["totals"] == left  # type: ignore[index]
    for prompt in prompts:
        assert in_loop(resumes(prompt)) == prompt.num_tokens


def test_a_sheet_that_a_run_wrote_after_it_had_lost_its_lease_hides_no_record_from_the_next_migration(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is frozen while it writes a sheet, another one ends the migration, and then the sheet arrives."""
    write_keys(keys, [("red", 1, 1)])
    in_loop(save(PROMPT))
    write_keys(keys, [("red", 2, 2), ("red", 1, 1)])
    assert run(capsys, "run")[0] == 0
    settings, where = load_settings(), (Level.COLD, PROMPT.namespace, 0)

    async def sheet() -> Sheet:
        async with open_tier(settings.cold, settings, is_owner=True) as tier:
            return await Journal(tier).sheet(*where)

    late = in_loop(sheet())
    assert isinstance(late, dict) and len(late) == NUM
    assert run(capsys, "finish")[0] == 0

    async def arrive() -> None:
        async with open_tier(settings.cold, settings, is_owner=True) as tier:
            await Journal(tier).write_sheet(*where, late)

    in_loop(arrive())
    write_keys(keys, [("red", 3, 3), ("red", 2, 2)])
    assert run(capsys, "run")[1]["migration"]["totals"] == {"rewritten": NUM}  # type: ignore[index]
    assert run(capsys, "finish")[0] == 0
    write_keys(keys, [("red", 3, 3)])
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens


def test_a_finish_that_is_killed_at_its_end_leaves_no_key_to_be_missed(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A migration that counts as done is not finished again, so all that depends on that is done before."""
    write_keys(keys, [("red", 1, 1)])
    in_loop(save(PROMPT))
    write_keys(keys, [("red", 2, 2), ("red", 1, 1)])
    assert run(capsys, "run")[0] == 0

    class Killed(Exception):
        pass

    def on_step(seen: str) -> None:
        if seen == "state done":
            raise Killed

    async def finish() -> None:
        async with open_runner(load_settings(), progress=Progress(on_step=on_step)) as runner:
            await runner.finish()

    with pytest.raises(Killed):
        in_loop(finish())
    assert run(capsys, "status")[1]["migration"]["phase"] == "done"  # type: ignore[index]
    write_keys(keys, [("red", 2, 2)])

    async def problems() -> object:
        async with service() as store:
            await store.tenant_keys.check("red")
            return (await store.status(deadline=soon()))["encryption"]["problems"]  # type: ignore[index]

    assert in_loop(problems()) == {}


def test_a_directory_that_is_nearly_full_loses_no_record(
    keys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the old copies are removed both need more room than `disk_bytes`. A plan removes nothing either, where the
    directory may hold less than at the service's last start.
    """
    in_loop(save(PROMPT))
    write_keys(keys, [("red", 1, 1), ("red", 0, 0)])
    monkeypatch.setenv("KVSTORE_DISK_BYTES", str(NUM * PROMPT.payload_bytes // 2))
    assert run(capsys, "plan")[1]["plan"][0]["num_records"] == NUM  # type: ignore[index]
    assert run(capsys, "run")[1]["migration"]["totals"] == {"rewritten": NUM}  # type: ignore[index]
    assert run(capsys, "finish")[1]["migration"]["totals"] == {"copied_before": NUM, "removed": NUM}  # type: ignore[index]
    monkeypatch.setenv("KVSTORE_DISK_BYTES", "1GiB")
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens


def test_verify_and_reindex_need_no_key(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checksums are over what is stored: encrypted records are whole, and are indexed under their keyed names."""
    write_keys(keys, [("red", 1, 1)])
    in_loop(save(PROMPT))
    keys.unlink()
    assert main(["verify", "cold", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_whole"] == NUM
    assert main(["reindex", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out).values()
    assert (report["num_records"], report["num_unknown"]) == (NUM, 0)
    write_keys(keys, [("red", 1, 1)])
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ({"KVSTORE_ENCRYPTION_KEYS": None}, 2, "set encryption_keys (KVSTORE_ENCRYPTION_KEYS)"),
        ({"KVSTORE_COLD": "s3://bucket/prefix"}, 2, "a migration needs Redis as hot"),
        ({"KVSTORE_COLD": "memory:"}, 2, "a migration needs Redis as hot"),
        ({"KVSTORE_COLD": "file:///dev/null/recrods"}, 1, "there are no records: check the path"),
        ({"KVSTORE_ENCRYPTION_KEYS": "/nowhere"}, 2, "cannot read the encryption key file"),
    ],
)
def test_what_it_cannot_work_on_is_said(
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, str | None],
    status: int,
    words: str,
) -> None:
    """One line that names what to change."""
    for name, text in flags.items():
        monkeypatch.delenv(name) if text is None else monkeypatch.setenv(name, text)
    seen, _, complaint = run(capsys, "plan")
    assert (seen, words in complaint) == (status, True)


NEWER = (
    UnsupportedFormat,
    r"upgrade this release.*kvstore migrate status.*tier=filesystem",
    "migrated by a newer release",
)
DAMAGED = (Unavailable, "remove the damaged note", "remove the damaged note")


@pytest.mark.parametrize(
    ("note", "refusal"),
    [
        (store_version(STORE_VERSION + 1), NEWER),
        (b"{}", NEWER),
        (b'{"kvstore_store_version": "x"}', NEWER),
        (b"?", DAMAGED),
        (b"\xff\xfe", DAMAGED),
        (b"1", DAMAGED),
    ],
)
def test_nothing_is_written_to_a_tier_of_a_newer_release_or_an_unknown_one(
    keys: Path, capsys: pytest.CaptureFixture[str], note: bytes, refusal: tuple[type[Exception], str, str]
) -> None:
    """A note of a newer release stops the service, a damaged one the writes; the command fails, and both name the next
    step. After the note is repaired, records are read and written as before.
    """
    in_loop(save(PROMPT))

    async def mark(data: bytes) -> None:
        async with open_tier(load_settings().cold, load_settings(), is_owner=True) as tier:
            await tier.put_manifest(STORE_VERSION_PLACE, data, deadline=soon())

    in_loop(mark(note))
    before = in_loop(names(load_settings()))
    error, message, words = refusal
    with pytest.raises(error, match=message):  # of a save that waits for the cold tier
        in_loop(save(OTHER))
    status, _, complaint = run(capsys, "status")
    assert (status, words in complaint) == (1, True)
    assert in_loop(names(load_settings())) == before
    in_loop(mark(store_version(STORE_VERSION)))
    assert in_loop(resumes(PROMPT)) == PROMPT.num_tokens
    in_loop(save(OTHER))


async def test_a_directory_that_a_service_has_is_left_to_it(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two owners of one directory would lose records: the command says who has it."""
    import asyncio

    async with service():
        assert await asyncio.to_thread(main, ["migrate", "plan"]) == 1
    assert "another" in capsys.readouterr().err


def test_the_step_of_keys_is_pure(keys: Path) -> None:
    """It tells apart records that are current, foreign and forged, and compares an old record with its new one."""
    from kvstore.store.encryption.key_ring import watch_keys

    record = PROMPT.records()[0]
    write_keys(keys, [("red", 2, 2), ("red", 0, 0)])
    step = KeyStep(watch_keys(str(keys)).value)
    made = step.rewrite(record, "red")
    assert made.verdict is Verdict.REWRITTEN and made.record is not None
    assert step.rewrite(made.record, "red").verdict is Verdict.CURRENT
    assert step.is_same(record, made.record, "red")
    assert not step.is_same(PROMPT.records()[1], made.record, "red")
    assert step.target("nobody") is None
    write_keys(keys, [("red", 3, 3), ("red", 2, 9)])
    wrong = KeyStep(watch_keys(str(keys)).value)
    assert wrong.rewrite(made.record, "red").verdict is Verdict.REFUSED
    assert wrong.rewrite(record, "red").verdict is Verdict.FOREIGN
