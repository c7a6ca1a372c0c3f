"""The port: who is served without tokens, what prevents it from opening, and that the data port works without it."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import pytest

from kvstore.client import connect
from kvstore.errors import InvalidRequest
from kvstore.service.admin.access import is_own_user, user_in_table
from kvstore.service.admin.port import Administered, admin_port, check_admin_listen
from kvstore.service.authentication import FailureLimit, Grant
from kvstore.settings import load_settings
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon
from kvstore.wire.address import TcpAddress
from tests.unit.admin.service_harness import ServiceHarness, open_service, prompt_of
from tests.virtual_time import ManualClock


async def test_without_tokens_the_own_user_may_do_all(tmp_path: Path) -> None:
    """On a single user's machine no set-up is needed: that user sees and changes every tenant's data."""
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        red = await made.save(prompt_of("a", "red"))
        assert [one["tenant"] for one in (await client.get("/v1/namespaces")).json()["namespaces"]] == ["red"]
        assert (await client.get("/metrics")).status_code == 200
        deleted = (await client.delete(f"/v1/namespaces/{red.namespace.hex()}?confirm=true")).json()
        assert deleted["by_tier"]["filesystem"]["num_boundaries"] == 6 and deleted["is_complete"]


async def test_web_pages_are_refused_without_tokens(tmp_path: Path) -> None:
    """A web page in the user's own browser may not even read, under another site's name that resolves here or under its
    own.
    """
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        hosts = ("evil.example", "127.0.0.1.evil.example:80", "", "user@127.0.0.1.evil.example", "[")
        for field, values in (("host", hosts), ("origin", ("http://evil.example", "null", ""))):
            for value in values:
                answer = await client.get("/v1/namespaces", headers={field: value})
                assert (answer.status_code, answer.json()["field"]) == (403, field), value
        for host in ("localhost:1", "[::1]:80", "127.0.0.1"):
            headers = {"host": host, "origin": f"http://{host}"}
            assert (await client.get("/v1/namespaces", headers=headers)).status_code == 200


async def test_other_users_are_refused_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user is refused, with a hint at credentials_file. (Only root could test this with a real second user.)"""
    monkeypatch.setattr("kvstore.service.admin.access.is_own_user", lambda peer, own: False)
    async with open_service(tmp_path, with_tokens=False) as made, made.client() as client:
        answer = await client.get("/v1/namespaces")
        assert answer.status_code == 403 and "credentials_file" in answer.json()["detail"]
        assert (await client.get("/livez")).status_code == 200


async def test_the_user_is_looked_up_once_for_each_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the kernel are long. One that was refused is looked up again: its line may come late."""
    answers, asked = [False, True, True], list[tuple[str, int]]()

    def look_up(peer: tuple[str, int], own: tuple[str, int]) -> bool:
        asked.append(peer)
        return answers[len(asked) - 1]

    monkeypatch.setattr("kvstore.service.admin.access.is_own_user", look_up)
    async with open_service(tmp_path, with_tokens=False) as made:
        async with made.client() as client:
            assert [(await client.get("/v1/namespaces")).status_code for _ in range(4)] == [403, 200, 200, 200]
        async with made.client() as client:
            assert (await client.get("/v1/namespaces")).status_code == 200
    assert len(asked) == 3 and asked[0] == asked[1] != asked[2]


def test_the_user_of_a_connection_is_known() -> None:
    """An established connection is ours, over IPv4 and IPv6; a closed or unknown one is not."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as listener:
            peer = socket.create_connection(listener.getsockname()[:2])
            accepted, _ = listener.accept()
            with accepted:
                ends = peer.getsockname()[:2], accepted.getsockname()[:2]
                assert is_own_user(*ends)
                peer.close()
                assert not is_own_user(*ends)


@pytest.mark.parametrize(("state", "inode", "user"), [("01", "77", 1000), ("01", "0", None), ("06", "0", None)])
def test_closed_connections_are_not_roots(state: str, inode: str, user: int | None) -> None:
    """The kernel shows a closed connection as owned by user 0; it does not count."""
    shown = 1000 if state == "01" and inode != "0" else 0
    line = f"   0: 0100007F:9387 0100007F:1B9E {state} 0:0 00:0 0 {shown} 0 {inode} 1 0"
    assert user_in_table([line], ("127.0.0.1", 0x9387), ("127.0.0.1", 0x1B9E)) == user
    assert user_in_table([line], ("127.0.0.1", 0x9386), ("127.0.0.1", 0x1B9E)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.org"])
def test_others_need_tokens(host: str) -> None:
    """An address beyond the loopback without credentials is refused at the start; the message names the setting."""
    with pytest.raises(InvalidRequest, match="field=admin_listen"):
        check_admin_listen(TcpAddress(host, 7070), None)
    check_admin_listen(TcpAddress(host, 7070), credentials_of({"token": Grant("red")}))
    check_admin_listen(None, None)
    loopback = TcpAddress("127.0.0.1", 7070, tls=True)
    with pytest.raises(InvalidRequest, match="field=tls_certificate_file"):
        check_admin_listen(loopback, None)
    check_admin_listen(loopback, None, has_certificate=True)


async def asked(made: ServiceHarness) -> None:
    """Check that the data port answers."""
    store = connect(str(made.server.addresses[0]), token="red token")
    try:
        assert (await store.status(deadline=soon()))["namespaces"] == 0
    finally:
        await store.aclose()


async def test_what_is_no_http_leaves_no_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any peer could fill the log with such requests; their answer says what they are."""
    async with open_service(tmp_path) as made:
        host, port = made.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"rubbish\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        writer.close()
    assert "Invalid HTTP request" not in caplog.text


async def test_a_port_in_use_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the port is in use or not permitted, a warning names the setting, and the service runs without it."""
    async with open_service(tmp_path) as made:
        port = int(made.url.rpartition(":")[2])
        for host, said in (("127.0.0.1", "another program listens there"), ("192.0.2.1", "cannot listen")):
            settings = load_settings({"admin_listen": f"{host}:{port}", "cold": "memory:"})
            caplog.clear()
            async with admin_port(Administered(settings, None, made.store, made.server)) as second:
                assert second is None
            assert said in caplog.text and f"field=admin_listen seen={host}:{port}" in caplog.text
        await asked(made)


async def test_a_name_with_two_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on both, as the data port does: `localhost` may stand for an IPv4 and an IPv6 address."""
    (port,) = free_ports(1)
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port))]
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", AsyncMock(return_value=found))
    async with open_service(tmp_path, with_tokens=False, admin_listen=f"localhost:{port}"):
        monkeypatch.undo()
        for host in ("127.0.0.2", "127.0.0.1"):
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://{host}:{port}/livez")).status_code == 200


async def test_a_missing_package_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is named with the command that installs it."""
    async with open_service(tmp_path) as made:
        monkeypatch.setattr("kvstore.service.admin.port.find_spec", lambda name: None)
        settings = load_settings({"admin_listen": "127.0.0.1:0"})
        async with admin_port(Administered(settings, None, made.store, made.server)) as port:
            assert port is None
        assert "pip install 'kvstore-vllm[admin]'" in caplog.text
        await asked(made)


async def test_nothing_is_loaded_before_the_first_request(tmp_path: Path) -> None:
    """Without requests the service imports no framework and starts no thread; the first request is answered."""
    code = (
        "import asyncio, sys, pathlib, threading\n"
        "from tests.unit.admin.service_harness import open_service\n"
        "async def main():\n"
        "    async with open_service(pathlib.Path(sys.argv[1])) as made:\n"
        "        names = [thread.name for thread in threading.enumerate()]\n"
        "        print('kvstore-admin' in names, 'fastapi' in sys.modules, 'uvicorn' in sys.modules)\n"
        "        async with made.client() as client:\n"
        "            print((await client.get('/livez')).json()['status'])\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.decode().splitlines() == ["False False False", "alive"]


async def test_it_ends_with_the_service(tmp_path: Path) -> None:
    """After the end the port is closed, with and without earlier requests."""
    for is_asked in (False, True):
        async with open_service(tmp_path) as made:
            if is_asked:
                async with made.client() as client:
                    assert (await client.get("/livez")).status_code == 200
        async with made.client() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/livez")


def test_failures_are_counted_by_window() -> None:
    """Ten failures in a minute are too many, for one address; after the minute the count starts again."""

    clock = ManualClock()
    limit = FailureLimit(clock=clock, addresses_max=2)
    for _ in range(10):
        assert limit.wait_s("a") == 0
        limit.failed("a")
    assert (limit.wait_s("a"), limit.wait_s("b")) == (60, 0)
    clock.now_s += 59.5
    assert limit.wait_s("a") == 1
    clock.now_s += 0.5
    assert limit.wait_s("a") == 0
    limit.failed("a")
    assert limit.wait_s("a") == 0
    limit.failed("b")
    limit.failed("c")
    assert len(limit._counts) == 2
    for number in range(10):  # the holder of an IPv6 address usually has 2^64 of them
        limit.failed(f"2001:db8:1:2::{number}")
    assert limit.wait_s("2001:db8:1:2:ffff::1") == 60 and limit.wait_s("2001:db8:1:3::1") == 0
