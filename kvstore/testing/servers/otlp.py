"""An OTLP endpoint that keeps the spans it is sent, over HTTP as a collector takes them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span: its name, who made it (`service.name`), and the hex ids of its trace and of the span above it."""

    name: str
    service: str
    trace: str
    parent: str


class SpanReceiver:
    """What was sent to `endpoint` so far; `span_receiver` runs one for a block."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._spans))
        self._thread = threading.Thread(target=self._server.serve_forever, name="otlp", daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def of_trace(self, trace: str) -> list[ReceivedSpan]:
        """Spans of a trace, in the order in which they came."""
        return [span for span in self._spans if span.trace == trace]


@contextmanager
def span_receiver() -> Iterator[SpanReceiver]:
    """Listen on a free loopback port for the length of the block."""
    receiver = SpanReceiver()
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()


def _handler(spans: list[ReceivedSpan]) -> type[BaseHTTPRequestHandler]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            spans.extend(_spans_of(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the spans are what is looked at."""

    return Handler


def _spans_of(request: Any) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                service = names.get("service.name", "")
                yield ReceivedSpan(span.name, service, span.trace_id.hex(), span.parent_span_id.hex())
