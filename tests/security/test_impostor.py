"""An impostor with a certificate of an authority that we trust, but for another host, receives nothing: no key, no
token, no signature. Each kind of request is tried against the right host as well, which receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.admin import AdminClient
from kvstore.client import BlockingStore, ClientOptions, ClientTls
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.keys import NamespaceId
from kvstore.runtime.deadline import Deadline
from kvstore.settings import load_settings
from kvstore.testing.records import make_key, make_record
from kvstore.tiers.locations import S3Location, parse_redis
from kvstore.tiers.redis import RedisTier, open_control
from kvstore.tiers.redis.examine import examine_redis
from kvstore.tiers.s3.client import S3Client
from tests.security.certificates import Authority, Certificate
from tests.security.tls_server import TlsServer, proxy, tls_server

NOBODY = NamespaceId(bytes(16))
REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Ask = Callable[[int], Awaitable[object]]
"""Sends a request to a port of this machine."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def genuine(authority: Authority) -> Certificate:
    """The certificate of the host that clients ask for."""
    return authority.issue("genuine", "IP:127.0.0.1", "DNS:localhost", "DNS:s3.example")


@pytest.fixture(scope="module")
def other(authority: Authority) -> Certificate:
    """A certificate as good, for another host."""
    return authority.issue("other", "DNS:other.example", "IP:127.0.0.9")


async def check_told(ask: Ask, genuine: Certificate, other: Certificate, answer: bytes | None = None) -> None:
    """The right host receives something, and answers with `answer` or not at all; the other one receives nothing."""
    for certificate, is_told in ((genuine, True), (other, False)):
        with tls_server(certificate, lambda _: answer) as server:
            with suppress(KVStoreError, OSError):
                await ask(server.port)
            assert server.num_connections, "nothing was asked at all"
            assert bool(server.received) == is_told, server.received[:400]


# S3


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    """Credentials with a session token, and our authority instead of the usual ones."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "A",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SESSION_TOKEN": "the session token",
        "AWS_CA_BUNDLE": str(authority.ca_file),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "https_proxy", "http_proxy", "AWS_PROFILE", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


async def _names(client: S3Client) -> list[object]:
    return [found async for found in client.list("v1/")]


def place(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


S3_REQUESTS: dict[str, Callable[[S3Client], Awaitable[object]]] = {
    "record, read": lambda client: client.get_record("v1/a", place),
    "record, written": lambda client: client.put_record("v1/a", memoryview(b"x" * 300)),
    "manifest, read": lambda client: client.get("v1/m", place),
    "manifest, written": lambda client: client.put("v1/m", b"m", if_absent=True),
    "head": lambda client: client.head("v1/a"),
    "delete": lambda client: client.delete("v1/a"),
    "delete many": lambda client: client.delete_all(["v1/a", "v1/b"]),
    "move": lambda client: client.move("v1/a", "quarantine/v1/a", None),
    "list": _names,
    "list folders": lambda client: client.list_folders("v1/"),
    "bucket": lambda client: client.check_bucket(),
    "lifecycle": lambda client: client.lifecycle(),
}


async def _ask_s3(endpoint: str, request: Callable[[S3Client], Awaitable[object]]) -> None:
    client = await S3Client.open(S3Location("pages", "", endpoint, "us-east-1"), num_connections=2)
    try:
        async with asyncio.timeout(20):
            await request(client)
    finally:
        await client.aclose()


@pytest.mark.parametrize("name", S3_REQUESTS)
async def test_every_request_to_s3(name: str, aws: None, genuine: Certificate, other: Certificate) -> None:
    """Ours and those of the library, signed with the session token."""
    await check_told(lambda port: _ask_s3(f"https://127.0.0.1:{port}", S3_REQUESTS[name]), genuine, other, REFUSED)


@pytest.mark.parametrize("name", ["record, read", "manifest, written", "head"])
async def test_s3_behind_a_proxy(
    name: str, aws: None, monkeypatch: pytest.MonkeyPatch, genuine: Certificate, other: Certificate
) -> None:
    """A proxy sees every connection and may lead it anywhere: what answers has to have the endpoint's name."""

    async def ask(port: int) -> None:
        with proxy(port) as proxy_port:
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy_port}")
            await _ask_s3("https://s3.example", S3_REQUESTS[name])

    await check_told(ask, genuine, other, REFUSED)


async def test_whoever_gives_out_credentials(
    aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, genuine: Certificate, other: Certificate
) -> None:
    """The library asks STS for a session with our identity token, over a client that it makes itself."""
    (tmp_path / "token").write_text("the identity token")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kvstore")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))

    async def ask(port: int) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"https://127.0.0.1:{port}")
        await _ask_s3("https://127.0.0.1:9", lambda client: client.head("v1/a"))

    await check_told(ask, genuine, other, REFUSED)


# Redis


def soon() -> Deadline:
    return Deadline.after(3.0)


async def _over_the_byte_path(url: str) -> None:
    tier = RedisTier(url)
    try:
        for call in (
            lambda: tier.get(make_key(1), deadline=soon()),
            lambda: tier.put(make_record(1), deadline=soon()),
            lambda: tier.get_manifest(NOBODY, deadline=soon()),
        ):
            with suppress(KVStoreError):
                await call()
    finally:
        await tier.aclose()


async def _over_the_control_client(url: str) -> None:
    from redis.exceptions import RedisClusterException, RedisError

    async with open_control(parse_redis(url)) as client, asyncio.timeout(3):
        with suppress(RedisError, RedisClusterException, OSError):
            await client.get("c1/namespaces")


async def _examined(url: str) -> None:
    await examine_redis(parse_redis(url), deadline=soon())


REDIS_CLIENTS: dict[str, Callable[[str], Awaitable[None]]] = {
    "byte path": _over_the_byte_path,
    "control client": _over_the_control_client,
    "doctor": _examined,
}
MODES = {
    "standalone": "rediss://u:the-password@127.0.0.1:{port}/0?ca_file={ca}",
    "cluster": "rediss+cluster://u:the-password@127.0.0.1:{port}?ca_file={ca}",
    "sentinel": "rediss+sentinel://u:the-password@127.0.0.1:{port}/main?ca_file={ca}&sentinel_login=same",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("client", REDIS_CLIENTS)
async def test_every_client_of_redis(
    client: str, mode: str, authority: Authority, genuine: Certificate, other: Certificate
) -> None:
    """The servers, the first node of a cluster that is asked, and sentinels."""

    async def ask(port: int) -> None:
        await REDIS_CLIENTS[client](MODES[mode].format(port=port, ca=authority.ca_file))

    await check_told(ask, genuine, other)


@pytest.mark.parametrize("mode", ["cluster", "sentinel"])
@pytest.mark.parametrize("client", ["byte path", "control client"])
async def test_who_is_named_by_sentinels_or_a_node_of_the_cluster(
    client: str, mode: str, authority: Authority, genuine: Certificate, other: Certificate
) -> None:
    """A genuine server names another one: that one's name is checked as well."""

    async def ask(port: int) -> None:
        with tls_server(genuine, lambda data: _directory(data, port)) as directory:
            url = MODES[mode].format(port=directory.port, ca=authority.ca_file)
            await REDIS_CLIENTS[client](url)

    await check_told(ask, genuine, other)


def _directory(data: bytes, port: int) -> bytes:
    """What a sentinel, or a node of a cluster, answers to a client's commands: the server is at `port`."""
    where = b"$9\r\n127.0.0.1\r\n"
    number = str(port).encode()
    answers = b""
    upper = data.upper()
    for at in range(len(upper)):
        if not upper.startswith(b"*", at):
            continue
        words = upper[at:].split(b"\r\n")
        verb, second = words[2:3], words[4:5]
        if verb == [b"SENTINEL"] and second == [b"GET-MASTER-ADDR-BY-NAME"]:
            answers += b"*2\r\n" + where + b"$%d\r\n%b\r\n" % (len(number), number)
        elif verb == [b"SENTINEL"]:
            pairs = [
                b"name",
                b"main",
                b"ip",
                b"127.0.0.1",
                b"port",
                number,
                b"flags",
                b"master",
                b"num-other-sentinels",
            ]
            pairs += [b"0"]
            items = b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in pairs)
            answers += b"*1\r\n*%d\r\n%b" % (len(pairs), items)
        elif verb == [b"CLUSTER"]:
            node = b"*3\r\n%b:%b\r\n$40\r\n%b\r\n" % (where, number, b"a" * 40)
            answers += b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node
        elif verb == [b"INFO"]:
            answers += b"$17\r\ncluster_enabled:1\r\n"
        elif verb == [b"COMMAND"]:
            answers += b"*1\r\n*6\r\n$3\r\nget\r\n:2\r\n*1\r\n+readonly\r\n:1\r\n:1\r\n:1\r\n"
        else:
            answers += b"+PONG\r\n" if verb == [b"PING"] else b"+OK\r\n"
    return answers


# What else we ask


async def test_a_collector_of_traces(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, genuine: Certificate, other: Certificate
) -> None:
    """Spans name namespaces and requests; the exporter's headers may hold a token."""
    from kvstore.service.tracing import open_tracing

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.ca_file))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # `requests` would take them instead
        monkeypatch.delenv(name, raising=False)

    def send(port: int) -> None:
        settings = load_settings({"otlp_traces_endpoint": f"https://127.0.0.1:{port}/v1/traces", "traces_share": 1.0})
        with open_tracing(settings) as tracing:
            assert tracing is not None
            with tracing.span("a span"):
                pass

    await check_told(lambda port: asyncio.to_thread(send, port), genuine, other)


async def test_a_service(authority: Authority, genuine: Certificate, other: Certificate) -> None:
    """An engine's client, and the CLI's: the first thing that either says is its token."""

    def ask(port: int) -> None:
        options = ClientOptions(tls=ClientTls(authority.ca_file), hello_timeout_s=1.0)
        with BlockingStore(f"tls://127.0.0.1:{port}", token="the token", options=options) as store:
            store.status(deadline=Deadline.after(2.0))

    await check_told(lambda port: asyncio.to_thread(ask, port), genuine, other)


async def test_the_administration(authority: Authority, genuine: Certificate, other: Certificate) -> None:
    """Every verb of the CLI sends an operator's token."""
    tls = ClientTls(authority.ca_file).context()

    def ask(port: int) -> Any:
        return AdminClient(f"https://127.0.0.1:{port}", "the token", timeout_s=2.0, tls=tls).get("namespaces")

    await check_told(lambda port: asyncio.to_thread(ask, port), genuine, other)


async def test_a_server_that_is_not_believed_is_named(aws: None, other: Certificate) -> None:
    """The message says that it is the certificate, on both ways to S3."""
    with tls_server(other) as server:
        endpoint = f"https://127.0.0.1:{server.port}"
        for name in ("record, read", "record, written", "head", "manifest, read"):
            with pytest.raises(KVStoreError, match=r"certificate.*AWS_CA_BUNDLE"):
                await _ask_s3(endpoint, S3_REQUESTS[name])
    assert isinstance(server, TlsServer) and not server.received


async def test_a_client_that_cannot_be_made_to_check_is_refused(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of the library may open its connections in another way: nothing is sent with it."""
    from aiobotocore.httpsession import AIOHTTPSession

    async def opens(self: AIOHTTPSession, proxy_url: str | None) -> None:
        """As later releases do."""

    monkeypatch.setattr(AIOHTTPSession, "_create_connector", opens)
    with pytest.raises(InvalidRequest, match="may not check the host name"):
        await _ask_s3("https://127.0.0.1:9", S3_REQUESTS["head"])
