"""The rank's side: reads documents on a thread of its own, and blends on the engine's thread, one piece a step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from connector.blend.choice import Span
from connector.blend.documents import DocumentStore
from connector.blend.jobs import BlendAudit, BlendJob, BlendReport, BlendReports
from connector.blend.recompute import Document, LayeredModel, LayerStates, blend, compute_document, extend
from kvstore.errors import KVStoreError

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_AUDIT_TOKENS = 256
"""Tokens of an audit that are computed in a step, so that other requests wait little for it."""
_WAIT_S = 0.005


class EngineModel(LayeredModel, Protocol):
    """The engine's model, which also writes into blocks."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next token's logits behind tokens whose hidden states behind the last layer these are."""

    def write(self, states: LayerStates, start: int, stop: int, block_ids: Sequence[int], block_tokens: int) -> None:
        """Write keys and values of a prompt's tokens into the engine's blocks.

        Args:
            states: Of the prompt, from its first token on.
            start: The first token to write.
            stop: Behind the last one.
            block_ids: The prompt's blocks, from its first token on.
            block_tokens: Tokens of a block.
        """


@dataclass(slots=True)
class _Open:
    """A request that is being blended."""

    job: BlendJob
    spans: list[Span]
    documents: list[Document | None] = field(default_factory=list)
    reading: Future[list[Document | None]] | None = None
    num_stored: int = 0

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor(self.job.tokens)


@dataclass(slots=True)
class _Audit:
    """A prompt that is computed in full, some tokens a step."""

    job: BlendJob
    blended: LayerStates
    exact: LayerStates
    done_tokens: int = 0


class Blender:
    """Blends what the scheduler side orders. Belongs to the engine's thread.

    Args:
        model: The engine's.
        store: Its documents; `None` while the namespace is not open, or cannot be: then documents are computed alone.
        ratio: Share of documents' tokens that are computed again.
        block_tokens: Tokens of a block.
    """

    def __init__(
        self, model: EngineModel, store: Callable[[], DocumentStore | None], *, ratio: float, block_tokens: int
    ) -> None:
        self._model = model
        self._store = store
        self._ratio = ratio
        self._block_tokens = block_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-blend")
        self._answered = threading.Event()
        self._open = deque[_Open]()
        self._audit: _Audit | None = None
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._blended: list[BlendReport] = []
        self._audits: list[BlendAudit] = []

    # ---- steps

    def work(self, jobs: Sequence[BlendJob], *, computes: bool) -> None:
        """Begin new jobs, and do one piece of what is ready: compute a document alone, blend a request, or a part of
        an audit.

        Args:
            jobs: Of this step.
            computes: The step has a forward. Else it waits a little for the store.
        """
        for job in jobs:
            self._begin(job)
        if not self._open:
            self._go_on_with_audit()
            return
        current = self._open[0]  # in the order of their coming
        assert current.reading is not None
        if not current.reading.done():
            if not computes:
                self._answered.wait(_WAIT_S)
            return
        try:
            self._advance(current)
        except Exception as error:  # noqa: BLE001 - vLLM waits for each of these requests, so each is reported
            _log.exception("kvstore: a request could not be blended and is computed request=%s", current.job.request_id)
            self._end(current, BlendReport(current.job.request_id, error=f"{type(error).__name__}: {error}"))

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests that ended since the last call, and those of them that failed."""
        results = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return results

    def take_reports(self) -> BlendReports | None:
        """What became of requests and audits since the last call; `None`: nothing."""
        if not self._blended and not self._audits:
            return None
        reports = BlendReports(tuple(self._blended), tuple(self._audits))
        self._blended, self._audits = [], []
        return reports

    def close(self) -> None:
        """End the thread, once its call of the store has ended. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    # ---- a request

    def _begin(self, job: BlendJob) -> None:
        spans = [span for span in job.spans if span.start < job.stop_tokens]
        opened = _Open(job, spans)
        self._open.append(opened)
        self._answered.clear()
        try:
            opened.reading = self._thread.submit(self._read, job, spans)
        except RuntimeError as error:  # the engine ends
            self._end(opened, BlendReport(job.request_id, error=str(error)))
        else:
            opened.reading.add_done_callback(lambda _: self._answered.set())

    def _read(self, job: BlendJob, spans: Sequence[Span]) -> list[Document | None]:
        """The documents that are stored. On the blender's thread."""
        store = self._store()
        found: list[Document | None] = []
        for span in spans:
            document = None
            if store is not None:
                try:
                    document = store.read(job.tokens[0], job.tokens[span.start : span.stop])
                except KVStoreError as error:
                    _log.warning("kvstore: a document cannot be read and is computed: %s", error)
                    store = None  # nor can the others: they would each wait as long
            found.append(document)
        return found

    def _advance(self, current: _Open) -> None:
        if not current.documents:
            assert current.reading is not None
            current.documents = current.reading.result()
            current.num_stored = sum(document is not None for document in current.documents)
        job, tokens = current.job, current.tokens
        missing = next((at for at, document in enumerate(current.documents) if document is None), None)
        if missing is not None:
            span = current.spans[missing]
            part = tokens[span.start : span.stop]
            current.documents[missing] = document = compute_document(self._model, int(tokens[0]), part)
            with suppress(RuntimeError):  # it ends
                self._thread.submit(self._write, job.tokens[0], job.tokens[span.start : span.stop], document)
            return
        documents = [
            _cut(span, document, job.stop_tokens)
            for span, document in zip(current.spans, current.documents, strict=True)
            if document is not None
        ]
        made = blend(self._model, tokens[: job.stop_tokens], documents, ratio=self._ratio)
        self._model.write(made.states, job.start_tokens, job.stop_tokens, job.block_ids, self._block_tokens)
        report = BlendReport(job.request_id, job.stop_tokens, len(made.rows), len(documents), current.num_stored)
        self._end(current, report)
        if job.is_audited:
            self._begin_audit(job, made.states)

    def _write(self, first_token: int, tokens: Sequence[int], document: Document) -> None:
        store = self._store()
        try:
            if store is not None:
                store.write(first_token, tokens, document)
        except KVStoreError as error:
            _log.warning("kvstore: a document was computed and not stored: %s", error)
        except Exception:
            _log.exception("kvstore: a document was computed and not stored")
            raise

    def _end(self, current: _Open, report: BlendReport) -> None:
        self._open.remove(current)
        self._finished.add(report.request_id)
        if report.error:
            self._failed.add(report.request_id)
        self._blended.append(report)

    # ---- audits

    def _begin_audit(self, job: BlendJob, blended: LayerStates) -> None:
        if self._audit is not None:  # each holds the keys and values of a prompt twice
            self._audits.append(BlendAudit(job.request_id, None))
            return
        self._audit = _Audit(job, _longer(blended, len(job.tokens)), _longer(blended, len(job.tokens)))

    def _go_on_with_audit(self) -> None:
        audit = self._audit
        if audit is None:
            return
        try:
            tokens = torch.tensor(audit.job.tokens)
            start = audit.done_tokens
            stop = audit.done_tokens = min(len(tokens), start + _AUDIT_TOKENS)
            exact = extend(self._model, audit.exact, tokens[start:stop], start, wants_hidden=stop == len(tokens))
            if exact is None:
                return
            self._audit = None
            self._audits.append(self._compare(audit, tokens, exact[-1:]))
        except Exception as error:  # noqa: BLE001 - the engine keeps stepping until each audit is reported
            _log.warning("kvstore: a blended request could not be audited: %s", error, exc_info=error)
            self._audit = None
            self._audits.append(BlendAudit(audit.job.request_id, None))

    def _compare(self, audit: _Audit, tokens: torch.Tensor, exact: torch.Tensor) -> BlendAudit:
        stop = audit.job.stop_tokens
        hidden = extend(self._model, audit.blended, tokens[stop:], stop, wants_hidden=True)
        assert hidden is not None
        wanted, seen = (self._model.logits(one)[0].to(torch.float32).log_softmax(-1) for one in (exact, hidden[-1:]))
        return BlendAudit(
            audit.job.request_id,
            max(0.0, float((wanted.exp() * (wanted - seen)).sum())),
            _differences(audit.exact.keys, audit.blended.keys, stop),
            _differences(audit.exact.values, audit.blended.values, stop),
        )


def _cut(span: Span, document: Document, stop: int) -> tuple[Span, Document]:
    """A document up to the last block, if it ends behind that."""
    if span.stop <= stop:
        return span, document
    states = document.states.rows(0, stop - span.start)
    return Span(span.start, stop), Document(states, document.first_position)


def _longer(states: LayerStates, num_tokens: int) -> LayerStates:
    """A copy with room for more tokens."""

    def longer(part: torch.Tensor) -> torch.Tensor:
        return torch.cat((part, part.new_zeros(num_tokens - len(part), *part.shape[1:])))

    return LayerStates([longer(one) for one in states.keys], [longer(one) for one in states.values])


def _differences(exact: Sequence[torch.Tensor], blended: Sequence[torch.Tensor], stop: int) -> tuple[float, ...]:
    """By layer, the root of the mean square of the difference by that of the exact ones."""
    found = []
    for wanted, seen in zip(exact, blended, strict=True):
        one, other = wanted[:stop].to(torch.float32), seen[:stop].to(torch.float32)
        found.append(float((one - other).norm() / one.norm().clamp_min(1e-30)))
    return tuple(found)
