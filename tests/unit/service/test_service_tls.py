"""TLS between engine and service: who is believed, who is let in, what is shown after a renewal, and what is said."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.client import ClientOptions, ClientTls, connect
from kvstore.client.remote import RemoteStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import TcpAddress, parse_address
from kvstore.wire.tls import ServerTls

PROMPT = Prompt(ATTENTION, "a", 128, payload_bytes=3 << 20)
"""Records of several TLS frames and socket buffers each."""

Certificate = tuple[Path, Path]
Connect = Callable[[ClientTls], RemoteStore]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate that is its own authority, and its key."""
    return make_certificate(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Somebody else's."""
    return make_certificate(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[ServerTls], object]]:
    """Starts a service that speaks TLS; returns what connects to it."""
    async with AsyncExitStack() as stack:

        async def start(tls: ServerTls) -> tuple[TcpAddress, Connect]:
            store = TieredStore(MemoryTier(64 << 20))
            stack.push_async_callback(store.aclose)
            server = Server(store, tls=tls)
            stack.push_async_callback(server.aclose)
            await server.listen([parse_address("tls://127.0.0.1:0")])
            (address,) = server.addresses
            assert isinstance(address, TcpAddress)

            def client(tls: ClientTls) -> RemoteStore:
                made = connect(str(address), options=ClientOptions(tls=tls))
                stack.push_async_callback(made.aclose)
                return made

            return address, client

        yield start


async def why_not(client: RemoteStore) -> str:
    """What a call is refused with, once the first attempt to connect has ended."""
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(Unavailable) as raised:
                await client.status(deadline=Deadline.after(3.0))
            if "not connected yet" not in str(raised.value):
                return str(raised.value)


async def test_records_travel_through_tls(serve: Callable[..., object], ours: Certificate) -> None:
    """Saved and loaded with equal bytes; the address says what is spoken."""
    address, client = await serve(ServerTls(*ours))  # type: ignore[misc]
    assert str(address) == f"tls://127.0.0.1:{address.port}"
    store = client(ClientTls(ca_file=ours[0]))
    await store.open_namespace(PROMPT.description, deadline=soon())
    records = PROMPT.records()
    await asyncio.gather(*(store.save(record, deadline=soon()) for record in records))
    staged = await store.stage(PROMPT.query(), deadline=soon())
    assert staged.resume_tokens == 128 and staged.lease is not None
    loaded = await asyncio.gather(*(store.load(staged.lease, record.key, deadline=soon()) for record in records))
    assert [bytes(one.data) for one in loaded] == [bytes(record.data) for record in records]
    await store.release(staged.lease)


async def test_a_service_that_is_not_believed(
    serve: Callable[..., object], ours: Certificate, theirs: Certificate
) -> None:
    """Another authority, or the system's: the setting to look at is named, and nothing was said to it."""
    _, client = await serve(ServerTls(*ours))  # type: ignore[misc]
    for tls in (ClientTls(ca_file=theirs[0]), ClientTls()):
        said = await why_not(client(tls))
        assert "tls_ca_file" in said
        assert "self-signed certificate" in said
    told = await client(ClientTls(ours[0])).status(deadline=soon())
    assert told["service"]["sessions"] <= 3, "who never got through the handshake is not a session"


async def test_only_peers_with_a_certificate(
    serve: Callable[..., object], ours: Certificate, theirs: Certificate
) -> None:
    """Mutual TLS: none and a stranger's are not let in, one of the right authority is."""
    _, client = await serve(ServerTls(*ours, client_ca_file=ours[0]))  # type: ignore[misc]
    assert await why_not(client(ClientTls(ours[0])))
    assert await why_not(client(ClientTls(ours[0], *theirs)))
    assert await client(ClientTls(ours[0], *ours)).status(deadline=soon())


async def test_either_side_may_be_wrong_about_tls(serve: Callable[..., object], ours: Certificate) -> None:
    """A client without TLS at a port with it, and the reverse, get `Unavailable`, and neither hangs."""
    address, _ = await serve(ServerTls(*ours))  # type: ignore[misc]
    plain = connect(f"tcp://127.0.0.1:{address.port}", options=ClientOptions(hello_timeout_s=0.3))
    assert await why_not(plain)
    await plain.aclose()
    async with AsyncExitStack() as stack:
        store = TieredStore(MemoryTier(8 << 20))
        stack.push_async_callback(store.aclose)
        server = Server(store)
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address("tcp://127.0.0.1:0")])
        url = str(server.addresses[0]).replace("tcp:", "tls:")
        client = connect(url, options=ClientOptions(hello_timeout_s=0.3, tls=ClientTls(ours[0])))
        stack.push_async_callback(client.aclose)
        assert await why_not(client)


async def test_a_renewed_certificate_is_shown_without_a_restart(
    serve: Callable[..., object],
    ours: Certificate,
    theirs: Certificate,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """New peers see the new one; while key and certificate do not fit, the one before stays in use, and the log says
    so."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(ours[0].read_bytes())
    key.write_bytes(ours[1].read_bytes())
    tls = ServerTls(cert, key)
    _, client = await serve(tls)  # type: ignore[misc]
    first = client(ClientTls(ours[0]))
    assert await first.status(deadline=soon())
    cert.write_bytes(theirs[0].read_bytes())  # half renewed
    assert not tls.poll() and not tls.poll()
    assert "keeping the previous TLS certificate until this is corrected" in caplog.text
    assert await client(ClientTls(ours[0])).status(deadline=soon())
    key.write_bytes(theirs[1].read_bytes())
    assert not tls.poll() and tls.poll()
    assert await client(ClientTls(theirs[0])).status(deadline=soon())
    assert "tls_ca_file" in await why_not(client(ClientTls(ours[0])))
    assert await first.status(deadline=soon()), "who is connected stays so"


def test_what_is_wrong_with_files_is_said_at_once(ours: Certificate, theirs: Certificate, tmp_path: Path) -> None:
    """At start, by the name of the setting, on both sides."""
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    missing = tmp_path / "missing.pem"
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_certificate_file": missing}, "tls_certificate_file"),
        ({"tls_certificate_file": broken}, "tls_certificate_file"),
        ({"tls_certificate_file": ours[0], "tls_key_file": missing}, "tls_key_file"),
        ({"tls_certificate_file": ours[0], "tls_key_file": theirs[1]}, "tls_certificate_file"),
        ({"tls_key_file": ours[1]}, "tls_certificate_file"),
        (
            {"tls_certificate_file": ours[0], "tls_key_file": ours[1], "tls_client_ca_file": broken},
            "tls_client_ca_file",
        ),
    ]
    for given, field in cases:
        with pytest.raises(InvalidRequest, match=field):
            load_settings(given).tls()
    for tls, field in (
        (ClientTls(ca_file=missing), "tls_ca_file"),
        (ClientTls(ca_file=broken), "tls_ca_file"),
        (ClientTls(certificate_file=missing), "tls_certificate_file"),
        (ClientTls(key_file=ours[1]), "tls_certificate_file"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            connect("tls://127.0.0.1:1", options=ClientOptions(tls=tls))


def test_a_service_process_with_tls(ours: Certificate, tmp_path: Path) -> None:
    """The real command on uvloop, asked by the real command: with the authority it answers, without it says why."""
    (port,) = free_ports(1)
    token = tmp_path / "token"
    token.write_text("a token of some length")
    token.chmod(0o600)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")},
        "KVSTORE_LISTEN": f"tls://127.0.0.1:{port}",
        "KVSTORE_TOKEN_FILE": str(token),
        "KVSTORE_COLD": "memory:",
        "KVSTORE_MEMORY_BYTES": "8MiB",
        "KVSTORE_TLS_CERTIFICATE_FILE": str(ours[0]),
        "KVSTORE_TLS_KEY_FILE": str(ours[1]),
    }
    command = [sys.executable, "-m", "kvstore.cli"]
    with subprocess.Popen([*command, "serve"], env=environment, stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stderr is not None
            assert any("listening" in line for line in service.stderr)

            def status(**more: str) -> subprocess.CompletedProcess[str]:
                asking = [*command, "status", "--json", "--timeout-s", "20"]
                return subprocess.run(asking, env={**environment, **more}, capture_output=True, text=True, check=False)

            assert status(KVSTORE_TLS_CA_FILE=str(ours[0])).returncode == 0
            refused = status()
            assert refused.returncode == 1
            assert "tls_ca_file" in refused.stderr
        finally:
            service.terminate()
            service.communicate(timeout=30)
