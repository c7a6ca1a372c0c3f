"""Two ranks that share a model's heads, each on a thread: they do the same, also where one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from benchmarks.blend_model import FOLDER, TransformersLayers, load_layers
from connector.blend.blender import Blender, RanksApart
from connector.blend.jobs import BlendJob, BlendReports
from connector.blend.recompute import Exchange, LayerStates
from kvstore.errors import Unavailable
from kvstore.model.layout import Span
from kvstore.runtime.deadline import Deadline
from kvstore.testing.waiting import eventually

BLOCK = 16
STEP = 45
"""Tokens that the engine computes in a step: the prompt's four layers take two of them."""
JOB = BlendJob(
    "a",
    cache_salt="blend:team",
    tokens=tuple(torch.randint(0, 80, (90,), generator=torch.Generator().manual_seed(3)).tolist()),
    spans=(Span(2, 26), Span(27, 51), Span(51, 81)),
    block_ids=tuple(range(100, 105)),
    start_tokens=0,
    stop_tokens=80,
    is_audited=True,
)
WAIT_S = 20.0


class Meeting:
    """Where ranks exchange tensors: all of them must come, with the same kind and shape."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._barrier = Barrier(num_ranks, timeout=WAIT_S)
        self._parts: list[Any] = [None] * num_ranks

    def sum(self, rank: int, kind: str, part: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = kind, part
        self._barrier.wait()
        kinds = {(one, tuple(tensor.shape)) for one, tensor in self._parts}
        total = torch.stack([tensor for _, tensor in self._parts]).sum(0) if len(kinds) == 1 else None
        self._barrier.wait()
        assert total is not None, f"the ranks are apart: {kinds}"
        return total


class Rank(TransformersLayers):
    """One rank's heads of a model.

    Attributes:
        steps: What the model was asked, as far as it can fail here.
        fails_at: The one of `steps` that fails; `None`: none.
        blocks: What was written, by block.
    """

    num_exchanges = 0

    def __init__(self, model: object, rank: int, meeting: Meeting) -> None:
        super().__init__(model)
        self._rank, self._meeting = rank, meeting
        self.steps: list[str] = []
        self.fails_at: int | None = None
        self.blocks: dict[int, torch.Tensor] = {}

    @property
    def num_ranks(self) -> int:
        return self._meeting.num_ranks

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        self._note("embed")
        return self._sum("hidden", super().embed(tokens) / self.num_ranks)

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._note("project")
        queries, keys, values = (
            one.chunk(self.num_ranks, 1)[self._rank] for one in super().project(layer, hidden, positions)
        )
        return queries, keys, values

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self._note("attend")
        return super().attend(layer, queries, keys, values)

    def angles(self, positions: torch.Tensor) -> Any:
        self._note("angles")
        return super().angles(positions)

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        module = self._decoder.layers[layer]
        self._note("o_proj")
        weight = module.self_attn.o_proj.weight.chunk(self.num_ranks, 1)[self._rank]
        hidden = hidden + self._sum("hidden", linear(attended.reshape(len(hidden), -1), weight))
        self._note("mlp")
        return hidden + self._sum("hidden", module.mlp(module.post_attention_layernorm(hidden)) / self.num_ranks)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._note("logits")
        return self._sum("logits", super().logits(hidden) / self.num_ranks)

    def sum_over_ranks(self, part: torch.Tensor) -> torch.Tensor:
        return self._sum("differences", part)

    def follow(self, exchanges: Sequence[Exchange]) -> None:
        sizes = {"hidden": self.model.config.hidden_size, "logits": self.model.config.vocab_size}
        for exchange in exchanges:
            size = (sizes[exchange.kind],) if exchange.kind in sizes else ()
            self._sum(exchange.kind, torch.zeros(exchange.num_tokens, *size))

    def write(self, states: LayerStates, start: int, stop: int, block_ids: Sequence[int], block_tokens: int) -> None:
        self._note("write")
        for at in range(start, stop, block_tokens):
            self.blocks[block_ids[at // block_tokens]] = states.values[-1][at : at + block_tokens].clone()

    def _sum(self, kind: str, part: torch.Tensor) -> torch.Tensor:
        total = self._meeting.sum(self._rank, kind, part)
        self.num_exchanges += 1
        return total

    def _note(self, step: str) -> None:
        self.steps.append(step)
        if self.fails_at == len(self.steps) - 1:
            raise RuntimeError(f"no {step}")


@dataclass
class Shelf:
    """A rank's documents in the store."""

    documents: dict[tuple[int, ...], LayerStates] = field(default_factory=dict)
    written: list[tuple[tuple[int, ...], LayerStates]] = field(default_factory=list)
    error: Exception | None = None
    slow_s: float = 0.0
    timeout_s: float = WAIT_S
    num_reads: int = 0

    def read(self, root: bytes, tokens: Sequence[int], deadline: Deadline) -> LayerStates | None:
        self.num_reads += 1
        self._wait(deadline)
        if self.error is not None:
            raise self.error
        return self.documents.get(tuple(tokens))

    def write(self, root: bytes, tokens: Sequence[int], document: LayerStates, deadline: Deadline) -> None:
        self._wait(deadline)
        self.documents[tuple(tokens)] = document
        self.written.append((tuple(tokens), document))

    def _wait(self, deadline: Deadline) -> None:
        """As a slow store: never past the deadline."""
        time.sleep(min(self.slow_s, deadline.remaining_s))
        if deadline.expired:
            raise Unavailable("too late")


@dataclass
class Engine:
    """The ranks of an engine."""

    ranks: list[Rank]
    shelves: list[Shelf]
    blenders: list[Blender]
    num_steps: int = 0

    def run(self, *jobs: BlendJob, ended: Sequence[str] = ()) -> BlendReports:
        """Step all ranks until jobs and their audits are reported: by all in the same step, and alike but for texts.

        Args:
            jobs: That come in the first step.
            ended: Those of them that end in the second one.
        """
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            told = [one.result() for one in [threads.submit(_step, each, jobs, ended) for each in self.blenders]]
        (self.num_steps,) = {num_steps for _, _, num_steps in told}
        failed, reports, _ = told[0]
        for also_failed, others, _ in told[1:]:
            assert also_failed == failed and others.audits == reports.audits
            for one, other in zip(reports.blended, others.blended, strict=True):
                assert one == other or (one.error and other.error)
        assert failed == {report.request_id for report in reports.blended if report.error}
        return reports

    def settle(self) -> None:
        """Until the threads of the blenders have stored all documents."""
        eventually(lambda: all(len(shelf.documents) >= len(JOB.spans) for shelf in self.shelves), WAIT_S)


def _step(blender: Blender, jobs: Sequence[BlendJob], ended: Sequence[str]) -> tuple[set[str], BlendReports, int]:
    finished: set[str] = set()
    not_blended: set[str] = set()
    reports, num_steps = BlendReports(), 0
    names, audited = {job.request_id for job in jobs}, {job.request_id for job in jobs if job.is_audited}
    with torch.inference_mode():
        while finished < names or len(reports.audits) < len(audited - not_blended):
            blender.work(jobs if num_steps == 0 else (), ended=ended if num_steps == 1 else (), may_wait=True)
            num_steps += 1
            done, failed = blender.take_results()
            finished |= done
            not_blended |= failed
            if (new := blender.take_reports()) is not None:
                reports = BlendReports(reports.blended + new.blended, reports.audits + new.audits)
    assert finished == names
    return not_blended, reports, num_steps


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    made: list[Blender] = []
    model = load_layers(FOLDER).model

    def engine(num_ranks: int, step_tokens: int = STEP) -> Engine:
        meeting = Meeting(num_ranks)
        ranks = [Rank(model, rank, meeting) for rank in range(num_ranks)]
        shelves = [Shelf() for _ in ranks]
        blenders = [
            Blender(rank, lambda shelf=shelf: shelf, ratio=0.3, block_tokens=BLOCK, step_tokens=step_tokens)  # type: ignore[misc]
            for rank, shelf in zip(ranks, shelves, strict=True)
        ]
        made.extend(blenders)
        return Engine(ranks, shelves, blenders)

    yield engine
    for one in made:
        one.close()


def test_two_ranks_do_what_one_does(engine_of: Callable[..., Engine]) -> None:
    """The same tokens are computed again, the same heads written, and the audit finds the same."""
    one, two = engine_of(1), engine_of(2)
    (alone,), (shared,) = one.run(JOB).audits, two.run(JOB).audits
    assert alone.kl is not None and shared.kl == pytest.approx(alone.kl, rel=1e-3)
    assert shared.key_differences == pytest.approx(alone.key_differences, abs=1e-5)
    assert shared.value_differences == pytest.approx(alone.value_differences, abs=1e-5)
    assert max(alone.value_differences) > 0.01
    for block, values in one.ranks[0].blocks.items():
        halves = torch.cat([rank.blocks[block] for rank in two.ranks], 1)
        assert torch.allclose(halves, values, atol=1e-4)


def test_a_long_prompt_takes_several_steps(engine_of: Callable[..., Engine]) -> None:
    """Each with some of its layers, so that other requests wait no longer than for the engine's own steps. What is
    written is the same.
    """
    whole, split = engine_of(2, 1000), engine_of(2, 10)
    for engine in (whole, split):
        engine.run(replace(JOB, is_audited=False))
    num_layers = whole.ranks[0].num_layers
    assert split.num_steps - whole.num_steps == (len(JOB.spans) + 1) * (num_layers - 1)
    for one, other in zip(whole.ranks, split.ranks, strict=True):
        assert one.blocks.keys() == other.blocks.keys()
        assert all(torch.equal(one.blocks[block], other.blocks[block]) for block in one.blocks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_anywhere(engine_of: Callable[..., Engine], rank: int) -> None:
    """Wherever one fails, both report it in the same step, nothing that they made is stored, and the next request is
    blended.
    """
    engine = engine_of(2)
    engine.run(JOB)
    engine.settle()
    right, documents = dict(engine.ranks[0].blocks), [dict(shelf.documents) for shelf in engine.shelves]
    num_steps = len(engine.ranks[rank].steps)
    for at in range(num_steps):
        engine.ranks[rank].steps.clear()
        engine.ranks[rank].fails_at = at
        for shelf in engine.shelves:
            shelf.documents.clear()
        reports = engine.run(JOB)
        (report,) = reports.blended
        if report.error:
            assert reports.audits == ()
        else:
            assert [audit.kl for audit in reports.audits] == [None]
    assert report.error == ""  # the last step is one of the audit
    for one in engine.ranks:
        one.fails_at = None
    reports = engine.run(replace(JOB, request_id="b"))
    assert reports.blended[0].error == "" and reports.audits[0].kl is not None
    assert all(torch.equal(engine.ranks[0].blocks[block], right[block]) for block in right)
    for shelf, wanted in zip(engine.shelves, documents, strict=True):
        for tokens, document in shelf.written:
            assert all(map(torch.equal, document.keys, wanted[tokens].keys))


@pytest.mark.parametrize("num_steps", [1, 2, 5, 8])
def test_a_rank_that_stops(engine_of: Callable[..., Engine], num_steps: int) -> None:
    """Other weights were loaded while documents are read, computed or audited, here on one rank: both ranks end what
    is left as failed, and that rank computes nothing more.
    """
    engine = engine_of(2)
    stopped = num_steps % 2

    def work(*jobs: BlendJob) -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda one: one.work(jobs, may_wait=True), engine.blenders))

    work(JOB)
    for _ in range(num_steps - 1):
        work()
    engine.blenders[stopped].stop("other weights")
    asked = len(engine.ranks[stopped].steps)
    work(replace(JOB, request_id="b"))
    for _ in range(3):
        work()
    assert len(engine.ranks[stopped].steps) == asked
    results = [one.take_results() for one in engine.blenders]
    assert results[0] == results[1] and results[0][0] == {"a", "b"} and "b" in results[0][1]
    for one in engine.blenders:
        reports = one.take_reports()
        assert reports is not None and reports.blended[-1].error
        assert [audit.kl for audit in reports.audits] == [None] * (results[0][1] == {"b"})


def test_a_document_that_a_rank_lacks_is_computed_on_all(engine_of: Callable[..., Engine]) -> None:
    """Also one whose store does not answer; a rank that reads slowly is waited for."""
    engine = engine_of(2)
    job = replace(JOB, is_audited=False)
    assert engine.run(job).blended[0].stored_documents == 0
    engine.settle()
    right = dict(engine.ranks[0].blocks)
    slow = engine.shelves[1]
    slow.slow_s = 0.03
    assert engine.run(job).blended[0].stored_documents == 3
    del slow.documents[job.tokens[job.spans[1].start : job.spans[1].stop]]
    assert engine.run(job).blended[0].stored_documents == 2
    engine.settle()
    slow.error = Unavailable("no answer")
    assert engine.run(job).blended[0].stored_documents == 0
    slow.error = RuntimeError("a mistake")
    assert engine.run(job).blended[0].error == "an error on another rank, whose log has it"
    slow.error = None
    assert engine.run(job).blended[0].stored_documents == 3
    assert all(torch.equal(engine.ranks[0].blocks[block], right[block]) for block in right)


def test_a_request_that_has_ended_is_given_up_on_all(engine_of: Callable[..., Engine]) -> None:
    """Those behind it are not held up, and nobody reads its documents; also one that has been begun."""
    engine = engine_of(2)
    jobs = [replace(JOB, request_id=name, is_audited=False) for name in "abcd"]
    reports = engine.run(*jobs, ended=("a", "c", "unknown"))
    assert {report.request_id: report.error for report in reports.blended} == {
        "a": "it has ended", "b": "", "c": "it has ended", "d": ""
    }  # fmt: skip
    for shelf in engine.shelves:
        assert shelf.num_reads == 3 * len(JOB.spans)


def test_a_slow_store_is_waited_for_once(engine_of: Callable[..., Engine]) -> None:
    """Not for each document anew. What was read by then is used."""
    engine = engine_of(2)
    job = replace(JOB, is_audited=False)
    engine.run(job)
    engine.settle()
    slow = engine.shelves[1]
    slow.timeout_s, slow.slow_s = 0.5, 0.35
    assert engine.run(job).blended[0].stored_documents == 1
    slow.slow_s = 10.0
    begun_s = time.monotonic()
    assert engine.run(job).blended[0].stored_documents == 0
    assert time.monotonic() - begun_s < 3 * slow.timeout_s


def test_documents_wait_for_a_slow_store_in_memory_for_a_time(engine_of: Callable[..., Engine]) -> None:
    """Those that were not stored by then are dropped: else a store that is always slow would fill the memory."""
    engine = engine_of(1)
    (shelf,) = engine.shelves
    shelf.timeout_s, shelf.slow_s = 0.3, 0.29
    engine.run(replace(JOB, is_audited=False))
    time.sleep(3 * shelf.timeout_s)
    assert len(shelf.written) < len(JOB.spans)


def test_documents_of_few_requests_are_in_memory(engine_of: Callable[..., Engine]) -> None:
    """Many that wait are read when their turn comes."""
    engine = engine_of(1)
    (blender,), (shelf,) = engine.blenders, engine.shelves
    jobs = [replace(JOB, request_id=str(number), is_audited=False) for number in range(5)]
    with torch.inference_mode():
        blender.work(jobs, may_wait=False)
    time.sleep(0.2)
    assert shelf.num_reads == 2 * len(JOB.spans)
    blender.work((), ended=[job.request_id for job in jobs], may_wait=False)


def test_a_rank_that_cannot_exchange_ends_its_engine(engine_of: Callable[..., Engine]) -> None:
    """It is no `Exception`, which a hook's guard would catch: the rank's next forward would sum what is not its own."""
    engine = engine_of(2)
    engine.ranks[1].sum_over_ranks = lambda part: 1 / 0  # type: ignore[assignment]
    with pytest.raises(RanksApart), torch.inference_mode():
        engine.blenders[1].work((JOB,), may_wait=True)
