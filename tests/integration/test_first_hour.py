"""A first hour of operation, in one go: what each tool says of a healthy, a full and a frozen store, and of misses.

The service is started with flags, as the quick start says; every tool runs in a shell that knows its address at most.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvstore.api import Ack, Outcome
from kvstore.client import connect
from kvstore.client.remote import RemoteStore
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import CephRgw
from kvstore.testing.waiting import soon
from tests.deployment.files import DEPLOY
from tests.integration.quick_start import QuickStart, quick_start

pytestmark = [pytest.mark.servers, pytest.mark.full]

COLD_BYTES = 200_000
LAYOUT = describe_layout(ATTENTION)


def description(dtype: str) -> NamespaceDescription:
    fields = {"architecture": "LlamaForCausalLM", "compute_dtype": dtype, "cache_dtype": "auto", "layout": LAYOUT}
    return NamespaceDescription.from_fields(fields)


def prompt_of(name: str, dtype: str = "bfloat16") -> Prompt:
    prompt = Prompt(ATTENTION, name, 64 * 4)
    object.__setattr__(prompt, "description", description(dtype))
    return prompt


async def save(engine: RemoteStore, prompt: Prompt) -> None:
    await engine.open_namespace(prompt.description, deadline=soon())
    await engine.lookup(prompt.query(), deadline=soon())
    for record in prompt.records():
        await engine.save(record, ack=Ack.COLD, deadline=soon())


def missed(request: str, prompt: Prompt, *, salt: int = 0, content: int = 0) -> Outcome:
    first = prompt.boundary(64)
    mine = type(first.prefix)(bytes([salt]) * 32)
    return Outcome(
        *(request, prompt.namespace, 256, 256, 0, 0, "nothing_stored"),
        stop=first,
        first=mine,
        content=bytes([content]) * 16 if content else b"",
    )


def series(metrics: str, name: str) -> dict[str, float]:
    """By its labels, each value of a series."""
    found = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def alerts() -> Mapping[str, str]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def said(start: QuickStart, *verb: str) -> str:
    known = {"KVSTORE_LISTEN": start.listen, "KVSTORE_ADMIN_LISTEN": start.admin}
    done = start.run(*verb, **known)
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


async def test_a_first_hour(shared_rgw: CephRgw, tmp_path: Path) -> None:
    """In this order: doctor, a full cold tier, misses for four reasons, a frozen Redis."""
    with quick_start(shared_rgw, tmp_path, cold_bytes=str(COLD_BYTES), retention_policy="lru") as start:
        async with (
            aclosing(connect(start.listen)) as engine,
            httpx.AsyncClient(base_url=f"http://{start.admin}", timeout=60) as admin,
        ):
            await _doctor(start)
            await _full(start, engine, admin)
            await _misses(start, engine, admin)
            await _frozen(start, admin)


async def _doctor(start: QuickStart) -> None:
    """It looks at the Redis and the bucket of the service, which nothing in the shell names."""
    done = await asyncio.to_thread(
        start.run, "doctor", "--json", "--timeout", "30", KVSTORE_LISTEN=start.listen, **start.login
    )
    told = json.loads(done.stdout)
    assert told["store"] == {
        "hot": f"redis://{start.redis.host}:{start.redis.port}/0",
        "cold": f"s3://{start.bucket}/pages",
        "told_by": start.listen,
        "found": "given as KVSTORE_LISTEN",
    }
    found = start.findings(done)
    assert {found[name]["verdict"] for name in ("store", "service", "redis", "s3", "s3.rights")} == {"ok"}


async def _full(start: QuickStart, engine: RemoteStore, admin: httpx.AsyncClient) -> None:
    """Far more is saved than `cold_bytes`: it is full by its name everywhere, and what left has its cause."""
    await save(engine, prompt_of("first"))
    async with asyncio.timeout(90):
        for number in range(1000):
            await save(engine, prompt_of(f"other {number}"))
            metrics = (await admin.get("/metrics")).text
            if sum(series(metrics, "kvstore_retention_boundaries_total").values()) > 20:
                break
    limit = f"{COLD_BYTES / 1024:.1f} KiB (cold_bytes)"
    status = await asyncio.to_thread(said, start, "status")
    top = await asyncio.to_thread(said, start, "top", "--once")
    for text in (status, top):
        assert limit in text and "evicted" in text, text
    assert "s3: works, holds" in status and "evicted since its start:" in status
    tiers = {one["name"]: one for one in (await admin.get("/v1/tiers")).json()["tiers"]}
    used = tiers["s3"]["usage"]["used_bytes"]
    assert 0.5 * COLD_BYTES < used <= COLD_BYTES and tiers["redis"]["usage"]["limit_name"] == "maxmemory"
    assert series(metrics, "kvstore_tier_limit_bytes")['{tier="s3"}'] == COLD_BYTES
    assert "kvstore_tier_used_bytes" in alerts()["KVStoreTierFull"]
    listed = await asyncio.to_thread(said, start, "ls")
    assert "LlamaForCausalLM bfloat16" in listed and prompt_of("first").namespace.hex() in listed


async def _misses(start: QuickStart, engine: RemoteStore, admin: httpx.AsyncClient) -> None:
    """Four requests miss, for reasons that their engine cannot tell apart: lists and counts have `explain`'s."""
    await save(engine, prompt_of("typed", "float32"))
    salted = prompt_of("salted")
    await engine.open_namespace(salted.description, deadline=soon())
    engine.report(missed("earlier", salted, salt=1, content=7))
    wanted = {
        "never": (missed("never", prompt_of("never asked before")), "never_stored"),
        "evicted": (missed("evicted", prompt_of("first")), "other_tier"),  # from S3, and Redis still holds it
        "dtype": (missed("dtype", prompt_of("typed")), "namespace_differs"),
        "salt": (missed("salt", prompt_of("salted again"), salt=2, content=7), "other_salt"),
    }
    for outcome, _ in wanted.values():
        engine.report(outcome)
    async with asyncio.timeout(60):
        while True:
            listed = {one["request"]: one["reason"] for one in (await admin.get("/v1/requests")).json()["requests"]}
            if len(listed) == 5 and "nothing_stored" not in listed.values():
                break
            await asyncio.sleep(0.1)
    status: Any = await engine.status(deadline=soon())
    metrics = (await admin.get("/metrics")).text
    counted = series(metrics, "kvstore_requests_total")
    page = await asyncio.to_thread(said, start, "status")
    top = await asyncio.to_thread(said, start, "top", "--once")
    for request, (_, reason) in wanted.items():
        assert listed[request] == reason
        explained = json.loads(
            (await asyncio.to_thread(start.run, "explain", request, "--json", KVSTORE_LISTEN=start.listen)).stdout
        )
        assert explained["reason"] == reason
        if request == "evicted":
            assert explained["detail"]["in_redis"] == "stored"
            assert explained["detail"]["in_s3"].startswith("not stored: evicted")
        assert status["recent"]["reasons"][reason] >= 1
        assert sum(value for labels, value in counted.items() if f'reason="{reason}"' in labels) >= 1
        assert reason in page and reason in top
    assert "nothing_stored" not in page + top


async def _frozen(start: QuickStart, admin: httpx.AsyncClient) -> None:
    """Redis stands still: the service goes on, and each tool names it."""
    start.redis.freeze()
    try:
        async with asyncio.timeout(60):
            while True:
                metrics = (await admin.get("/metrics")).text
                if series(metrics, "kvstore_tier_open").get('{tier="redis"}'):
                    break
                await asyncio.to_thread(start.run, "status", KVSTORE_LISTEN=start.listen)
        assert alerts()["KVStoreTierOff"] == "avg_over_time(kvstore_tier_open[5m]) > 0.2"
        assert series(metrics, "kvstore_tier_healthy")['{tier="redis"}'] == 0
        status = await asyncio.to_thread(said, start, "status")
        for part in ("in part", "redis does not answer", "Next: "):
            assert part in status, status
        assert (await admin.get("/readyz")).status_code == 503
        tiers = {one["name"]: one for one in (await admin.get("/v1/tiers")).json()["tiers"]}
        assert (tiers["redis"]["healthy"], tiers["s3"]["healthy"]) == (False, True)
        done = await asyncio.to_thread(
            start.run, "doctor", "--json", "--timeout", "3", KVSTORE_LISTEN=start.listen, **start.login
        )
        found = start.findings(done)
        assert done.returncode == 1 and found["redis"]["verdict"] == "failed" and found["s3"]["verdict"] == "ok"
        assert "frozen" in found["redis"]["fix"]
    finally:
        start.redis.thaw()
