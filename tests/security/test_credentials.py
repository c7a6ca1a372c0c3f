"""A credentials file that is empty, half written or gone: who has no token of it gets in nowhere, at no time."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from kvstore.service.authentication import Credentials
from kvstore.testing.attacked import HEALTHY, AttackedService
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.tokens import credentials_of
from kvstore.wire import messages
from tests.security.raw_peer import RawPeer, head_bytes

PROMPT = Prompt(ATTENTION, "credentials", 64, tenant=HEALTHY)
NOBODY = ("", "# nobody yet\n", "credential = []\n", " \n\n")


def entry(tenant: str, token: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[credential]]\ntenant = "{tenant}"\ntoken_sha256 = "{digest}"\nscopes = ["read", "save", "admin"]\n'


class Service(AttackedService):
    """On TCP, with a credentials file."""

    @property
    def credentials(self) -> Path:
        return self.folder / "credentials.toml"

    def status_of(self, token: str) -> int:
        """Of an answer of the administration's port."""
        return httpx.get(f"http://{self.admin}/v1/tiers", headers={"Authorization": f"Bearer {token}"}).status_code

    def admits(self, token: str) -> bool:
        """Whether a peer is greeted, on the data port."""
        with suppress(AssertionError):
            RawPeer(self.url, token).leave()
            return True
        return False

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        give_up_s = time.monotonic() + seconds
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < give_up_s, self.log_tail()
            await asyncio.sleep(0.1)


def is_up(service: Service) -> bool:
    # not by a connection: to a port of its own range without a listener, one may be connected to itself
    return "ready: set url" in service.log_tail()


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[Service]:
    (port,) = free_ports(1)
    with Service(folder, listen=f"tcp://127.0.0.1:{port}", tokens={"x": "x"}) as made:
        await made.until(lambda: is_up(made), 60)
        yield made


@pytest.mark.parametrize("text", NOBODY[:3])
async def test_a_service_without_entries_admits_nobody(folder: Path, text: str) -> None:
    """It starts, says so, and greets neither who has a token nor who has none, on both ports; from the first entry on
    it admits that one."""
    (port,) = free_ports(1)
    made = Service(folder, listen=f"tcp://127.0.0.1:{port}", tokens={"x": "x"})
    made.credentials.write_text(text)
    with made:
        await made.until(lambda: is_up(made), 60)
        for token in ("", "guess", HEALTHY):
            assert not made.admits(token)
        assert made.status_of("guess") == 401
        assert "no token is accepted: add a [[credential]]" in made.log_tail()
        made.credentials.write_text(entry(HEALTHY, HEALTHY))
        await made.until(lambda: "reloaded the credentials" in made.log_tail(), 15)
        assert made.admits(HEALTHY)
        assert made.status_of(HEALTHY) == 200 and not made.admits("")


async def test_wrong_tokens_lock_nobody_out(service: Service) -> None:
    """Just after the start an address sends wrong tokens to both ports until it is told to wait: the right one, which
    the service has not seen yet, is admitted to both at once."""
    for number in range(12):
        assert not service.admits(f"guess {number}")
        assert service.status_of(f"guess {number}") == (401 if number < 10 else 429)
    assert service.admits(HEALTHY) and service.status_of(HEALTHY) == 200
    assert not service.admits("guess") and service.status_of("guess") == 429


async def test_hellos_while_the_file_is_rewritten(service: Service, tell: Callable[[str], None], full: bool) -> None:
    """The file is written in place again and again: no hello with a wrong token or none is greeted, and none with a
    right one is refused for it."""
    text, ends_s = service.credentials.read_text(), time.monotonic() + (60.0 if full else 3.0)
    counts = {"rewritten": 0, "wrong": 0, "right": 0}

    def rewrite() -> None:
        while time.monotonic() < ends_s:
            with service.credentials.open("w") as file:
                file.flush()
                time.sleep(0.001)
                file.write(text[: len(text) // 2])
                file.flush()
                time.sleep(0.001)
                file.write(text[len(text) // 2 :])
            counts["rewritten"] += 1
            time.sleep(0.002)

    def guess() -> None:
        while time.monotonic() < ends_s:
            assert not service.admits("")
            counts["wrong"] += 1
            if counts["wrong"] % 20 == 0:
                assert service.admits(HEALTHY), service.log_tail()
                counts["right"] += 1
            time.sleep(0.001)

    await asyncio.gather(asyncio.to_thread(rewrite), *(asyncio.to_thread(guess) for _ in range(2)))
    tell(f"{counts}")
    assert counts["right"] > 5 and counts["rewritten"] > 50


async def test_who_is_there_when_the_token_goes(service: Service, tell: Callable[[str], None]) -> None:
    """A token is revoked while its engine is connected and its operator follows the events: both are ended within
    seconds; those of another token stay."""
    service.credentials.write_text(entry(HEALTHY, HEALTHY) + entry("red", "red"))
    await service.until(lambda: "reloaded the credentials" in service.log_tail(), 15)
    red, stays = RawPeer(service.url, "red"), RawPeer(service.url, HEALTHY)
    stream_ended = asyncio.Event()
    listening = asyncio.Event()

    async def follow() -> None:
        headers = {"Authorization": "Bearer red"}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("GET", f"http://{service.admin}/v1/events", headers=headers) as answer,
        ):
            assert answer.status_code == 200
            listening.set()
            async for _ in answer.aiter_bytes():
                pass
        stream_ended.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(follow())
        await asyncio.wait_for(listening.wait(), 20)
        started_s = time.monotonic()
        service.credentials.write_text(entry(HEALTHY, HEALTHY))
        answer = await asyncio.to_thread(red.receive)
        assert answer is not None and "token is no longer valid" in answer["message"]
        assert await asyncio.to_thread(red.receive) is None
        await asyncio.wait_for(stream_ended.wait(), 20)
    took_s = time.monotonic() - started_s
    tell(f"ended within {took_s:.1f} s")
    assert took_s < 10
    assert service.status_of("red") == 401
    stays.send(head_bytes(messages.Ping(1, 1000)))
    assert (stays.receive() or {})["type"] == "pong"
    for peer in (red, stays):
        peer.die()


async def test_a_file_that_cannot_be_used_changes_nothing(service: Service) -> None:
    """It is removed, damaged, writable for others: peers stay, tokens count as before, each change is said once with
    what to do."""
    peer = RawPeer(service.url, HEALTHY)
    text = service.credentials.read_text()
    for number, harm in enumerate(
        (lambda: service.credentials.write_text(text + "nonsense"), service.credentials.unlink)
    ):
        harm()
        await service.until(lambda n=number: service.log_tail().count("keeping the previous credentials") > n, 15)  # type: ignore[misc]
        assert service.admits(HEALTHY) and not service.admits("x y")
    await asyncio.sleep(2.5)
    assert service.log_tail().count("keeping the previous credentials") == 2
    peer.send(head_bytes(messages.Ping(1, 1000)))
    assert (peer.receive() or {})["type"] == "pong"
    peer.die()


def test_no_credentials_is_not_false() -> None:
    """Code that asks `if credentials` cannot take a file without entries for none."""
    for credentials in (Credentials({}), credentials_of({})):
        assert credentials
        assert not hasattr(credentials, "__len__")
