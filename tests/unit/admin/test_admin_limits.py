"""Limits: what is used of each, by tier and tenant, and what was evicted and why, in every view of an operator."""

from __future__ import annotations

import asyncio
import re
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from kvstore.api import Ack
from kvstore.cli.admin import AdminClient
from kvstore.cli.status import page_of
from kvstore.cli.top import read_values, screen_of
from kvstore.client import connect
from kvstore.errors import Unavailable
from kvstore.service.watcher import Watcher
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from tests.deployment.files import METRIC, expressions
from tests.unit.admin.service_harness import open_service, prompt_of

COLD, QUOTA = 400 << 10, 20 << 10


def text_of(shown: Any) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(shown, highlight=False)
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().split())


async def test_a_full_cold_tier_is_seen_everywhere(tmp_path: Path) -> None:
    """More is saved than `cold_bytes` and a quota allow: `status`, `top`, `/v1/tiers`, metrics, the history and events
    have the use, the limit by its name, the share, and the evictions by cause.
    """
    bounds = {"cold_bytes": COLD, "quotas": f"red=:{QUOTA}", "retention_policy": "lru"}
    async with open_service(tmp_path, with_tokens=False, **bounds) as made:
        watcher = Watcher(made.store, made.service.history, made.store.events)
        for number in range(40):
            tenant = "red" if number % 2 else "blue"
            await made.save(Prompt(ATTENTION, f"{tenant} {number}", 64 * 5, tenant=tenant))
        async with made.client() as admin:
            async with asyncio.timeout(20):
                while True:
                    status: Any = await made.store.status(deadline=soon())
                    left = [name for name in status["counters"] if name.startswith("retention_boundaries")]
                    if any("quota" in name for name in left) and any("evicted" in name for name in left):
                        break
                    await made.save(Prompt(ATTENTION, f"more {len(left)} {soon()}", 64 * 5, tenant="blue"))
            await watcher.step()
            tiers = {one["name"]: one for one in (await admin.get("/v1/tiers")).json()["tiers"]}
            metrics = (await admin.get("/metrics")).text
            history = (await admin.get("/v1/history")).json()
            events = (await admin.get("/v1/events", params={"follow": "false", "limit": 50})).json()["events"]
            top = await asyncio.to_thread(_top, made.url)
        usage = tiers["filesystem"]["usage"]
        assert (usage["limit_bytes"], usage["limit_name"]) == (COLD, "cold_bytes")
        assert tiers["memory"]["usage"]["limit_name"] == "memory_bytes"
        assert 0 < usage["used_bytes"] <= COLD
        page = text_of(page_of("here", {**status, "service": {}}))
        for shown in (page, top):
            assert "400.0 KiB (cold_bytes)" in shown and "20.0 KiB" in shown and "red" in shown
            assert re.search(r"quota [\d,]+", shown) and re.search(r"evicted [\d,]+", shown)
        assert f'kvstore_tier_limit_bytes{{tier="filesystem"}} {COLD}' in metrics
        assert f'kvstore_tenant_maximum_bytes{{tenant="red"}} {QUOTA}' in metrics
        assert re.search(r'kvstore_tenant_used_bytes\{tenant="red"\} [1-9]', metrics)
        assert sum(history["evictions"]["quota"]) > 0 and sum(history["evictions"]["evicted"]) > 0
        evicted = [one for one in events if one["kind"] == "evicted"]
        assert evicted and {"quota", "evicted"} <= set(evicted[0]["detail"])


def _top(url: str) -> str:
    client = AdminClient(url, "", timeout_s=60)
    return text_of(screen_of(url, read_values(client)))


async def test_every_series_that_alerts_and_charts_read_is_there_from_the_start(tmp_path: Path) -> None:
    """Every series that alerts and charts read exists before the first fault; else its increase could not be seen. Not
    those of engines, S3 and Redis, which this service lacks, nor those that need a lookup.
    """
    others = ("s3_", "pending_", "tenant_", "stages_cut", "catalog_unknown", "catalog_complete")
    elsewhere = re.compile(rf"vllm:|kvstore_({'|'.join(others)})")
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as admin:
        there = {re.split("[{ ]", line)[0] for line in (await admin.get("/metrics")).text.splitlines()}
    wanted = {name for _, expression in expressions() for name in METRIC.findall(expression)}
    assert {name for name in wanted if not elsewhere.match(name)} <= there


async def test_changes_that_wait_for_the_catalog_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog takes none, and stays complete: `/readyz`, the metrics, `top` and the status say how many wait, and
    stop to when it takes them."""
    prompt = prompt_of("a", tenant="")

    async def seen() -> tuple[httpx.Response, str, str, Any]:
        metrics, status = (await admin.get("/metrics")).text, await made.store.status(deadline=soon())
        return await admin.get("/readyz"), metrics, await asyncio.to_thread(_top, made.url), status["catalog"]

    async with open_service(tmp_path, with_tokens=False) as made, made.client() as admin:
        with monkeypatch.context() as full:

            async def refuse(*_: object, **__: object) -> list[bool]:
                raise Unavailable("the disk is full")

            full.setattr(made.catalog, "add", refuse)
            await made.store.open_namespace(prompt.description, deadline=soon())
            num_records = len(prompt.records())
            for record in prompt.records():
                await made.store.save(record, ack=Ack.COLD, deadline=soon())
            ready, metrics, top, status = await seen()
            assert ready.status_code == 503 and f", and {num_records} of this service wait" in ready.json()["reason"]
            assert f"kvstore_catalog_waiting_changes {num_records}\n" in metrics
            assert re.search(r"kvstore_catalog_waiting_seconds [\d.]*[1-9]", metrics)
            assert f"{num_records} changes of this service wait" in top
            assert status["waiting_changes"] == num_records and status["takes_none_since_ms"] > 0
            assert status["takes_none_reason"] == "the disk is full"
        await made.settle()
        ready, metrics, top, status = await seen()
        assert ready.status_code == 200 and "kvstore_catalog_waiting_seconds 0\n" in metrics
        assert "changes" not in top and status["waiting_changes"] == 0
        assert status["takes_none_since_ms"] is status["answers_none_since_ms"] is None


async def test_a_tenant_sees_its_own_quota_only(tmp_path: Path) -> None:
    """On the data port a tenant's token sees only its own quota."""
    async with open_service(tmp_path, quotas="red=:1MiB,blue=:2MiB") as made:
        store = connect(str(made.server.addresses[0]), token="red token")
        try:
            status: Any = await store.status(deadline=soon())
        finally:
            await store.aclose()
        assert list(status["quotas"]) == ["red"] and "settings" not in status
