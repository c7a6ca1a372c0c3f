"""Memory that clients make records in, used by a hostile one: other places, bytes that change, thousands of clients."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import ClientOptions, connect
from kvstore.errors import Unavailable
from kvstore.format.record import Record, open_record
from kvstore.runtime.arena import Place
from kvstore.runtime.budget import ByteBudget
from kvstore.runtime.deadline import Deadline
from kvstore.service import save_memory
from kvstore.service.authentication import Grant, Scope
from kvstore.service.incoming import Incoming
from kvstore.service.limits import ServiceLimits
from kvstore.service.save_memory import SaveMemories, SaveMemory
from kvstore.testing.attacked import AttackedService, beside
from kvstore.testing.prompts import Prompt
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import eventually, until
from kvstore.wire import messages
from kvstore.wire.address import parse_address
from tests.security.memory_peer import HEAD_BYTES, MIB, PROMPT, RECORD, MemoryPeer, ask_for_memory, service_at
from tests.security.raw_peer import RawPeer, head_bytes

GRAIN_BYTES = 16 << 10


def several(place: tuple[int, int, int]) -> dict[str, Any]:
    """A save of the record and of one at another place: offset, bytes, stamp."""
    places = ((HEAD_BYTES, RECORD.num_bytes, 1), place)
    return {"places": b"".join(struct.pack("<3Q", *one) for one in places), "num_bytes": RECORD.num_bytes + place[1]}


PLACES = {
    "another memory": ({"memory": bytes(16)}, "Unavailable"),
    "a short id": ({"memory": b"x"}, "Unavailable"),
    "before the start": ({"offset": 0}, "InvalidRequest"),
    "over the start": ({"offset": 63}, "InvalidRequest"),
    "over the end": ({"offset": 16 * MIB - 1000}, "InvalidRequest"),
    "behind the end": ({"offset": 1 << 62}, "InvalidRequest"),
    "no bytes": ({"num_bytes": 0}, "InvalidRequest"),
    "less than a header": ({"num_bytes": 191}, "InvalidRequest"),
    "more than the memory": ({"num_bytes": 32 * MIB}, "InvalidRequest"),
    "more than any record": ({"num_bytes": 1 << 62}, "InvalidRequest"),
    "no stamp": ({"stamp": 0}, "InvalidRequest"),
    "another stamp": ({"stamp": 2}, "Unavailable"),
    "a byte too few": ({"num_bytes": RECORD.num_bytes - 1}, "CorruptRecord"),
    "a byte too many": ({"num_bytes": RECORD.num_bytes + 1}, "CorruptRecord"),
    "another level": ({"ack": "none"}, "InvalidRequest"),
    "several, cut short": ({"places": bytes(23)}, "InvalidRequest"),
    "too many": ({"places": bytes(24 * (messages.SAVE_PLACES_MAX + 1))}, "InvalidRequest"),
    "several, of other bytes": ({"places": bytes(48)}, "InvalidRequest"),
    "several, one outside": (several((1 << 40, RECORD.num_bytes, 1)), "InvalidRequest"),
    "several, one too small": (several((HEAD_BYTES, 100, 1)), "InvalidRequest"),
    "several, one used again": (several((HEAD_BYTES, RECORD.num_bytes, 2)), "Unavailable"),
}


async def test_other_places_and_other_memory(folder: Path) -> None:
    """Every place that is not the record's is one error; the connection stays, and nothing is stored or held."""
    async with service_at(f"unix:{folder / 's'}") as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url)
            attacker.put(RECORD, HEAD_BYTES)
            for number, (changes, kind) in enumerate(PLACES.values(), 2):
                fields = {"ack": "memory", "memory": attacker.id, "offset": HEAD_BYTES, "stamp": 1}
                fields |= {"num_bytes": RECORD.num_bytes, **changes}
                answer = attacker.ask(head_bytes(messages.Save(number, 20_000, **fields)))
                assert (answer["type"], answer["id"], answer.get("kind")) == ("error", number, kind), (changes, answer)
            assert not service.held(RECORD)
            assert attacker.ask(attacker.save(100))["outcome"] == "stored"
            attacker.die()

        await asyncio.to_thread(attack)
        assert service.held(RECORD)
        await until(lambda: not service.server.describe()["save_memory_bytes_used"])
        assert service.server.describe()["receive_bytes_used"] == 0


async def test_places_that_were_never_written(folder: Path) -> None:
    """They cost the service no memory: only the page with the stamp is read."""
    async with service_at(f"unix:{folder / 's'}") as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url, 64 * MIB)
            for number in range(1, 6):
                place = {"offset": HEAD_BYTES + number * 10 * MIB, "num_bytes": 10 * MIB}
                answer = attacker.ask(attacker.save(number + 1, **place))
                assert answer["kind"] == "Unavailable" and "no longer there" in answer["message"]
            assert os.fstat(attacker.descriptor).st_blocks * 512 < MIB
            attacker.die()

        await asyncio.to_thread(attack)


async def test_the_size_of_the_memory_cannot_change(folder: Path) -> None:
    """Its client cannot shrink it under the service, which would fault; a hole that it makes reads as zeros."""
    async with service_at(f"unix:{folder / 's'}") as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url)
            for size in (0, MIB, 64 * MIB):
                with pytest.raises(PermissionError):
                    os.ftruncate(attacker.descriptor, size)
            attacker.put(RECORD, HEAD_BYTES + GRAIN_BYTES)
            place = {"offset": HEAD_BYTES + GRAIN_BYTES}
            libc_hole(attacker.descriptor, 2 * GRAIN_BYTES, GRAIN_BYTES)
            assert attacker.ask(attacker.save(2, **place))["kind"] == "CorruptRecord"
            with contextlib.suppress(OSError):  # the kernel may refuse it, since the memory is mapped
                fcntl.fcntl(attacker.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            attacker.put(RECORD, HEAD_BYTES + GRAIN_BYTES)
            assert attacker.ask(attacker.save(3, **place))["outcome"] == "stored"
            attacker.die()

        await asyncio.to_thread(attack)
        assert service.held(RECORD)


def libc_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    """Free a range of a file, whose size stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_punch_hole = 3
    place = (ctypes.c_int(descriptor), ctypes.c_int(keep_size_punch_hole))
    assert libc.fallocate(*place, ctypes.c_longlong(offset), ctypes.c_longlong(num_bytes)) == 0


@pytest.mark.parametrize(("tries", "where"), [(10_000, "in threads"), (2_000, "on the loop")])
async def test_bytes_that_change_while_they_are_copied(
    folder: Path, tell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tries: int, where: str
) -> None:
    """A client writes to its records all the time while they are saved, 10,000 times: each save is refused, or what is
    stored has the bytes of its record."""
    if where == "in threads":
        monkeypatch.setattr(save_memory, "INLINE_BYTES", 0)
    batch = 50
    prompt = replace(PROMPT, name="changing", num_tokens=64 * batch // 2)
    records = prompt.records()
    assert len(records) == batch
    step = -(-(records[0].num_bytes + HEAD_BYTES) // GRAIN_BYTES) * GRAIN_BYTES
    places = [number * step + HEAD_BYTES for number in range(batch)]
    num_stored = num_refused = 0
    async with service_at(f"unix:{folder / 's'}") as service:
        attacker = await asyncio.to_thread(MemoryPeer, service.url, prompt=prompt)
        for record, place in zip(records, places, strict=True):
            attacker.put(record, place)
        written: Any = np.frombuffer(attacker.memory, np.uint8, batch * step).reshape(batch, step)
        parts, ended = written[:, HEAD_BYTES + 1000 : HEAD_BYTES + records[0].num_bytes], threading.Event()

        def change() -> None:
            # every second time the bytes are what they were: a copy in between is whole, one during it is mixed
            while not ended.is_set():
                np.bitwise_xor(parts, 1, out=parts)
                np.bitwise_xor(parts, 1, out=parts)

        def save_all() -> list[dict[str, Any]]:
            requests = [attacker.save(number + 2, offset=place) for number, place in enumerate(places)]
            attacker.peer.send(b"".join(requests))
            return [attacker.peer.receive() or {} for _ in places]

        changing = threading.Thread(target=change)
        changing.start()
        try:
            for _ in range(tries // batch):
                for answer in await asyncio.to_thread(save_all):
                    assert answer["type"] == "saved" or answer["kind"] == "CorruptRecord", answer
                    num_refused += answer["type"] == "error"
                held = [record for record in records if service.held(record)]  # with its bytes
                num_stored += len(held)
                for record in held:
                    service.memory.remove(record.key)
        finally:
            ended.set()
            changing.join()
            attacker.die()
    tell(f"{num_stored} records were stored, each with its bytes, and {num_refused} were refused")
    assert num_stored + num_refused == tries
    assert num_stored and num_refused


async def test_a_connection_has_memory_once(folder: Path) -> None:
    """A second request for memory on a connection is an error, and the first memory stays."""
    async with service_at(f"unix:{folder / 's'}") as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url)
            answer, descriptor = ask_for_memory(attacker.owner, MIB)
            assert (answer["kind"], descriptor) == ("InvalidRequest", -1)
            attacker.put(RECORD, HEAD_BYTES)
            assert attacker.ask(attacker.save(2))["outcome"] == "stored"
            attacker.die()

        await asyncio.to_thread(attack)


async def test_memory_ends_with_its_connection(folder: Path) -> None:
    """From then on no save can name it, also on a connection that stays."""
    async with service_at(f"unix:{folder / 's'}") as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url)
            attacker.put(RECORD, HEAD_BYTES)
            attacker.owner.die()
            eventually(lambda: not service.server.describe()["save_memory_bytes_used"])
            assert attacker.ask(attacker.save(2))["kind"] == "Unavailable"
            attacker.die()

        await asyncio.wait_for(asyncio.to_thread(attack), 20)
        assert not service.held(RECORD)


async def test_a_save_with_both_a_place_and_a_payload(folder: Path) -> None:
    """It ends its connection before anything is received."""
    async with service_at(f"unix:{folder / 's'}") as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url)
            fields = {"memory": attacker.id, "offset": HEAD_BYTES, "num_bytes": RECORD.num_bytes, "stamp": 1}
            answer = attacker.ask(head_bytes(messages.Save(2, 20_000, "memory", **fields), 1000))
            assert (answer["type"], answer["kind"]) == ("refused", "InvalidRequest")
            attacker.die()

        await asyncio.to_thread(attack)


async def test_who_gets_no_memory(folder: Path) -> None:
    """Neither a peer on TCP, nor a tenant, nor who may not save. A peer on TCP cannot name memory that it knows the id
    of."""
    credentials = credentials_of({"tenant": Grant("red"), "reader": Grant(None, frozenset({Scope.READ}))})
    async with service_at(f"unix:{folder / 's'}", credentials=credentials, token="shared") as service:
        await service.server.listen([parse_address("tcp://127.0.0.1:0")])
        tcp = str(service.server.addresses[1])

        def attack() -> None:
            for url, token in ((service.url, "tenant"), (service.url, "reader"), (tcp, "shared")):
                peer = RawPeer(url, token, greet=False)
                peer.send(head_bytes(messages.Hello(1, token=token)))
                welcome = peer.receive()
                assert welcome is not None and welcome["save_memory"] is False
                answer, descriptor = ask_for_memory(peer, MIB)
                assert (answer["type"], answer["kind"], descriptor) == ("error", "Unavailable", -1)
                peer.die()
            attacker = MemoryPeer(service.url)
            attacker.put(RECORD, HEAD_BYTES)
            with RawPeer(tcp, "shared") as peer:
                peer.send(head_bytes(messages.OpenNamespace(1, 20_000, PROMPT.description.canonical)))
                peer.receive()
                peer.send(attacker.save(2))
                assert (peer.receive() or {})["kind"] == "Unavailable"
            attacker.die()

        await asyncio.to_thread(attack)
        assert not service.held(RECORD)


async def test_memory_of_another_tenant() -> None:
    """A tenant that knows the id of another one's memory cannot name it, and none takes all that there is."""
    limits = ServiceLimits(save_memory_bytes=128 * MIB, save_memory_of_one_bytes=16 * MIB)
    memories = SaveMemories(limits)
    memory, descriptor = memories.open(16 * MIB, "red")
    os.close(descriptor)
    receipt = Incoming(ByteBudget(MIB), MIB).finish()
    request = messages.Save(1, 1000, "memory", memory=memory.id, offset=64, num_bytes=1000, stamp=1)
    with pytest.raises(Unavailable, match="no connection of this client"):
        await memories.copy(
            request, receipt, lambda size: memoryview(bytearray(size)), tenant="blue", deadline=Deadline.after(10)
        )
    opened = [memory]
    with pytest.raises(Unavailable, match="as much memory"):
        while True:
            again, descriptor = memories.open(16 * MIB, "red")
            os.close(descriptor)
            opened.append(again)
    assert len(opened) == 6
    other, descriptor = memories.open(1, "blue")
    os.close(descriptor)
    assert other.capacity_bytes == 16 * MIB  # however little was asked for: each costs a descriptor
    for one in (*opened, *opened, other):
        memories.close(one)
    assert memories.used_bytes == 0
    memories.shutdown()


async def test_saves_count_as_those_that_are_sent(folder: Path) -> None:
    """Without room a save waits until its deadline. More than the credit ends the connection."""
    limits = ServiceLimits(receive_bytes=200_000, save_credit_bytes=150_000)
    async with service_at(f"unix:{folder / 's'}", limits) as service:

        def attack() -> None:
            attacker = MemoryPeer(service.url)
            attacker.put(RECORD, HEAD_BYTES)
            holder = RawPeer(service.url)
            holder.send(head_bytes(messages.Save(1, 20_000, "memory"), 190_000) + b"\0")
            eventually(lambda: service.server.describe()["receive_bytes_used"])
            fields = {"memory": attacker.id, "offset": HEAD_BYTES, "num_bytes": RECORD.num_bytes, "stamp": 1}
            answer = attacker.ask(head_bytes(messages.Save(2, 300, "memory", **fields)))
            assert answer["kind"] == "Unavailable" and "no room" in answer["message"], answer
            waiting = attacker.save(3)
            attacker.peer.send(waiting)
            holder.die()  # now there is room
            assert (attacker.peer.receive() or {})["outcome"] == "stored"
            holder = RawPeer(service.url)
            holder.send(head_bytes(messages.Save(1, 20_000, "memory"), 190_000) + b"\0")
            eventually(lambda: service.server.describe()["receive_bytes_used"])
            attacker.peer.send(attacker.save(4) + attacker.save(5) + attacker.save(6))
            answer = attacker.peer.receive() or {}
            assert answer["type"] == "refused" and "credit" in answer["message"], answer
            holder.die()
            attacker.die()

        await asyncio.wait_for(asyncio.to_thread(attack), 30)
        await until(lambda: not service.server.describe()["receive_bytes_used"])


async def test_saves_in_one_go_are_copied_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen clients name many records each in one go: others have their turn after every second record."""
    rounds, inner = Counter[int](), SaveMemory.copy
    number, loop = 0, asyncio.get_running_loop()

    def copy(self: SaveMemory, place: Place, target: memoryview) -> Record:
        rounds[number] += 1
        return inner(self, place, target)

    def tick() -> None:
        nonlocal number
        number += 1
        ticking = loop.call_soon(tick)
        if ended.is_set():
            ticking.cancel()

    monkeypatch.setattr(SaveMemory, "copy", copy)
    prompts = [replace(PROMPT, name=f"in one go {index}", num_tokens=64 * 10) for index in range(12)]
    async with service_at(f"unix:{folder / 's'}") as service:
        attackers = [await asyncio.to_thread(MemoryPeer, service.url) for _ in prompts]
        requests = []
        for attacker, prompt in zip(attackers, prompts, strict=True):
            places = [HEAD_BYTES + index * 5 * GRAIN_BYTES for index in range(20)]
            for place, record in zip(places, prompt.records(), strict=True):
                attacker.put(record, place)
            requests.append(b"".join(attacker.save(index + 2, offset=place) for index, place in enumerate(places)))
        ended = threading.Event()
        loop.call_soon(tick)

        def attack() -> list[str]:
            for attacker, request in zip(attackers, requests, strict=True):
                attacker.peer.send(request)
            return [(attacker.peer.receive() or {})["outcome"] for attacker in attackers for _ in range(20)]

        outcomes = await asyncio.to_thread(attack)
        ended.set()
        for attacker in attackers:
            attacker.die()
    assert outcomes == ["stored"] * 240
    assert rounds.total() == 240 and max(rounds.values()) <= save_memory.INLINE_AT_ONCE


async def test_thousands_of_memories(folder: Path, full: bool, tell: Callable[[str], None]) -> None:
    """Clients ask for memory, each on a connection of its own, far more than there is: it stays bounded, a healthy
    client is served meanwhile, and all is free when they are gone."""
    with AttackedService(folder) as service:
        asked = 3000 if full else 600
        granted: list[int] = []

        def attack(num_bytes: int) -> None:
            peers, refused = list[RawPeer](), 0
            for _ in range(asked):
                peer = RawPeer(service.url)
                answer, descriptor = ask_for_memory(peer, num_bytes)
                peers.append(peer)
                if descriptor >= 0:
                    granted.append(answer["capacity_bytes"])
                    os.close(descriptor)
                else:
                    refused += answer["kind"] == "Unavailable"
            assert len(granted) + refused == asked
            for peer in peers:
                peer.die()

        async def attack_both() -> None:
            for num_bytes, number in ((1, 64), (1 << 40, 4)):
                granted.clear()
                await asyncio.to_thread(attack, num_bytes)
                assert (len(granted), sum(granted)) == (number, 1 << 30)
                await until_free(service)

        seen = await beside(service, attack_both)
        tell(str(seen))
        seen.check(full=full)


async def until_free(service: AttackedService) -> None:
    """Return when the service has no memory of clients."""
    client = service.client()
    try:
        await until(
            lambda: client.status(deadline=Deadline.after(20)),
            20,
            holds=lambda status: not status["service"]["save_memory_bytes_used"],
        )
    finally:
        await client.aclose()


_SAVES_FOR_EVER = """
import asyncio, sys
from tests.security.test_save_memory import save_for_ever
asyncio.run(save_for_ever(sys.argv[1], sys.argv[2]))
"""


async def save_for_ever(url: str, name: str) -> None:
    """A client that saves records of its memory until it is killed; says so once the first ones are stored."""
    store = connect(url, options=ClientOptions(save_memory_bytes=64 * MIB))
    await store.wait_ready(deadline=Deadline.after(60))
    await store.open_namespace(PROMPT.description, deadline=Deadline.after(60))
    await until(lambda: store.shared_buffer(MIB) is not None)
    for turn in range(1_000_000):
        made = []
        for record in prompt_of(name, turn).records():
            while (buffer := store.shared_buffer(record.num_bytes)) is None:
                await asyncio.sleep(0.001)
            buffer[:] = record.data
            made.append(Record(record.header, buffer.toreadonly()))
        del buffer
        await asyncio.gather(*(store.save(record, deadline=Deadline.after(60)) for record in made))
        del made
        if turn == 0:
            print("saved", flush=True)


def prompt_of(name: str, turn: int) -> Prompt:
    """What a client saves in one turn: records of 1 MiB."""
    return replace(PROMPT, name=f"{name} {turn}", num_tokens=64 * 10, payload_bytes=MIB)


async def test_clients_that_are_killed(folder: Path) -> None:
    """In the middle of their saves, again and again: their memory is free, what is stored is whole, and the service
    serves others."""
    root = Path(kvstore.__file__).resolve().parent.parent
    with AttackedService(folder, memory_bytes=128 * MIB) as service:
        names = [f"killed {number}" for number in range(5)]
        for number, name in enumerate(names):
            client = subprocess.Popen(
                [sys.executable, "-c", _SAVES_FOR_EVER, service.url, name],
                stdout=subprocess.PIPE,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
            )
            try:
                assert client.stdout is not None
                assert b"saved" in await asyncio.to_thread(client.stdout.readline)
                await asyncio.sleep(0.03 * number)
            finally:
                client.send_signal(signal.SIGKILL)
                client.wait()
                client.stdout.close()
            await until_free(service)
        await check_stored(service, names)


async def check_stored(service: AttackedService, names: Sequence[str]) -> None:
    """Every record of these prompts that the service has is whole; and it takes new ones."""
    client, num_checked = service.client(), 0
    try:
        for prompt in (prompt_of(name, turn) for name in names for turn in range(4)):
            await client.open_namespace(prompt.description, deadline=Deadline.after(60))
            expected = {record.key: record.data for record in prompt.records()}
            staged = await client.stage(prompt.query(), deadline=Deadline.after(60))
            for key in staged.keys:
                assert staged.lease is not None
                record = await client.load(staged.lease, key, deadline=Deadline.after(60))
                assert open_record(record.data, key).data == expected[key]
                num_checked += 1
            if staged.lease is not None:
                await client.release(staged.lease)
        fresh = replace(PROMPT, name="fresh")
        for record in fresh.records():
            await client.save(record, deadline=Deadline.after(60))
    finally:
        await client.aclose()
    assert num_checked
