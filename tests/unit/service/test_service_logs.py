"""Lines of the log: the request they belong to, in text and JSON, one line each, without secrets; wrong tokens."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import connect
from kvstore.client.connection import ClientOptions, Connection
from kvstore.errors import InternalError, InvalidRequest, Unavailable
from kvstore.runtime.tracing import NO_REQUEST, RequestContext, request_context
from kvstore.runtime.watched_file import Watched
from kvstore.service.authentication import Credentials, Grant
from kvstore.service.hidden_secrets import secrets_of
from kvstore.service.logs import ServiceFormatter, log_to_file, shape_logs
from kvstore.service.main import warn_of_memory
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.tiered import TieredStore
from kvstore.store.upkeep.operations import StoreOperations
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address
from tests.unit.admin.service_harness import open_service, prompt_of

PROMPT = Prompt(ATTENTION, "a", 128, tenant="red")


def test_memory_that_the_machine_does_not_have_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """With what fits, by the rule of the doctor. What fits is not told."""
    warn_of_memory(18 << 30, 24 << 30)
    assert not caplog.records
    warn_of_memory(1 << 40, 24 << 30)
    (line,) = caplog.records
    assert line.levelname == "WARNING" and "memory_bytes is 1TiB" in line.message and "at most 18GiB" in line.message


class Lines(logging.Handler):
    """What our formatter makes of everything that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(ServiceFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def about(self, text: str) -> str:
        (line,) = (line for line in self.lines if text in line)
        return line


@pytest.fixture
def written() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def no_request() -> Iterator[None]:
    yield
    request_context.set(NO_REQUEST)


@asynccontextmanager
async def service(*, credentials: Watched[Credentials] | None = None) -> AsyncIterator[tuple[Server, str]]:
    """On TCP, with the tokens that it knows."""
    async with AsyncExitStack() as stack:
        store = TieredStore(MemoryTier(8 << 20))
        stack.push_async_callback(store.aclose)
        server = Server(store, credentials=credentials)
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address("tcp://127.0.0.1:0")])
        yield server, str(server.addresses[0])


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


async def test_a_line_tells_its_request_tenant_and_namespace(written: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug while a lookup is answered: connection and number, tenant and namespace; other lines have none of it."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    async with service(credentials=credentials_of({"red token": Grant("red")})) as (_, url):
        client = connect(url, token="red token")
        try:
            namespace = await client.open_namespace(PROMPT.description, deadline=soon())
            monkeypatch.setattr(TieredStore, "lookup", fail)
            with pytest.raises(InternalError):
                await client.lookup(PROMPT.query(), deadline=soon())
        finally:
            await client.aclose()
    line = written.about("a request failed").splitlines()[0]
    assert f" tenant=red namespace={namespace.hex()}" in line and " request=1." in line
    assert "request=" not in written.about("listening address=")


def test_text_is_one_line_and_its_traceback(written: Lines, no_request: None) -> None:
    """What a peer calls itself begins no line of its own."""
    request_context.set(RequestContext(3, 17, "red"))
    try:
        raise ValueError("planted")
    except ValueError:
        logging.getLogger("kvstore.x").exception("client=%s", "evil\n2026 ERROR kvstore: all is lost\x1b[2J")
    (line,) = written.lines
    first, *rest = line.splitlines()
    assert first.endswith(r"client=evil\n2026 ERROR kvstore: all is lost\x1b[2J request=3.17 tenant=red")
    assert rest[0].startswith("Traceback") and rest[-1] == "ValueError: planted"


def test_json_is_an_object_on_each_line(written: Lines, no_request: None) -> None:
    """Fields have names; the traceback is one of them; no secret, however it is quoted."""
    formatter = written.formatter
    assert isinstance(formatter, ServiceFormatter)
    secret = 's"cret\n'
    shape_logs("json", [secret, "message"])
    request_context.set(RequestContext(request="abc", namespace=b"\x01" * 16))
    try:
        raise ValueError(secret)
    except ValueError:
        logging.getLogger("kvstore.x").exception("a\nb %s", secret)
    (line,) = written.lines
    assert "\n" not in line and 's\\"cret' not in line
    told = json.loads(line)
    assert told.pop("time").endswith("Z") and told.pop("error").startswith("Traceback")
    assert told == {
        "level": "error",
        "logger": "kvstore.x",
        "message": "a\nb ***",
        "request": "abc",
        "namespace": "01" * 16,
    }


def test_secrets_are_known_in_each_of_their_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Redis, of S3, and the token; quoted for urls too; the longest first."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key/of s3")
    token = tmp_path / "token"
    token.write_text("the token\n")
    cold = "s3://b/p?endpoint_url=http://u:endpoint@h"
    flags = {"hot": "redis://:p%40ss%2Fw@h:1/0", "token_file": token, "cold": cold}
    found = secrets_of(load_settings(flags))
    assert {"p@ss/w", "p%40ss%2Fw", "key/of s3", "the token", "endpoint"} <= set(found)
    assert found == sorted(found, key=len, reverse=True)
    token.unlink()
    assert "the token" not in secrets_of(load_settings(flags))


async def test_the_administration_repeats_the_request_id(
    tmp_path: Path, written: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's where it can stand in a log, else ours; the audit log has it, and a line of the data loop too."""
    prompt = prompt_of("a")
    async with open_service(tmp_path) as made, made.client("red") as client:
        await made.save(prompt)
        path = f"/v1/prefixes/{prompt.namespace.hex()}/{prompt.boundary(64).prefix.hex()}"
        answer = await client.delete(path, headers={"X-Request-Id": "ticket-4711"})
        assert answer.headers["x-request-id"] == "ticket-4711"
        bad = [await client.get("/livez", headers={"X-Request-Id": one}) for one in ("", "a b")]
        own = {one.headers["x-request-id"] for one in bad}
        assert all(len(one) == 16 for one in own) and len(own) == 2
        refused = await client.get("/v1/nothing")
        assert refused.status_code == 404 and len(refused.headers["x-request-id"]) == 16
        usage = StoreOperations.tiers

        async def told(*given: Any, **more: Any) -> Any:
            logging.getLogger("kvstore.planted").info("on the data loop")
            return await usage(*given, **more)

        monkeypatch.setattr(StoreOperations, "tiers", told)
        assert (await client.get("/v1/tiers", headers={"X-Request-Id": "bridged"})).status_code == 200
    assert written.about("method=DELETE").endswith(" request=ticket-4711 tenant=red")
    assert written.about("on the data loop").endswith(" request=bridged tenant=red")


async def test_wrong_tokens_are_counted_on_the_data_port(written: Lines) -> None:
    """After ten in a minute wrong ones are refused, and not logged; a right one is served, though never used before."""
    grants = credentials_of({"red token": Grant("red"), "blue token": Grant("blue")})
    async with service(credentials=grants) as (server, _):

        async def greeted(token: str) -> None:
            (await Connection.connect(server.addresses[0], ClientOptions(token=token), "control")).close()

        for number in range(14):
            with pytest.raises(InvalidRequest if number < 10 else Unavailable, match="wrong"):
                await greeted(f"guess {number}")
        await greeted("red token")
        await greeted("blue token")
        with pytest.raises(Unavailable, match="too many wrong tokens from this address"):
            await greeted("red token ")
    assert sum("sent a wrong token to the data port" in line for line in written.lines) == 10


def test_libraries_tell_nothing_of_each_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild of the catalog opens a client at each attempt, and there may be thousands while S3 is away."""
    root, logs = logging.RootLogger(logging.WARNING), tmp_path / "service.log"
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.Logger, "root", root)
    monkeypatch.setattr(logging.Logger, "manager", logging.Manager(root))
    log_to_file(logs)
    for name in ("aiobotocore.credentials", "botocore.configprovider", "kvstore.store"):
        logging.getLogger(name).info("told by %s", name)
    root.handlers[0].close()
    assert logs.read_text().split(" ", 4)[3:] == ["INFO", "kvstore.store: told by kvstore.store\n"]
