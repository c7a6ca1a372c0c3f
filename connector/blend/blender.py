"""The rank's side: reads documents on a thread of its own, and blends on the engine's thread, one piece a step.

The ranks of a tensor-parallel engine do the same pieces in the same steps, since the model's modules wait for all of
them. What a rank alone knows is summed over all before anything follows from it: whether its documents were read, and
whether a piece failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt
from typing import Protocol, TypeVar

import torch

from connector.blend.documents import DocumentStore, document_root
from connector.blend.jobs import BlendAudit, BlendJob, BlendReport, BlendReports
from connector.blend.recompute import (
    Blended,
    Exchange,
    LayeredModel,
    LayerStates,
    behind,
    blend_by_layer,
    document_of,
    exchanges_of_blend,
    exchanges_of_extend,
    extend,
)
from connector.logs import LOG
from kvstore.api import Deadline
from kvstore.errors import InternalError, KVStoreError
from kvstore.model.layout import Span

Made = TypeVar("Made")


_AUDIT_TOKENS = 256
"""Tokens of an audit that are computed in a step, so that other requests wait little for it."""
_READ_AHEAD = 2
"""Requests whose documents are read, the one that is blended among them: documents take memory until then."""
_WAIT_S = 0.005


class RanksApart(BaseException):
    """This rank can no longer do what the others do. Not an `Exception`: as with an error in vLLM's own forward the
    engine must end, since the ranks would wait for each other or sum what does not belong together.
    """


class _Failed(Exception):
    """A piece failed, on this rank or on another one: all of them raise this.

    Args:
        error: On this rank; `None`: on another one.
    """

    def __init__(self, error: Exception | None) -> None:
        seen = "an error on another rank, whose log has it" if error is None else f"{type(error).__name__}: {error}"
        super().__init__(seen)


class EngineModel(LayeredModel, Protocol):
    """The engine's model, which also writes into blocks.

    Attributes:
        num_exchanges: The exchanges with other ranks that this rank has come through.
    """

    num_exchanges: int

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""

    def follow(self, exchanges: Sequence[Exchange]) -> None:
        """Take part with zeros, where this rank has nothing to exchange."""

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


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is being blended.

    Attributes:
        spans: Its documents, as far as they are blended.
        reading: What this rank finds in the store; `None`: too many others come before it.
        documents: Once all ranks have read; those that a rank has not found are computed on all.
        layers: What is computed now, a document or the prompt, behind its first layers; `None`: neither was begun.
        exchanges: Of the layers that are left.
    """

    job: BlendJob
    spans: list[Span]
    reading: Future[list[LayerStates | None]] | None = None
    documents: list[LayerStates | None] = field(default_factory=list)
    num_stored: int = 0
    layers: Iterator[Blended | None] | None = None
    exchanges: list[list[Exchange]] = field(default_factory=list)


@dataclass(slots=True)
class _Audit:
    """A blended prompt that is also computed in full, some tokens a step.

    Attributes:
        exact: Keys and values of the prompt, computed in full.
        blended: The same as blended, and behind that as computed over it.
        left: What is not computed yet, in order: which of the two, from which token, up to which.
        ends: Of both, once computed, the logarithms of the next token's probabilities.
        is_due: It continues before the next request is blended. Else a busy engine would never finish it.
    """

    job: BlendJob
    exact: LayerStates
    blended: LayerStates
    left: deque[tuple[LayerStates, int, int]] = field(default_factory=deque)
    ends: list[torch.Tensor] = field(default_factory=list)
    is_due: bool = False

    @classmethod
    def of(cls, job: BlendJob, states: LayerStates) -> _Audit:
        """The audit of a prompt, of whose blended tokens these are the keys and values."""
        end = len(job.tokens)
        audit = cls(job, _longer(states, end), _longer(states, end))
        for part, first in ((audit.exact, 0), (audit.blended, job.stop_tokens)):
            audit.left += [(part, at, min(end, at + _AUDIT_TOKENS)) for at in range(first, end, _AUDIT_TOKENS)]
        return audit


class Blender:
    """Blends what the scheduler side orders. Belongs to the engine's thread.

    Args:
        model: The engine's.
        store: Its documents; `None` while the namespace is not open, or cannot be: then documents are computed alone.
        ratio: Share of documents' tokens that are computed again.
        block_tokens: Tokens of a block.
        step_tokens: Tokens that the engine computes in a step. A longer document or prompt takes several steps, each
            with some of the layers.
    """

    def __init__(
        self,
        model: EngineModel,
        store: Callable[[], DocumentStore | None],
        *,
        ratio: float,
        block_tokens: int,
        step_tokens: int,
    ) -> None:
        self._model = model
        self._store = store
        self._ratio = ratio
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-blend")
        self._open = deque[_Open]()
        self._audit: _Audit | None = None
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._blended: list[BlendReport] = []
        self._audits: list[BlendAudit] = []
        self._stopped = ""

    # ---- steps

    def stop(self, reason: str) -> None:
        """Blend nothing any more, since the documents are not of the model's weights: what was ordered fails."""
        self._stopped = reason

    def work(self, jobs: Sequence[BlendJob], *, ended: Sequence[str] = (), may_wait: bool) -> None:
        """Begin new jobs, and do one piece of what is ready: layers of a document alone or of a prompt, or a part of an
        audit.

        Args:
            jobs: Of this step.
            ended: Requests that have ended before they were blended.
            may_wait: The step may wait a little for the store.
        """
        self._open += [_Open(job, [span for span in job.spans if span.start < job.stop_tokens]) for job in jobs]
        self._drop(ended)
        for opened in islice(self._open, _READ_AHEAD):
            self._begin(opened)
        if not self._open or (self._audit is not None and self._audit.is_due):
            self._go_on_with_audit()
            return
        current = self._open[0]  # in the order of their coming
        try:
            if current.documents or self._agree_on_documents(current, waits=may_wait and self._audit is None):
                self._advance(current)
            else:
                self._go_on_with_audit()
        except Exception as error:  # noqa: BLE001 - vLLM waits for each of these requests, so each is reported
            failure = self._known_to_all(error)
            LOG.warning(
                "kvstore: a request could not be blended and is computed request=%s: %s",
                current.job.request_id,
                failure,
                exc_info=error.__cause__ or error,
            )
            self._end(current, BlendReport(current.job.request_id, error=str(failure)))

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

    def _drop(self, ended: Sequence[str]) -> None:
        """Give up requests that wait. vLLM keeps their blocks until they are reported."""
        for opened in [one for one in self._open if one.job.request_id in ended]:
            if opened.reading is not None:
                opened.reading.cancel()
            self._end(opened, BlendReport(opened.job.request_id, error="it has ended"))

    def _begin(self, opened: _Open) -> None:
        """Begin to read a request's documents, unless that was begun before."""
        if opened.reading is not None:
            return
        try:
            opened.reading = self._thread.submit(self._read, opened.job, opened.spans)
        except RuntimeError as error:  # the engine ends
            opened.reading = Future()
            opened.reading.set_exception(error)

    def _read(self, job: BlendJob, spans: Sequence[Span]) -> list[LayerStates | None]:
        """The documents that are stored. On the blender's thread."""
        store, root = None if self._stopped else self._store(), _root_of(job)
        found: list[LayerStates | None] = []
        if store is not None:
            deadline = Deadline.after(store.timeout_s)  # of all of them: computing them takes no longer for waiting
            try:
                for span in spans:
                    found.append(store.read(root, job.tokens[span.start : span.stop], deadline))
            except KVStoreError as error:
                LOG.warning("kvstore: a document cannot be read and is computed: %s", error)
        return found + [None] * (len(spans) - len(found))  # nor can those behind one that cannot be read

    def _agree_on_documents(self, current: _Open, *, waits: bool) -> bool:
        """Note the documents that all ranks have found. False: a rank still reads.

        Raises:
            _Failed: A rank cannot read.
        """
        reading = current.reading
        assert reading is not None
        if waits:
            wait((reading,), _WAIT_S)
        found: list[LayerStates | None] = [None] * len(current.spans)
        is_reading, error = not reading.done() and not self._stopped, None
        if not is_reading:
            try:
                self._refuse_if_stopped()
                found = reading.result()
            except Exception as caught:  # noqa: BLE001 - the other ranks wait for this one's word
                error = caught
        still_reading, failed, *missing = self._sum_over_ranks(
            [is_reading, error is not None, *(document is None for document in found)]
        )
        if failed:
            raise _Failed(error) from error
        if still_reading:
            return False
        current.documents = [None if lacks else document for lacks, document in zip(missing, found, strict=True)]
        current.num_stored = missing.count(0)
        return True

    def _advance(self, current: _Open) -> None:
        job, model = current.job, self._model
        missing = next((at for at, document in enumerate(current.documents) if document is None), None)
        if missing is not None:
            span = current.spans[missing]
            part = job.tokens[span.start : span.stop]
            document = self._next_layers(
                current,
                exchanges_of_blend(model.num_layers, 1 + span.num_tokens, (), 1.0),
                1 + span.num_tokens,
                lambda: blend_by_layer(model, behind(job.tokens[0], torch.tensor(part)), (), ratio=1.0),
                lambda made: _finite(document_of(made)),
            )
            if document is None:
                return
            current.documents[missing] = document
            if (store := self._store()) is not None:
                # from now on, so that a slow store lets few documents wait in memory
                deadline = Deadline.after(store.timeout_s)
                with suppress(RuntimeError):  # the engine ends
                    self._thread.submit(self._write, store, _root_of(job), part, document, deadline)
            return
        spans = [Span(span.start, min(span.stop, job.stop_tokens)) for span in current.spans]
        done = self._next_layers(
            current,
            exchanges_of_blend(model.num_layers, job.stop_tokens, spans, self._ratio),
            job.stop_tokens,
            lambda: self._blend(job, spans, current.documents),
            lambda made: (made, self._write_blocks(job, made)),
        )
        if done is None:
            return
        made, audit = done
        self._end(current, BlendReport(job.request_id, job.stop_tokens, len(made.rows), len(spans), current.num_stored))
        if audit is not None:
            self._audit = audit
        elif job.is_audited:
            self._audits.append(BlendAudit(job.request_id, None))

    def _next_layers(
        self,
        current: _Open,
        exchanges: list[list[Exchange]],
        num_tokens: int,
        begin: Callable[[], Iterator[Blended | None]],
        end: Callable[[Blended], Made],
    ) -> Made | None:
        """Compute as many layers of a document or a prompt as take about as long as a step of the engine, at least one.

        Args:
            current: The request.
            exchanges: Of all layers.
            num_tokens: Of the document or prompt.
            begin: Begins them.
            end: What is done behind the last layer, whose result is returned; `None`: it was not the last one.
        """
        if not current.exchanges:
            current.layers, current.exchanges = None, exchanges
        count = max(1, len(exchanges) * self._step_tokens // num_tokens)
        now, current.exchanges = current.exchanges[:count], current.exchanges[count:]

        def compute() -> Made | None:
            current.layers = layers = current.layers or begin()
            *_, made = islice(layers, count)
            return None if made is None else end(made)

        return self._together([one for layer in now for one in layer], compute)

    def _blend(
        self, job: BlendJob, spans: Sequence[Span], documents: Sequence[LayerStates | None]
    ) -> Iterator[Blended | None]:
        placed = [
            (span, document.rows(0, span.num_tokens))
            for span, document in zip(spans, documents, strict=True)
            if document is not None
        ]
        return blend_by_layer(self._model, torch.tensor(job.tokens[: job.stop_tokens]), placed, ratio=self._ratio)

    def _write_blocks(self, job: BlendJob, made: Blended) -> _Audit | None:
        self._model.write(made.states, job.start_tokens, job.stop_tokens, job.block_ids, self._block_tokens)
        if not job.is_audited or self._audit is not None:  # each holds the keys and values of a prompt twice
            return None
        return _Audit.of(job, made.states)

    def _write(
        self, store: DocumentStore, root: bytes, tokens: Sequence[int], document: LayerStates, deadline: Deadline
    ) -> None:
        try:
            store.write(root, tokens, document, deadline)
        except KVStoreError as error:
            LOG.warning("kvstore: a document was computed and not stored: %s", error)
        except Exception:
            LOG.exception("kvstore: a document was computed and not stored")
            raise

    def _end(self, current: _Open, report: BlendReport) -> None:
        self._open.remove(current)
        if self._audit is not None:
            self._audit.is_due = True
        self._finished.add(report.request_id)
        if report.error:
            self._failed.add(report.request_id)
        self._blended.append(report)

    # ---- audits

    def _go_on_with_audit(self) -> None:
        audit = self._audit
        if audit is None:
            return
        audit.is_due = False
        states, start, stop = audit.left.popleft()
        is_end = stop == len(audit.job.tokens)
        exchanges = exchanges_of_extend(self._model.num_layers, stop - start, wants_hidden=is_end)
        if is_end:
            exchanges.append(Exchange("logits"))
        try:
            compared = self._together(exchanges, lambda: self._extend(audit, states, start, stop))
            if compared is None:
                return
            kl, squares = compared
            report = BlendAudit(audit.job.request_id, kl, *_differences(self._sum_over_ranks(squares)))
        except Exception as error:  # noqa: BLE001 - and for each audit
            failure = self._known_to_all(error)
            LOG.warning("kvstore: a blended request could not be audited: %s", failure, exc_info=failure.__cause__)
            report = BlendAudit(audit.job.request_id, None)
        self._audit = None
        self._audits.append(report)

    def _extend(self, audit: _Audit, states: LayerStates, start: int, stop: int) -> tuple[float, list[float]] | None:
        """Compute a part of an audit. Behind the last one: the difference of the next token's distribution, and the
        sums of squares that `_differences` wants, of this rank's heads.
        """
        tokens = torch.tensor(audit.job.tokens[start:stop])
        hidden = extend(self._model, states, tokens, start, wants_hidden=stop == len(audit.job.tokens))
        if hidden is not None:
            audit.ends.append(self._model.logits(hidden[-1:])[0].to(torch.float32).log_softmax(-1))
        if audit.left:
            return None
        wanted, seen = audit.ends
        return divergence(wanted, seen), _squares(audit.exact, audit.blended, audit.job.stop_tokens)

    # ---- ranks

    def _together(self, exchanges: Sequence[Exchange], piece: Callable[[], Made]) -> Made:
        """Do a piece of work on all ranks. One on which it fails takes part in the exchanges that are left, so that the
        others come through theirs, and none of them uses what they made.

        Args:
            exchanges: All those of the piece, in order.
            piece: May raise anything.

        Raises:
            _Failed: It failed on a rank.
        """
        error: Exception | None = None
        before = self._model.num_exchanges
        try:
            self._refuse_if_stopped()
            made = piece()
        except Exception as caught:  # noqa: BLE001 - vLLM waits for each of these requests, so each is reported
            error = caught
            left = exchanges[self._model.num_exchanges - before :]
            self._or_apart(lambda: self._model.follow(left))
        if any(self._sum_over_ranks([error is not None])):
            raise _Failed(error) from error
        return made

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise InternalError(self._stopped)

    def _known_to_all(self, error: Exception) -> _Failed:
        """An error, as one that all ranks have.

        Raises:
            RanksApart: The others do not have it.
        """
        if isinstance(error, _Failed):
            return error
        if self._model.num_ranks > 1:
            raise RanksApart("an error that the other ranks know nothing of") from error
        failure = _Failed(error)
        failure.__cause__ = error
        return failure

    def _sum_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        part = torch.tensor(numbers, dtype=torch.float64)
        return self._or_apart(lambda: self._model.sum_over_ranks(part)).tolist()

    def _or_apart(self, exchange: Callable[[], Made]) -> Made:
        try:
            return exchange()
        except Exception as error:
            raise RanksApart("an exchange between ranks failed") from error


def _root_of(job: BlendJob) -> bytes:
    return document_root(job.cache_salt, job.tokens[0])


def _finite(document: LayerStates) -> LayerStates:
    """The document.

    Raises:
        InternalError: It has values that are no numbers, as after an overflow, which would be stored for all others.
    """
    if not all(part.isfinite().all() for part in (*document.keys, *document.values)):
        raise InternalError("a document has keys or values that are not finite")
    return document


def divergence(wanted: torch.Tensor, seen: torch.Tensor) -> float:
    """The KL divergence of two rows of logarithms of probabilities, in nats. No number, if one of them has none."""
    terms = torch.where(wanted.isneginf(), 0.0, wanted.exp() * (wanted - seen))
    kl = float(terms.sum())
    return 0.0 if kl < 0 else kl  # `max` would make 0 of no number, and the gate would stay open


def _longer(states: LayerStates, num_tokens: int) -> LayerStates:
    """A copy with room for more tokens."""

    def longer(part: torch.Tensor) -> torch.Tensor:
        return torch.cat((part, part.new_zeros(num_tokens - len(part), *part.shape[1:])))

    return LayerStates([longer(one) for one in states.keys], [longer(one) for one in states.values])


def _squares(exact: LayerStates, blended: LayerStates, stop: int) -> list[float]:
    """By layer, first of keys, then of values: the squares of the difference, summed, and those of the exact ones."""
    found: list[float] = []
    for wanted, seen in zip([*exact.keys, *exact.values], [*blended.keys, *blended.values], strict=True):
        one, other = wanted[:stop].to(torch.float32), seen[:stop].to(torch.float32)
        found += [float((one - other).square().sum()), float(one.square().sum())]
    return found


def _differences(squares: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of keys and of values by layer, the root of the mean square of the difference by that of the exact ones."""
    found = tuple(sqrt(one / max(of, 1e-60)) for one, of in zip(squares[::2], squares[1::2], strict=True))
    return found[: len(found) // 2], found[len(found) // 2 :]
