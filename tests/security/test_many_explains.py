"""Explanations, as many as connections may ask for: other clients are served, and the event loop is not held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.api import Outcome
from kvstore.errors import InvalidRequest
from kvstore.runtime.deadline import Deadline
from kvstore.store.tiered import TieredStore
from kvstore.testing.attacked import AttackedService, beside
from kvstore.testing.loop_held import LoopHeld
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import convert, messages
from tests.security.raw_peer import RawPeer, head_bytes

GREEDY = "greedy"
NUM_KEPT = 2048
ASKED = {"one": "request 2000", "a start of all": "request", "nobody's": "nobody", "the latest": ""}


def miss(prompt: Prompt, number: int) -> Outcome:
    """A request that needed what was never stored, with the tokens of all the others."""
    boundary = prompt.boundary(64)
    more = {"stop": boundary, "first": boundary.prefix, "content": b"c" * 16, "tenant": prompt.tenant}
    return Outcome(f"request {number}", prompt.namespace, 64, 63, 0, 0, "nothing_stored", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ASKED)
async def test_explains_do_not_hold_the_loop(asked: str) -> None:
    """Two hundred at a time, for a tenant and for an operator, over as many requests as are kept."""
    prompt = Prompt(ATTENTION, "explained", 64, tenant=GREEDY)
    store = TieredStore(MemoryTier(8 << 20))
    try:
        await store.open_namespace(prompt.description, deadline=Deadline.after(60))
        for number in range(NUM_KEPT):
            store.report(miss(prompt, number))
        held = LoopHeld()
        async with held.watching():
            calls = [
                store.explain(ASKED[asked], deadline=Deadline.after(120), tenant=tenant)
                for tenant in (GREEDY, None) * 100
            ]
            answers = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await store.aclose()
    is_found = asked in ("one", "the latest")
    assert all(isinstance(answer, dict if is_found else InvalidRequest) for answer in answers)
    assert held.longest_s < 0.2


@pytest.mark.parametrize("asked", ASKED)
async def test_pipelined_explains_delay_nobody(
    folder: Path, full: bool, asked: str, tell: Callable[[str], None]
) -> None:
    """One tenant asks on eight connections, in one go each."""
    prompt = Prompt(ATTENTION, "explained", 64, tenant=GREEDY)
    each = 1000 if full else 250

    def explain(number: int) -> None:
        peer = RawPeer(service.url, GREEDY)
        peer.send(head_bytes(messages.OpenNamespace(1, 60_000, prompt.description.canonical)))
        assert (peer.receive() or {})["type"] == "namespace_opened"
        if number == 0:
            for report in range(NUM_KEPT):
                peer.send(head_bytes(convert.outcome_message(miss(prompt, report))))
        asks = b"".join(head_bytes(messages.Explain(one, 60_000, ASKED[asked])) for one in range(2, each + 2))
        sending = threading.Thread(target=peer.send, args=(asks,))
        sending.start()
        for _ in range(each):
            assert peer.receive() is not None
        sending.join()
        peer.leave()

    async def ask() -> None:
        await asyncio.to_thread(explain, 0)
        await asyncio.gather(*(asyncio.to_thread(explain, number) for number in range(1, 8)))

    with AttackedService(folder, tokens={GREEDY: GREEDY}) as service:
        seen = await beside(service, ask)
    tell(f"{asked}: {seen}")
    seen.check(full=full)
