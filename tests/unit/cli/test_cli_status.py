"""`kvstore status` for people: whether it works first, with the next step; then what is asked next. Nothing is cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.api import Outcome
from kvstore.cli.printing import share_text
from kvstore.cli.status import page_of
from kvstore.cli.status_problems import problems_of
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.store.explain.reports import WINDOW_S, Recent
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of
from tests.unit.cli.conftest import Run
from tests.virtual_time import ManualClock

MIB, GIB = 1 << 20, 1 << 30
NAME = "unix:/run/kvstore/kvstore.sock"


def healthy() -> dict[str, Any]:
    """What a service with Redis and S3 answers when all is well."""
    return {
        "version": "0.1.0",
        "tiers": {
            "memory": {"healthy": True, "num_records": 1234, "used_bytes": GIB, "limit_bytes": 2 * GIB},
            "redis": {"healthy": True, "num_records": None, "used_bytes": 3 * GIB, "limit_bytes": None},
            "s3": {"healthy": True, "num_records": None, "used_bytes": None, "limit_bytes": None},
        },
        "namespaces": 2,
        "catalog": {"waiting_changes": 2, "takes_none_since_ms": None},
        "leases": {"active": 3, "expired": 0, "pinned_bytes": 256 * MIB},
        "write_back": {
            "redis": {"records": 0, "bytes": 0, "failing": False, "paused": False},
            "s3": {"records": 12, "bytes": 24 * MIB, "failing": False, "paused": False},
        },
        "counters": {
            'requests{reason="",result="hit"}': 700.0,
            'requests{reason="never_stored",result="miss"}': 300.0,
            'request_tokens{part="prompt"}': 1e6,
            'request_tokens{part="resumed"}': 6e5,
            'request_tokens{part="local"}': 5e4,
            "catalog_complete": 1,
            "pending_records": 40,
            "pending_bytes": 90 * MIB,
            "pending_limit_bytes": 8 * GIB,
        },
        "recent": {
            "window_s": 300,
            "requests": {"hit": 60, "part": 2, "miss": 18, "local": 0},
            "tokens": {"prompt": 80_000, "resumed": 51_200, "local": 0},
            "reasons": {"never_stored": 17, "evicted": 1},
            "losses": {},
            "too_large": {},
        },
        "service": {"uptime_s": 273_600.0, "sessions_of_engines": 6, "receive_bytes_used": 0}
        | {"engines": ["vllm llama, pid 17", "vllm [x], pid 18"]},
    }


def printed(values: dict[str, Any], width: int = 160) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(page_of(NAME, values), highlight=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_healthy_service_says_so_first() -> None:
    """The page answers in the order in which one asks."""
    assert printed(healthy()) == [
        f"kvstore 0.1.0 at {NAME}, up 3 d 4 h",
        "",
        "working     yes",
        "hits        last 5 minutes: 64% of 80,000 prompt tokens came from here; 62 of 80 requests resumed",
        "              why not more: never_stored 17, evicted 1 (kvstore explain shows each request)",
        "            since its start: 60% of 1,000,000 prompt tokens came from here, 5% from the engines' own caches; "
        "700 of 1,000 requests resumed",
        "tiers       memory: works, holds 1.0 GiB in 1,234 records, 50% of 2.0 GiB",
        "            redis: works, its server uses 3.0 GiB of memory, without a limit",
        "            s3: works, its bytes are not counted here (kvstore top)",
        "write-back  12 records (24.0 MiB) wait here for s3",
        "            40 records (90.0 MiB, at most 8.0 GiB) of all services are not in the cold tier yet",
        "engines     6 connections; 2 namespaces opened since its start",
        "            vllm llama, pid 17",
        "            vllm [x], pid 18",
        "memory      256.0 MiB are leased to engines",
    ]


def test_reads_through_a_door_count() -> None:
    """It looks up what it is about to write, which is new, and reads without a lookup: so lookups find nothing."""
    values = healthy()
    values["recent"]["requests"] = dict.fromkeys(values["recent"]["requests"], 0)
    values["counters"] = {"lookups": 40.0, 'served_records{tier="redis"}': 1200.0, 'served_records{tier="s3"}': 34.0}
    page = "\n".join(printed(values))
    assert "0% of 40 lookups found something, 1,234 records were read" in page


@pytest.mark.parametrize("width", [80, 120, 240])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    """Every word is there, long names too, and no line is wider than the terminal."""
    values = healthy()
    values["tiers"]["s3"] = {"healthy": False, "reason": "timed out: https://" + "s3." * 40 + "example/bucket"}
    lines = printed(values, width)
    assert max(map(len, lines)) <= width

    def squeezed(told: list[str]) -> str:
        return "".join("".join(told).split())

    assert squeezed(lines) == squeezed(printed(values, 2000))


def change(*path: str, to: object) -> Callable[[dict[str, Any]], None]:
    def apply(values: dict[str, Any]) -> None:
        for name in path[:-1]:
            values = values[name]
        values[path[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("broken", "what", "step"),
    [
        (change("tiers", "s3", to={"healthy": False, "reason": "refused"}), "s3 does not answer (refused)", "doctor"),
        (
            change("tiers", "s3", to={"healthy": False, "reason": "left alone tier=s3 reason=no bucket"}),
            "s3 does not answer (no bucket)",
            "doctor",
        ),
        (
            change(
                "tiers", "redis", to={"healthy": False, "is_part_down": True, "reason": "no answer: start it node=a:1"}
            ),
            "a part of redis does not answer (no answer, node a:1), and is used again",
            "start it",
        ),
        (change("write_back", "s3", "failing", to=True), "writes to s3 fail", "doctor"),
        (change("write_back", "s3", "paused", to=True), "the write-back to s3 is paused", "resume"),
        (change("counters", "pending_bytes", to=7 * GIB), "7.0 GiB of at most 8.0 GiB wait", "pending_bytes"),
        (change("counters", "pending_bytes", to=9 * GIB), "new records are not written to the hot", "pending_bytes"),
        (change("counters", "catalog_complete", to=0), "the catalog may be incomplete", "kvstore reindex"),
        (
            change("service", "not_reloaded", to={"credentials": "cannot read the file path=/c error=denied"}),
            "the credentials is refused (cannot read the file, path /c: denied), the previous content stays in force",
            "correct the file of the credentials",
        ),
        (
            change("catalog", to={"waiting_changes": 29, "takes_none_since_ms": 1_763_800_000_000}),
            "has taken no changes since 2025-11-22 08:26:40 UTC: 29 changes of this service wait",
            "doctor",
        ),
        (
            change(
                "catalog",
                to={"answers_none_since_ms": 1_763_800_000_000, "answers_none_reason": "a node is silent: start it"},
            ),
            "the catalog has answered no lookups since 2025-11-22 08:26:40 UTC (a node is silent): the tiers are asked",
            "start it",
        ),
        (
            change("encryption", to={"problems": {"wrong_key": ["no saves: give key 1 its secret tenant='' id=1"]}}),
            "no saves, tenant '', id 1",
            "give key 1 its secret",
        ),
        (change("leases", "pinned_bytes", to=2 * GIB), "engines lease 100% of the memory", "memory_bytes"),
        (
            change("recent", "losses", to={"save_busy": 1200, "save_no_room": 4}),
            "1,204 records were computed in the last 5 minutes, but not saved (save_busy 1,200, save_no_room 4)",
            "save_busy: leave processor time",
        ),
        (
            change("recent", "too_large", to={"needs_bytes": 309 * MIB - 5, "pinned_bytes": 128 * MIB}),
            "an engine never saves some of its pages or states: they need 309MiB of pinned_bytes and it has 128MiB",
            '"pinned_bytes":"309MiB"',
        ),
        (change("recent", "reasons", to={"stall": 20}), "20 of the last 80 requests got no answer", "explain"),
        (change("recent", "reasons", to={"node_memory": 20}), "no further than memory has room for", "memory_bytes"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_next_step(
    broken: Callable[[dict[str, Any]], None], what: str, step: str
) -> None:
    """On the line that says that it works in part; and nowhere when it is as it should be."""
    assert problems_of(healthy()) == []
    values = healthy()
    broken(values)
    [found] = problems_of(values)
    assert not found.past and what in found.what and step in found.step
    [line] = [line for line in printed(values, 400) if line.startswith("working")]
    assert line == f"working     in part: {found.what}. Next: {found.step}"


@pytest.mark.parametrize(("reason", "num_problems"), [("node_memory", 1), ("stall", 0)])
def test_one_prompt_that_memory_has_no_room_for_is_a_problem(reason: str, num_problems: int) -> None:
    """It never fits; one that the store answered late may be answered in time the next time."""
    values = healthy()
    values["recent"] |= {"requests": {"part": 1}, "reasons": {reason: 1}}
    found = problems_of(values)
    assert [one.step.partition(";")[0] for one in found] == ["a larger memory_bytes"] * num_problems
    for one in found:
        assert one.what.startswith("the last request resumed no further than memory has room for (node_memory: ")


def test_several_wrong_things_are_a_line_each() -> None:
    """Those that are so now before those that happened since the start, which take nothing from `yes`."""
    values = healthy()
    values["counters"] |= {'corrupt_records{reason="payload",tier="s3"}': 2.0, 'saves{outcome="full"}': 5.0}
    values["counters"] |= {'corrupt_records{reason="header",tier="s3"}': 1.0}
    values["counters"] |= {f'write_back_dropped{{reason="{why}",tier="s3"}}': 1.0 for why in ("evicted", "refused")}
    values["counters"] |= {'write_back_dropped{reason="tier_full",tier="redis"}': 1.0}
    lines = printed(values, 400)
    assert lines[2] == "working     yes"
    assert "2 records not copied to s3 (evicted 1, refused 1)" in lines[4]
    assert "1 record not copied to redis (tier_full 1). Next: docs/durability.md" in lines[5]
    assert "since its start: 3 corrupt records found in s3; none was served. Next: kvstore verify" in lines[3]
    assert "5 saves refused: the tiers were full." in lines[6]
    values["tiers"]["s3"] = {"healthy": False, "reason": "away"}
    values["counters"]["catalog_complete"] = 0
    lines = printed(values, 400)
    assert lines[2] == "working     in part, 2 problems:"
    assert "- s3 does not answer" in lines[3] and "- the catalog" in lines[4] and "since its start" in lines[5]


def test_a_service_of_the_release_before_is_shown_as_far_as_it_tells() -> None:
    """It knows nothing of the last minutes, nor whose connections it has."""
    values = healthy()
    del values["recent"], values["service"]["sessions_of_engines"]
    lines = printed(values)
    assert not any("minutes" in line for line in lines)
    assert "engines     2 namespaces opened since its start" in lines


AT_MS = 1_763_800_000_000


@pytest.mark.parametrize(
    ("name", "tier", "line"),
    [
        (
            "redis",
            {
                "healthy": True,
                "used_bytes": 27 * GIB,
                "limit_bytes": 20 * GIB,
                "refuses_writes": "it has no memory left",
            },
            "redis: accepts no writes, its server uses 27.0 GiB of memory, 135% of 20.0 GiB",
        ),
        (
            "redis",
            {"healthy": False, "last_known": {"at_ms": AT_MS, "used_bytes": GIB, "limit_bytes": 4 * GIB}},
            "redis: does not answer, when last known, at 2025-11-22 08:26:40 UTC, "
            "its server used 1.0 GiB of memory, 25% of 4.0 GiB",
        ),
        (
            "s3",  # the catalog that knows its bytes does not answer
            {
                "healthy": True,
                "used_bytes": None,
                "last_known": {"at_ms": AT_MS, "used_bytes": GIB, "limit_bytes": 4 * GIB, "limit_name": "cold_bytes"},
            },
            "s3: works, when last known, at 2025-11-22 08:26:40 UTC, it held 1.0 GiB, 25% of 4.0 GiB (cold_bytes)",
        ),
        ("s3", {"healthy": False, "reason": "away"}, "s3: does not answer"),
    ],
)
def test_a_tier_in_an_outage_keeps_its_last_known_sizes(name: str, tier: dict[str, Any], line: str) -> None:
    """Shown as such. One that accepts no writes does not also work."""
    values = healthy()
    values["tiers"][name] = tier
    assert line in [shown.strip() for shown in printed(values, 400)]


def test_a_tier_that_accepts_no_writes_is_a_problem_with_its_next_step() -> None:
    values = healthy()
    values["tiers"]["s3"] = {"healthy": True, "used_bytes": None, "refuses_writes": "it is full: make room"}
    assert any("s3 accepts no writes: it is full. Next: make room" in line for line in printed(values, 400))


def test_what_is_over_is_no_problem_of_now() -> None:
    """An outage costs requests for as long as it lasts; its counts stay in the window for minutes."""
    values = healthy()
    values["recent"] |= {"reasons": {"lookup_failed": 30, "evicted": 9}, "losses": {"save_failed": 2}}
    values["recent"]["last_s"] = {"reasons": {"lookup_failed": 150, "evicted": 4}, "losses": {"save_failed": 75}}
    lines = printed(values, 400)
    assert lines[2] == "working     yes"
    assert "over for 2 min: 30 of the last 80 requests got no answer in time (lookup_failed" in lines[3]
    assert "over for 1 min: 2 records were computed in the last 5 minutes, but not saved" in lines[4]
    values["recent"]["last_s"]["reasons"]["lookup_failed"] = 10
    assert printed(values, 400)[2].startswith("working     in part: 30 of the last 80 requests got no answer")


@pytest.mark.parametrize("at", ["catalog", "s3"])
def test_what_has_failed_in_an_eviction_is_named(at: str) -> None:
    values = healthy()
    values["counters"][f'retention_failures{{at="{at}",tier="s3"}}'] = 7.0
    place = "the catalog in redis" if at == "catalog" else "s3"
    assert any(f"eviction from the cold tier failed 7 times at {place}" in line for line in printed(values, 400))


def test_failed_attempts_are_not_counted_as_descriptions() -> None:
    values = healthy()
    values["counters"]['manifest_failures{tier="redis"}'] = 8.0  # one namespace, eight attempts
    assert any("writing descriptions of namespaces failed 8 times at redis" in line for line in printed(values, 400))


@pytest.mark.parametrize(
    ("amount", "whole", "told"),
    [
        *((0, 5, "0%"), (1, 10_000, "1%"), (9_999, 10_000, "99%"), (5, 5, "100%"), (1, 0, "-")),
        *((135, 100, "135%"), (1_001, 1_000, "101%")),
    ],
)
def test_a_share_is_none_or_all_only_where_it_is(amount: int, whole: int, told: str) -> None:
    """A single miss in ten thousand is seen."""
    assert share_text(amount, whole) == told


def test_recent_requests_are_forgotten_after_the_window() -> None:
    """What is counted over them is what the meters count; a reason of a newer engine adds no name."""
    clock = ManualClock()
    recent = Recent(clock)
    recent.add(Outcome("a", None, 100, 96, 16, 96), "")
    clock.now_s += WINDOW_S - 10
    recent.add(Outcome("b", None, 50, 48, 0, 0), "a word of the future")
    told = recent.counts()
    assert told["requests"] == {"hit": 1, "part": 0, "miss": 1, "local": 0}
    assert told["tokens"] == {"prompt": 150, "resumed": 80, "local": 16} and told["reasons"] == {"other": 1}
    assert told["last_s"] == {"reasons": {"other": int(clock.now_s) % 10}, "losses": {}}
    clock.now_s += 10
    assert recent.counts()["tokens"] == {"prompt": 50, "resumed": 0, "local": 0}
    clock.now_s += 10 * WINDOW_S
    assert recent.counts()["requests"] == dict.fromkeys(("hit", "part", "miss", "local"), 0)


def test_recent_losses_are_forgotten_after_the_window() -> None:
    """Records by reason; of what is told of whole namespaces no number, but the largest need while it is repeated."""
    clock = ManualClock()
    recent = Recent(clock)
    stop = Boundary(64, PrefixHash(bytes(32)))
    recent.add(Outcome("a", None, 0, 0, 0, 0, "save_busy", {"records": 3}, stop=stop, groups=1), "save_busy")
    recent.add(Outcome("a", None, 0, 0, 0, 0, "save_of_the_future", stop=stop, groups=1), "save_of_the_future")
    for needs_bytes in (300, 900, 600):
        sizes = {"needs_bytes": needs_bytes, "pinned_bytes": 100}
        recent.add(Outcome("", None, 0, 0, 0, 0, "save_too_large", sizes, groups=1), "save_too_large")
    told = recent.counts()
    assert told["losses"] == {"other": 1, "save_busy": 3}
    assert told["too_large"] == {"needs_bytes": 900, "pinned_bytes": 100}
    assert set(told["last_s"]["losses"]) == {"other", "save_busy"}
    assert told["requests"] == dict.fromkeys(("hit", "part", "miss", "local"), 0) and told["reasons"] == {}
    clock.now_s += WINDOW_S
    assert (recent.counts()["losses"], recent.counts()["too_large"]) == ({}, {})


@pytest.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceHarness]:
    async with open_service(tmp_path) as opened:
        monkeypatch.setenv("KVSTORE_LISTEN", f"unix:{tmp_path / 'socket'}")
        monkeypatch.setenv("KVSTORE_TOKEN", "operator token")
        yield opened


async def test_a_real_service_is_shown(made: ServiceHarness, run: Run) -> None:
    """The page, with --all every value behind it, with --json the fields that it always had."""
    await made.save(prompt_of("a"))
    status, out, err = await run("status")
    assert (status, err) == (0, "")
    titles = [line.split()[0] for line in out.splitlines() if line[:1].strip()]
    assert titles == ["kvstore", "working", "hits", "tiers", "write-back", "engines", "memory"]
    assert "working     yes" in out and "filesystem: works, holds" in out and "all values" not in out
    status, out, _ = await run("status", "--all")
    assert status == 0 and "working     yes" in out and "service.receive_bytes_limit" in out
    values = json.loads((await run("status", "--json"))[1])
    assert values.keys() >= {"version", "tiers", "namespaces", "leases", "write_back", "counters", "service", "recent"}
    assert values["recent"]["requests"]["hit"] == 0
