"""Traces: one from the caller through the service to Redis and S3; nothing where they are off or not understood."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvstore.api import Ack, LeaseId
from kvstore.client import connect, trace_parent
from kvstore.client.connection import ClientOptions, Connection
from kvstore.client.remote import RemoteStore
from kvstore.compose import open_store
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.instruments import Instruments
from kvstore.service.server import Server
from kvstore.service.tracing import OtelTracing, open_tracing
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import CephRgw, redis_server
from kvstore.testing.waiting import soon
from kvstore.wire import messages
from kvstore.wire.address import parse_address

PROMPT = Prompt(ATTENTION, "traced", 128)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spans:
    """What was traced, as it ended.

    Attributes:
        tracing: Where to trace.
    """

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = OtelTracing(provider)

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def of_trace(self, trace: str) -> list[ReadableSpan]:
        return [span for span in self.all() if f"{span.context.trace_id:032x}" == trace]

    def path(self, span: ReadableSpan) -> list[str]:
        """Names from the outermost span to this one; a parent that is not ours is the caller's."""
        by_id: Mapping[int, ReadableSpan] = {one.context.span_id: one for one in self.all()}
        names = [span.name]
        while span.parent is not None:
            if span.parent.span_id not in by_id:
                return [f"{span.parent.span_id:016x}", *names]
            span = by_id[span.parent.span_id]
            names.insert(0, span.name)
        return names


@asynccontextmanager
async def service(folder: Path, spans: Spans | None, **flags: object) -> AsyncIterator[RemoteStore]:
    """A service on a Unix socket and a client of it, both here."""
    tracing = spans.tracing if spans is not None else None
    settings = load_settings(
        {"listen": f"unix:{folder / 's'}", "memory_bytes": "16MiB", "stall_timeout_ms": 20000, **flags}
    )
    async with open_store(settings, Instruments(tracing=tracing)) as store:
        server = Server(store, tracing=tracing)
        try:
            await server.listen([settings.listen])
            client = connect(str(settings.listen), options=ClientOptions(stall_timeout_s=30.0))
            try:
                await client.wait_ready(deadline=soon())
                yield client
            finally:
                await client.aclose()
        finally:
            await server.aclose()


@pytest.mark.servers
async def test_one_trace_from_the_caller_to_redis_and_s3(shared_rgw: CephRgw, tmp_path: Path) -> None:
    """A save and what it becomes, a hit of a fresh service: below the caller's span, each below what asked for it."""
    bucket = f"traces-{secrets.token_hex(4)}"
    shared_rgw.create_bucket(bucket)
    cold = f"s3://{bucket}/p?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}"
    spans = Spans()
    with redis_server() as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", shared_rgw.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", shared_rgw.secret_key)
        flags = {"hot": redis.url, "cold": cold}
        token = trace_parent.set(f"00-{TRACE}-{SPAN}-01")
        try:
            async with service(tmp_path, spans, **flags) as client:
                await client.open_namespace(PROMPT.description, deadline=soon())
                await client.lookup(PROMPT.query(), deadline=soon())
                saves = (client.save(record, ack=Ack.HOT, deadline=soon()) for record in PROMPT.records())
                await asyncio.gather(*saves)
            async with service(tmp_path, spans, **flags) as client:
                await client.open_namespace(PROMPT.description, deadline=soon())
                staged = await client.stage(PROMPT.query(), deadline=soon())
                assert staged.lease is not None and staged.resume_tokens == 128
                await client.load(staged.lease, staged.keys[0], deadline=soon())
                await client.release(staged.lease)
        finally:
            trace_parent.reset(token)
    paths = {tuple(spans.path(span)) for span in spans.of_trace(TRACE)}
    assert {
        (SPAN, "kvstore.lookup"),
        (SPAN, "kvstore.save", "redis.put"),
        (SPAN, "kvstore.save", "kvstore.write_back", "s3.put"),
        (SPAN, "kvstore.stage", "redis.get"),
        (SPAN, "kvstore.load"),
    } <= paths
    assert {path[0] for path in paths} == {SPAN}
    (save, *_) = (span for span in spans.all() if span.name == "kvstore.save")
    assert save.attributes is not None
    assert str(save.attributes["kvstore.request"]).count(".") == 1
    (lookup, *_) = (span for span in spans.all() if span.name == "kvstore.lookup")
    assert lookup.attributes is not None
    assert lookup.attributes["kvstore.namespace"] == PROMPT.namespace.hex()


async def test_requests_without_a_trace_begin_their_own(tmp_path: Path) -> None:
    """And one whose trace cannot be read; what went wrong is told of its span."""
    spans = Spans()
    async with service(tmp_path, spans, cold="memory:") as client:
        await client.open_namespace(PROMPT.description, deadline=soon())
        token = trace_parent.set("no trace at all")
        try:
            with pytest.raises(Unavailable):
                await client.load(LeaseId(bytes(16)), PROMPT.records()[0].key, deadline=soon())
        finally:
            trace_parent.reset(token)
    roots = {span.name: span for span in spans.all()}
    assert {"kvstore.open_namespace", "kvstore.load"} <= roots.keys()
    assert all(span.parent is None for span in roots.values() if span.name.startswith("kvstore."))
    assert roots["kvstore.load"].status.status_code is StatusCode.ERROR
    assert "Unavailable: the lease has ended" in (roots["kvstore.load"].status.description or "")


async def test_a_service_that_does_not_trace_is_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its welcome does not ask for traces, as an older one's does not; then the caller's trace is not sent."""
    heads: list[Mapping[str, object]] = []
    encode = messages.encode

    def watch(message: messages.Message) -> dict[str, object]:
        heads.append(head := encode(message))
        return head

    monkeypatch.setattr(messages, "encode", watch)
    token = trace_parent.set(f"00-{TRACE}-{SPAN}-01")
    try:
        for spans in (None, Spans()):
            heads.clear()
            async with service(tmp_path, spans, cold="memory:") as client:
                await client.status(deadline=soon())
                address = parse_address(client.url)
                connection = await Connection.connect(address, ClientOptions(), "control")
                assert connection.welcome.traces == (spans is not None)
                connection.close()
            (asked,) = (head for head in heads if head["type"] == "status")
            assert asked.get("trace") == (None if spans is None else f"00-{TRACE}-{SPAN}-01")
    finally:
        trace_parent.reset(token)


def test_the_settings_name_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A url without a login; a missing package is told with the command that installs it."""
    for wrong in ("collector:4318", "http://user:password@collector:4318/v1/traces", "ftp://x"):
        with pytest.raises(InvalidRequest, match="otlp_traces_endpoint") as raised:
            load_settings({"otlp_traces_endpoint": wrong})
        assert "password@" not in str(raised.value)
    settings = load_settings({"otlp_traces_endpoint": "http://127.0.0.1:1/v1/traces"})
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'kvstore-vllm\[tracing\]'"), open_tracing(settings):
        pass


def test_nothing_is_imported_where_traces_are_off() -> None:
    """Neither service nor client know the library before the settings name a collector."""
    code = (
        "import sys, kvstore.client, kvstore.compose\n"
        "from kvstore.service.main import load_settings, open_tracing\n"
        "with open_tracing(load_settings({'cold': 'memory:'})) as tracing:\n"
        "    print(tracing, any(name.startswith('opentelemetry') for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"
