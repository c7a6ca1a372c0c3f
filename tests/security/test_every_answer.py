"""Every request is answered once, for every result of the store; and its id is free from then on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import Lookup, PrefixQuery, Progress, Staged
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.service.server import Server
from kvstore.testing.attacked import AttackedService
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.waiting import until
from kvstore.wire import convert, messages
from kvstore.wire.address import parse_address
from tests.security.raw_peer import RawPeer, head_bytes

PROMPT = Prompt(ATTENTION, "answers", 128)
OVER_64_BITS = 1 << 70


class OddStore(SteeredStore):
    """Returns what no message can hold.

    Attributes:
        odd: By the name of a call, what its answer is made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.odd: dict[str, Any] = {}

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        staged = await super().stage(query, deadline=deadline)
        num_keys, num_bytes, sources = self.odd.get("stage", (len(staged.keys), staged.num_bytes, staged.sources))
        key = RecordKey(query.namespace, query.boundaries[0].prefix, 0, 0)
        return Staged(
            staged.lease, staged.resume_tokens, (key,) * num_keys, ((0, 1),) * num_keys, sources, num_bytes, 60.0
        )

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        found = await super().lookup(query, deadline=deadline)
        return Lookup(self.odd.get("lookup", found.resume_tokens), found.groups_present)

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        return self.odd.get("status", await super().status(deadline=deadline, tenant=tenant))  # type: ignore[no-any-return]


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[tuple[OddStore, str]]:
    store = OddStore()
    server = Server(store)
    await server.listen([parse_address(f"unix:{folder / 's'}")])
    yield store, str(server.addresses[0])
    await server.aclose()
    await store.aclose()


def opened(url: str) -> RawPeer:
    peer = RawPeer(url)
    peer.send(head_bytes(messages.OpenNamespace(1, 20_000, PROMPT.description.canonical)))
    assert (peer.receive() or {})["type"] == "namespace_opened"
    for record in PROMPT.records():
        peer.send(head_bytes(messages.Save(1, 20_000, "memory"), record.num_bytes) + bytes(record.data))
        assert (peer.receive() or {})["type"] == "saved"
    return peer


QUERY = convert.query_fields(PROMPT.query())
ODD = {
    "a status that no frame holds": ("status", {"records": "x" * (5 << 20)}, messages.Status(7, 20_000)),
    "a stage of more bytes than 64 bits": ("stage", (1, OVER_64_BITS, {}), messages.Stage(7, 20_000, **QUERY)),
    "a stage from a place without a name": ("stage", (1, 1, {"redis": object()}), messages.Stage(7, 20_000, **QUERY)),
    "a lookup beyond 64 bits": ("lookup", OVER_64_BITS, messages.Lookup(7, 20_000, **QUERY)),
    "a status with a damaged number": ("status", {"records": -OVER_64_BITS}, messages.Status(7, 20_000)),
    "a status with a value of no type": ("status", {"records": object()}, messages.Status(7, 20_000)),
}


@pytest.mark.parametrize("case", ODD)
async def test_answers_that_cannot_be_packed(served: tuple[OddStore, str], case: str) -> None:
    """The request gets an error, once; what was leased for it is free; the connection and the id go on."""
    store, url = served
    call, value, request = ODD[case]
    peer = await asyncio.to_thread(opened, url)
    store.odd[call] = value
    peer.send(head_bytes(request))
    answer = await asyncio.to_thread(peer.receive)
    assert answer is not None and (answer["type"], answer["id"], answer["kind"]) == ("error", 7, "InternalError")
    await until(lambda: not store.num_leases)
    store.odd.clear()
    peer.send(head_bytes(request) + head_bytes(messages.Ping(8, 1000)))
    answers = [await asyncio.to_thread(peer.receive) for _ in range(2)]
    assert sorted((one or {})["id"] for one in answers) == [7, 8]
    assert "error" not in [(one or {})["type"] for one in answers]
    peer.die()


async def test_half_a_character_in_an_answer(served: tuple[OddStore, str]) -> None:
    """A text that users sent in JSON may hold one. It must not cost the operator the whole status."""
    store, url = served
    peer = await asyncio.to_thread(opened, url)
    store.odd["status"] = {"a\udc80b": 1}
    peer.send(head_bytes(messages.Status(7, 20_000)))
    answer = await asyncio.to_thread(peer.receive)
    assert answer is not None and answer["type"] == "status_reply"
    assert answer["values"]["a?b"] == 1
    peer.die()


@pytest.fixture
def service(folder: Path) -> Iterator[AttackedService]:
    """The real one, on its own loop."""
    with AttackedService(folder) as made:
        yield made


def test_an_id_is_free_when_its_answer_is_there(service: AttackedService) -> None:
    """Hundreds of requests of each kind one after the other, all with one id, each sent in the moment in which the last
    answer was received: each is answered, on the same connection."""
    record = PROMPT.records()[0]
    unknown = {**convert.key_fields(record.key), "namespace": bytes(16)}
    frames = {
        "save": head_bytes(messages.Save(5, 20_000, "memory"), record.num_bytes) + bytes(record.data),
        "lookup": head_bytes(messages.Lookup(5, 20_000, **QUERY)),
        "status": head_bytes(messages.Status(5, 20_000)),
        "error": head_bytes(messages.Discard(5, 20_000, reason="", **unknown)),
        "load": head_bytes(messages.Load(5, 20_000, bytes(16), **convert.key_fields(record.key))),
        "share_arena": head_bytes(messages.ShareArena(5, 20_000)),
        "locate": head_bytes(
            messages.Locate(5, 20_000, bytes(16), **convert.locate_fields([record.key]), arena=bytes(16))
        ),
    }
    with opened(service.url) as peer:
        for kind, frame in frames.items():
            for number in range(300):
                peer.send(frame)
                answer = peer.receive()
                assert answer is not None and answer.get("id") == 5, (kind, number, answer)


async def test_a_request_for_the_places_of_nothing(service: AttackedService) -> None:
    """It is answered with no places: it costs no traceback in the log."""
    with RawPeer(service.url) as peer, RawPeer(service.url, greet=False) as other:
        other.send(head_bytes(messages.Hello(1)))
        arena = (other.receive() or {})["arena"]
        peer.send(head_bytes(messages.OpenNamespace(1, 20_000, PROMPT.description.canonical)))
        peer.receive()
        peer.send(head_bytes(messages.Locate(5, 20_000, bytes(16), PROMPT.namespace, b"", b"", arena)))
        answer = peer.receive()
    assert arena and answer == {"type": "located", "id": 5, "places": b""}


async def test_cancelled_requests_are_answered_once_too(served: tuple[OddStore, str]) -> None:
    """A request is cancelled at any moment around its answer: one answer comes, and the id can be used again."""
    _, url = served

    def ask() -> None:
        with opened(url) as peer:
            for number in range(200):
                peer.send(head_bytes(messages.Status(5, 20_000)))
                if number % 2:
                    peer.send(head_bytes(messages.Cancel(5)))
                answer = peer.receive()
                if not number % 2:
                    peer.send(head_bytes(messages.Cancel(5)))
                assert answer is not None and answer["id"] == 5 and answer["type"] in ("error", "status_reply")
            peer.send(head_bytes(messages.Ping(6, 1000)))
            assert (peer.receive() or {})["id"] == 6

    await asyncio.to_thread(ask)
