"""The only module that knows OpenTelemetry, which is imported when the settings name a collector."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import kvstore
from kvstore.errors import InvalidRequest
from kvstore.runtime.tracing import Tracing
from kvstore.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger(__name__)


class OtelTracing:
    """`Tracing` with OpenTelemetry; the provider stays the caller's."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("kvstore", kvstore.__version__)
        self._nowhere = context.Context()
        self._current_span = trace.get_current_span
        self._error = trace.StatusCode.ERROR
        self._wire = TraceContextTextMapPropagator()

    def span(self, name: str, parent: str | None = None, **attributes: str | int) -> AbstractContextManager[object]:
        """As `Tracing.span`."""
        context = None if parent is None else self._wire.extract({"traceparent": parent}, self._nowhere)
        named = {f"kvstore.{key}": value for key, value in attributes.items() if value != ""}
        return self._tracer.start_as_current_span(name, context, attributes=named)

    def current(self) -> str:
        """As `Tracing.current`."""
        carrier: dict[str, str] = {}
        self._wire.inject(carrier)
        return carrier.get("traceparent", "")

    def failed(self, reason: str) -> None:
        """As `Tracing.failed`."""
        self._current_span().set_status(self._error, reason)


@contextmanager
def open_tracing(settings: Settings) -> Iterator[Tracing | None]:
    """Tracing as the settings say; `None`: they name no collector, and nothing is imported. Buffered spans
    are sent at the end.

    A collector that is down costs spans and a line in the log; requests do not notice.

    Raises:
        InvalidRequest: A package is not installed.
    """
    if settings.otlp_traces_endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise InvalidRequest(
            "the setting otlp_traces_endpoint needs a package that is not installed: "
            "pip install 'kvstore-vllm[tracing]'",
            missing=error.name,
        ) from error
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(settings.traces_share),
        resource=Resource.create({"service.name": "kvstore", "service.version": kvstore.__version__}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_traces_endpoint)))
    _log.info("traces go to endpoint=%s share=%g", settings.otlp_traces_endpoint, settings.traces_share)
    try:
        yield OtelTracing(provider)
    finally:
        provider.shutdown()
