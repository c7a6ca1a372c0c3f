"""Connections that have said hello are bounded, and so is what they may make the service receive and unpack."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvstore.client import ClientOptions, connect
from kvstore.runtime.deadline import Deadline
from kvstore.service.authentication import Grant
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.testing.attacked import HEALTHY, AttackedService, beside
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import until
from kvstore.wire import messages
from kvstore.wire.address import parse_address
from kvstore.wire.frames import MAX_HEAD_BYTES, pack_head
from tests.security.raw_peer import RawPeer, head_bytes, prefix

GREEDY, MODEST = "greedy", "modest"
MIB = 1 << 20


def limited(service: AttackedService, files: int) -> AttackedService:
    """With a limit of open files."""
    command = ["bash", "-c", f'ulimit -Sn {files}; ulimit -Hn {files}; exec "$@"', "bash"]
    service.process.command = [*command, *service.process.command]
    return service


def greet_as_many(url: str, token: str, stack: ExitStack, most: int = 1000) -> tuple[int, str]:
    """Connect until the service refuses; the connections so far, and what it says."""
    for number in range(most):
        peer = stack.enter_context(RawPeer(url, greet=False))
        peer.send(head_bytes(messages.Hello(1, token=token)))
        answer = peer.receive()
        assert answer is not None
        if answer["type"] == "refused":
            return number, f"{answer['kind']}: {answer['message']}"
    return most, ""


async def test_one_token_opens_many_connections(folder: Path, tell: Callable[[str], None]) -> None:
    """With 1,024 open files: its share is refused from, with the bound; the healthy client and `/livez` are served."""
    service = limited(AttackedService(folder, tokens={GREEDY: GREEDY}, scopes={GREEDY: ("read",)}), 1024)
    seen_states: list[int] = []

    def attack() -> str:
        with ExitStack() as stack:
            number, said = greet_as_many(service.url, GREEDY, stack)
            assert 200 < number < 400 and said.startswith("Unavailable: too many connections") and "limit=512" in said
            RawPeer(service.url, HEALTHY).die()
            admin = http.client.HTTPConnection(service.admin, timeout=10)
            admin.request("GET", "/livez")
            seen_states.append(admin.getresponse().status)
            admin.close()
            return f"{number} connections, then: {said}"

    with service:
        seen = await beside(service, lambda: asyncio.to_thread(lambda: tell(attack())))
        seen.check()
        assert seen_states == [200]
        assert "Traceback" not in service.log_tail()


def test_no_more_files_is_said_seldom(folder: Path) -> None:
    """Peers come and go where no file is left: one warning, no traceback."""
    service = limited(AttackedService(folder, tokens={GREEDY: GREEDY}), 256)
    with service:
        give_up_s = time.monotonic() + 30
        for _ in range(3):
            with ExitStack() as stack:
                for _ in range(300):
                    with suppress(OSError):
                        stack.enter_context(RawPeer(service.url, greet=False))
                time.sleep(0.5)
            assert time.monotonic() < give_up_s
        assert service.log_tail().count("no more descriptors") == 1
        assert "Traceback" not in service.log_tail()


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Server]:
    limits = ServiceLimits(connections=40, head_bytes=32 * MIB, receive_timeout_s=2.0)
    server = Server(
        SteeredStore(), limits, credentials=credentials_of({name: Grant(name) for name in (GREEDY, MODEST)})
    )
    await server.listen([parse_address(f"unix:{folder / 's'}")])
    yield server
    await server.aclose()


async def test_connections_are_shared(server: Server) -> None:
    """A tenant has three quarters, another one is greeted all the same, and what was closed is free again."""
    url = str(server.addresses[0])
    for _ in range(2):
        with ExitStack() as stack:
            assert (await asyncio.to_thread(greet_as_many, url, GREEDY, stack))[0] == 30
            assert (await asyncio.to_thread(greet_as_many, url, MODEST, stack))[0] >= 5
        await until(lambda: not server.describe()["sessions"])


async def test_unfinished_heads(server: Server, tell: Callable[[str], None]) -> None:
    """Of heads that one tenant does not finish, few are received at a time. Long lookups of another tenant are answered
    during that, and the unfinished ones are ended at their deadline."""
    url, heads = str(server.addresses[0]), server._context.heads
    with ExitStack() as stack:

        def attack() -> list[RawPeer]:
            peers = [stack.enter_context(RawPeer(url, GREEDY)) for _ in range(20)]
            for peer in peers:
                peer.sock.settimeout(0.2)
                with suppress(TimeoutError):
                    peer.send(prefix(MAX_HEAD_BYTES) + bytes(7 * MAX_HEAD_BYTES // 8))
            return peers

        peers = await asyncio.to_thread(attack)
        assert 0 < heads.used_bytes <= 24 * MIB
        with await asyncio.to_thread(RawPeer, url, MODEST) as modest:
            started_s = time.monotonic()
            lookup = messages.Lookup(1, 5000, bytes(16), bytes(4 * 100_000), bytes(32 * 100_000), 0, 0, 0)
            await asyncio.to_thread(modest.send, head_bytes(lookup))
            answer = await asyncio.to_thread(modest.receive)
            assert answer is not None and answer["type"] == "error"
            tell(f"a long lookup took {time.monotonic() - started_s:.2f} s")
            assert time.monotonic() - started_s < 1.5
        await until(lambda: any(peer.is_ended() for peer in peers))
        async with asyncio.timeout(30):
            assert heads.used_bytes <= 24 * MIB
            for peer in peers:
                peer.die()
            await until(lambda: not heads.used_bytes)


async def test_a_head_of_small_values(server: Server) -> None:
    """It ends its connection, and the loop is not held: a client of another tenant is answered at once."""
    url = str(server.addresses[0])
    head = b"\x83" + b"".join(pack_head({name: value})[17:] for name, value in (("type", "cancel"), ("id", 1)))
    head += b"\xa1x\xdd" + (4_000_000).to_bytes(4, "big") + b"\x80" * 4_000_000
    client = connect(url, options=ClientOptions(token=MODEST))
    await client.wait_ready(deadline=Deadline.after(5))
    with await asyncio.to_thread(RawPeer, url, GREEDY) as peer:
        await asyncio.to_thread(peer.send, prefix(len(head)) + head)
        loop_s = time.monotonic()
        await client.status(deadline=Deadline.after(5))
        assert time.monotonic() - loop_s < 0.5
        answer = await asyncio.to_thread(peer.receive)
        assert answer is not None and answer["type"] == "refused"
    await client.aclose()


async def test_a_head_waits_for_room_only_so_long(tmp_path: Path) -> None:
    """One connection holds all the room with the start of a head; another one that waits for it is told in time."""
    server = Server(SteeredStore(), ServiceLimits(head_bytes=MAX_HEAD_BYTES, receive_timeout_s=0.1))
    await server.listen([parse_address(f"unix:{tmp_path / 's'}")])

    def wait() -> list[str]:
        with RawPeer(f"unix:{tmp_path / 's'}") as one, RawPeer(f"unix:{tmp_path / 's'}") as other:
            one.send(prefix(MAX_HEAD_BYTES))
            other.send(prefix(MAX_HEAD_BYTES))
            return [str((peer.receive() or {})["message"]) for peer in (one, other)]

    said = " ".join(await asyncio.to_thread(wait))
    await server.aclose()
    assert "room for a long head" in said and "did not arrive in time" in said
