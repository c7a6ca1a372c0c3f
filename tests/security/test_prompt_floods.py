"""Plans and questions of routers, as large and as many as a tenant may send: other tenants are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

from kvstore.testing.attacked import HEALTHY, AttackedService, Seen, beside
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.wire import messages
from tests.security.raw_peer import RawPeer, head_bytes

GREEDY = "greedy"
NUM_TOKENS = 262_144
PATIENCE_S = 120.0


def post(service: AttackedService, token: str, path: str, body: bytes) -> tuple[int, str | None, float]:
    """Status, `Retry-After`, and seconds until the answer."""
    host, _, port = service.admin.partition(":")
    connection, started_s = HTTPConnection(host, int(port), timeout=PATIENCE_S), time.monotonic()
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers["Retry-After"], time.monotonic() - started_s
    finally:
        connection.close()


def open_namespace(service: AttackedService, prompt: Prompt, *, step_tokens: int = 16) -> RawPeer:
    """As an engine of its own, which saves one page."""
    engine = {"name": f"steps of {step_tokens}", "models": ["m"], "step_tokens": step_tokens}
    engine |= {"whole_prompts": False, "address": "", "dp_rank": 0}
    peer = RawPeer(service.url, prompt.tenant)
    peer.send(head_bytes(messages.OpenNamespace(1, 60_000, prompt.description.canonical, engine=engine)))
    assert (peer.receive() or {})["type"] == "namespace_opened"
    record = prompt.records()[0]
    peer.send(head_bytes(messages.Save(2, 60_000, "cold"), record.num_bytes) + bytes(record.data))
    assert (peer.receive() or {})["type"] == "saved"
    return peer


async def flooded(
    service: AttackedService, path: str, flood: bytes, asked: bytes, *, num_threads: int, full: bool
) -> tuple[Seen, Counter[tuple[int, str | None]], list[float]]:
    """What a healthy client saw during a flood of the greedy tenant, what that got by status and `Retry-After`, and how
    long another tenant's took."""
    outcomes, took_s = Counter[tuple[int, str | None]](), list[float]()
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            outcomes[post(service, GREEDY, path, flood)[:2]] += 1

    def attack() -> None:
        threads = [threading.Thread(target=send) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        try:
            for _ in range(60 if full else 15):
                status, _, seconds = post(service, HEALTHY, path, asked)
                assert status in (200, 202)
                took_s.append(seconds)
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    seen = await beside(service, lambda: asyncio.to_thread(attack))
    assert max(took_s) < (1.0 if full else 4.0)
    seen.check(full=full)
    return seen, outcomes, took_s


def plan_body(prompt: Prompt, num_tokens: int, num_documents: int, **more: object) -> bytes:
    lengths = [num_tokens // num_documents - 1] * num_documents
    ids = [number * 7919 % 100_000 for number in range(num_tokens)]
    body = {"namespace": prompt.namespace.hex(), "token_ids": ids, "system_tokens": 0, "document_tokens": lengths}
    return json.dumps({**body, **more}).encode()


async def test_a_tenants_plans_keep_nobody_out(folder: Path, full: bool, tell: Callable[[str], None]) -> None:
    """Twelve threads ask for the largest plans. Another tenant gets its small ones meanwhile; of the greedy tenant one
    runs, four wait, and the others are told to come later.
    """
    greedy, healthy = (Prompt(ATTENTION, "planned", 256, tenant=tenant) for tenant in (GREEDY, HEALTHY))
    large = plan_body(greedy, NUM_TOKENS, 64, within_ms=1000, compare=True)
    small = plan_body(healthy, 256, 3)
    with AttackedService(folder, tokens={GREEDY: GREEDY}) as service:
        for prompt in (greedy, healthy):
            open_namespace(service, prompt).leave()
        assert post(service, HEALTHY, "/v1/plan", small)[0] == 200  # the first request loads the interface
        seen, outcomes, took_s = await flooded(service, "/v1/plan", large, small, num_threads=12, full=full)
    tell(f"plans of another tenant took up to {max(took_s):.2f} s, the flood {dict(outcomes)}; {seen}")
    assert set(outcomes) == {(200, None), (503, "1")}


async def test_a_tenants_questions_keep_nobody_out(folder: Path, full: bool, tell: Callable[[str], None]) -> None:
    """Forty engines of one namespace, each with other blocks, and the longest prompts from thirty threads: what is
    stored is found once for all engines. A list of 64 prompts is answered in time, or refused.
    """
    greedy, healthy = (Prompt(ATTENTION, "asked", 256, tenant=tenant) for tenant in (GREEDY, HEALTHY))
    ids = [number * 7919 % 100_000 for number in range(NUM_TOKENS)]
    large = json.dumps({"model": "m", "token_ids": ids}).encode()
    many = json.dumps([{"model": "m", "token_ids": ids[: NUM_TOKENS // 64]}] * 64).encode()
    small = json.dumps({"model": "m", "token_ids": ids[:256]}).encode()
    with AttackedService(folder, tokens={GREEDY: GREEDY}) as service:
        engines = [open_namespace(service, greedy, step_tokens=16 * number) for number in range(1, 41)]
        engines.append(open_namespace(service, healthy))
        try:
            assert post(service, HEALTHY, "/v1/query", small)[0] == 200  # the first request loads the interface
            _, _, large_s = post(service, GREEDY, "/v1/query", large)
            status, _, many_s = post(service, GREEDY, "/v1/query", many)
            seen, outcomes, took_s = await flooded(service, "/v1/query", large, small, num_threads=30, full=full)
        finally:
            for engine in engines:
                engine.leave()
    tell(f"the longest {large_s:.2f} s, 64 prompts {many_s:.2f} s ({status})")
    tell(f"another tenant's took up to {max(took_s):.2f} s, the flood {dict(outcomes)}; {seen}")
    assert many_s < 15.0 and status in (200, 503)
    assert set(outcomes) == {(200, None), (503, "1")}


async def test_a_tenants_prefetches_keep_nobody_out(folder: Path, full: bool, tell: Callable[[str], None]) -> None:
    """Thirty threads ask for the longest prompt, which engines of 20 kinds serve in one namespace; another tenant's are
    taken meanwhile.
    """
    greedy, healthy = (Prompt(ATTENTION, "fetched", 256, tenant=tenant) for tenant in (GREEDY, HEALTHY))
    ids = [number * 7919 % 100_000 for number in range(NUM_TOKENS)]
    large = json.dumps({"model": "m", "token_ids": ids}).encode()
    small = json.dumps({"model": "m", "token_ids": ids[:256]}).encode()
    with AttackedService(folder, tokens={GREEDY: GREEDY}) as service:
        engines = [open_namespace(service, greedy, step_tokens=16 * number) for number in range(1, 21)]
        engines.append(open_namespace(service, healthy))
        try:
            assert post(service, HEALTHY, "/v1/prefetch", small)[0] == 202  # the first request loads the interface
            seen, outcomes, took_s = await flooded(service, "/v1/prefetch", large, small, num_threads=30, full=full)
        finally:
            for engine in engines:
                engine.leave()
    tell(f"another tenant's took up to {max(took_s):.2f} s, the flood {dict(outcomes)}; {seen}")
    assert {status for status, _ in outcomes} <= {202, 429, 503}
