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

from kvstore.testing.attacked import HEALTHY, AttackedService, beside
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


def open_namespace(service: AttackedService, prompt: Prompt) -> None:
    peer = RawPeer(service.url, prompt.tenant)
    peer.send(head_bytes(messages.OpenNamespace(1, 60_000, prompt.description.canonical)))
    assert (peer.receive() or {})["type"] == "namespace_opened"
    record = prompt.records()[0]
    peer.send(head_bytes(messages.Save(2, 60_000, "cold"), record.num_bytes) + bytes(record.data))
    assert (peer.receive() or {})["type"] == "saved"
    peer.leave()


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
    outcomes, took_s = Counter[tuple[int, str | None]](), list[float]()
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            outcomes[post(service, GREEDY, "/v1/plan", large)[:2]] += 1

    def ask() -> None:
        floods = [threading.Thread(target=flood) for _ in range(12)]
        for one in floods:
            one.start()
        time.sleep(1.0)
        try:
            for _ in range(60 if full else 15):
                status, _, seconds = post(service, HEALTHY, "/v1/plan", small)
                assert status == 200
                took_s.append(seconds)
        finally:
            stop.set()
            for one in floods:
                one.join()

    with AttackedService(folder, tokens={GREEDY: GREEDY}) as service:
        await service.ready()
        for prompt in (greedy, healthy):
            open_namespace(service, prompt)
        assert post(service, HEALTHY, "/v1/plan", small)[0] == 200  # the first request loads the interface
        seen = await beside(service, lambda: asyncio.to_thread(ask))
    tell(f"plans of another tenant took up to {max(took_s):.2f} s, the flood {dict(outcomes)}; {seen}")
    assert set(outcomes) == {(200, None), (503, "1")}
    assert max(took_s) < (1.0 if full else 4.0)
    seen.check(full=full)
