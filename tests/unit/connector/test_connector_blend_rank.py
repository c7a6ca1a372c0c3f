"""The rank's side over a real service: documents are stored once, requests are reported once, audits tell the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.blend_model import FOLDER, TransformersLayers, blend, compute_document, load_layers
from benchmarks.blend_task import NO_LABEL, draw
from connector.blend.blender import Blender, divergence
from connector.blend.documents import PAGE_TOKENS, DocumentStore, describe_documents, document_root, page_keys
from connector.blend.jobs import BlendAudit, BlendJob, BlendReport
from connector.blend.recompute import Exchange, LayerStates
from connector.facts import CellFacts
from connector.identity import describe_namespace
from kvstore.client import BlockingStore
from kvstore.errors import Unavailable
from kvstore.model.layout import Span
from kvstore.testing.serve import IN_MEMORY, Service
from kvstore.testing.waiting import eventually, soon
from tests.unit.connector.support import make_facts, make_shape

BLOCK = 16
SALT = "blend:team"
ROOT = document_root(SALT, 1)
CELLS = CellFacts(rank_heads=4, total_heads=4, head_size=32, head_size_v=32, element_bytes=4, dtype="float32")
PLAIN = make_facts(architecture="LlamaForCausalLM")
GROUP = replace(PLAIN.groups[0], stages=(tuple(f"layer.{at}" for at in range(4)),), content=CELLS)
FACTS = replace(PLAIN, groups=(GROUP,))


class Written(TransformersLayers):
    """A model whose blocks are a list of what was written, by block."""

    def __init__(self, model: object) -> None:
        super().__init__(model)
        self.blocks: dict[int, torch.Tensor] = {}
        self.fails = False
        self.num_exchanges = 0

    num_ranks = 1

    def follow(self, exchanges: Sequence[Exchange]) -> None:
        """There is no other rank."""

    def write(self, states: LayerStates, start: int, stop: int, block_ids: Sequence[int], block_tokens: int) -> None:
        if self.fails:
            raise RuntimeError("no blocks")
        for at in range(start, stop, block_tokens):
            self.blocks[block_ids[at // block_tokens]] = states.keys[-1][at : at + block_tokens].clone()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> Written:
    return Written(load_layers(FOLDER).model)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockingStore]:
    with Service(tmp_path, IN_MEMORY) as service, BlockingStore(service.url) as made:
        yield made


@pytest.fixture
def documents(store: BlockingStore) -> DocumentStore:
    return DocumentStore(store, FACTS, "w", torch.float32, timeout_s=10.0)


@pytest.fixture
def make(model: Written) -> Iterator[Callable[..., Blender]]:
    made: list[Blender] = []

    def blender(documents: DocumentStore | None, ratio: float = 0.3) -> Blender:
        made.append(Blender(model, lambda: documents, ratio=ratio, block_tokens=BLOCK, step_tokens=4096))
        return made[-1]

    yield blender
    for one in made:
        one.close()


def job_of(seed: int, name: str, *, start: int = 0, is_audited: bool = False) -> BlendJob:
    batch = draw(np.random.default_rng(seed), 1, questions=1)
    last = int(np.flatnonzero(batch.labels[0] != NO_LABEL)[-1])
    size = batch.document_tokens
    spans = tuple(Span(1 + size * at, 1 + size * (at + 1)) for at in range(batch.num_documents))
    stop = spans[-1].stop // BLOCK * BLOCK
    tokens = tuple(int(token) for token in batch.tokens[0, : last + 1])
    return BlendJob(name, tokens, SALT, spans, tuple(range(100, 100 + stop // BLOCK)), start, stop, is_audited)


def run(blender: Blender, *jobs: BlendJob) -> tuple[list[BlendReport], list[BlendAudit]]:
    """Step until each job is reported, and each audit that was ordered."""
    blended: list[BlendReport] = []
    audits: list[BlendAudit] = []
    finished: list[str] = []
    not_blended: set[str] = set()
    ends_s = time.monotonic() + 60
    todo: Sequence[BlendJob] = jobs
    with torch.inference_mode():
        while len(blended) < len(jobs) or len(audits) < sum(job.is_audited for job in jobs):
            assert time.monotonic() < ends_s
            blender.work(todo, may_wait=True)
            todo = ()
            done, failed = blender.take_results()
            assert failed <= done
            finished += done
            not_blended |= failed
            if (reports := blender.take_reports()) is not None:
                blended += reports.blended
                audits += reports.audits
    assert sorted(finished) == sorted(job.request_id for job in jobs)
    assert not_blended == {report.request_id for report in blended if report.error}  # vLLM computes these
    return blended, audits


def test_documents_come_back(documents: DocumentStore, model: Written) -> None:
    """What is read is what was stored, of one page and of several; behind another first token there is nothing."""
    random = np.random.default_rng(1)
    with torch.inference_mode():
        for size in (5, PAGE_TOKENS, PAGE_TOKENS + 7):
            tokens = random.integers(0, 80, size).tolist()
            assert documents.read(ROOT, tokens, soon()) is None
            made = compute_document(model, 1, torch.tensor(tokens))
            documents.write(ROOT, tokens, made, soon())
            found = documents.read(ROOT, tokens, soon())
            assert found is not None
            for one, other in zip([*made.keys, *made.values], [*found.keys, *found.values], strict=True):
                assert torch.equal(one, other)
            with pytest.raises(Unavailable):
                documents.read(ROOT, tokens, soon(0.0))
            assert documents.read(document_root(SALT, 2), tokens, soon()) is None
            assert documents.read(ROOT, [*tokens[:-1], tokens[-1] + 1], soon()) is None


def heads_of(states: LayerStates, rank: int) -> LayerStates:
    """Those of one of two ranks."""
    return LayerStates(*([one.chunk(2, 1)[rank] for one in part] for part in (states.keys, states.values)))


def test_all_sizes_share_documents(store: BlockingStore, model: Written) -> None:
    """What two ranks stored one rank reads, and the reverse; what one of two has stored nobody reads."""
    tokens = np.random.default_rng(1).integers(0, 80, PAGE_TOKENS + 7).tolist()
    halves = replace(FACTS, groups=(replace(GROUP, content=replace(CELLS, rank_heads=2)),), tp_size=2)
    whole, *ranks = (
        DocumentStore(store, facts, "w", torch.float32, timeout_s=10.0)
        for facts in (FACTS, halves, replace(halves, tp_rank=1))
    )
    with torch.inference_mode():
        for first in (1, 2):
            root = document_root(SALT, first)
            made = compute_document(model, first, torch.tensor(tokens))
            shares = [heads_of(made, rank) for rank in range(2)]
            if first == 1:
                for rank, share in zip(ranks, shares, strict=True):
                    assert [one.read(root, tokens, soon()) for one in (whole, *ranks)] == [None] * 3
                    rank.write(root, tokens, share, soon())
            else:
                whole.write(root, tokens, made, soon())
            for reader, wanted in zip((whole, *ranks), (made, *shares), strict=True):
                found = reader.read(root, tokens, soon())
                assert found is not None
                assert all(map(torch.equal, found.keys, wanted.keys))
                assert all(map(torch.equal, found.values, wanted.values))


def test_names_of_pages() -> None:
    """By all tokens up to a page's end, the first token and the salt: equal beginnings share pages."""
    tokens = list(range(PAGE_TOKENS + 10))
    one, other = page_keys(ROOT, tokens), page_keys(ROOT, [*tokens, 5])
    assert len(one) == 2 and one[0] == other[0] and one[1] != other[1]
    assert page_keys(ROOT, tokens[:PAGE_TOKENS]) == one[:1]
    roots = [(SALT, 2), ("blend:other", 1), (SALT + "\1", 0), ("", 1)]
    assert len({one[0], *(page_keys(document_root(*root), tokens)[0] for root in roots)}) == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_document_with_no_numbers_is_not_stored(
    documents: DocumentStore, model: Written, make: Callable[..., Blender], bad: float
) -> None:
    """An overflow in it: its request is computed, and nobody else ever gets it."""
    job = job_of(1, "a")
    project = model.project

    def overflow(layer: int, *rest: Any) -> Any:
        queries, keys, values = project(layer, *rest)
        if layer == 1:
            values[-1] = bad
        return queries, keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "project", overflow)
        (report,), _ = run(make(documents), job)
    assert "not finite" in report.error and not model.blocks
    (report,), _ = run(make(documents), replace(job, request_id="b"))
    assert (report.error, report.stored_documents) == ("", 0)


def test_a_difference_that_is_no_number_is_not_zero() -> None:
    """Else the gate would never learn of it. Words that neither distribution allows are equal in both."""
    row = torch.tensor([0.5, 0.5, 0.0]).log()
    assert divergence(row, row) == 0.0
    assert divergence(row, torch.tensor([0.25, 0.75, 0.0]).log()) == pytest.approx(0.1438, abs=1e-3)
    assert divergence(row, torch.tensor([1.0, 0.0, 0.0]).log()) == float("inf")
    assert isnan(divergence(row, row * float("nan")))
    assert isnan(divergence(row * float("nan"), row))


def test_the_namespace_is_no_prefixes() -> None:
    """No page of a prefix can have the name of a document's page; another model's documents neither."""
    description = describe_documents(FACTS, "w")
    assert description.id != describe_namespace(FACTS, make_shape(FACTS), "w").id
    assert description.id != describe_documents(FACTS, "other").id
    narrow = replace(FACTS, groups=(replace(GROUP, content=replace(CELLS, dtype="bfloat16")),))
    assert description.id != describe_documents(narrow, "w").id


def test_a_request_is_blended_and_its_documents_stored(
    documents: DocumentStore, model: Written, make: Callable[..., Blender]
) -> None:
    """At first all documents are computed alone, then all are read; blocks hold what `blend` makes of them."""
    job = job_of(1, "a", start=2 * BLOCK)
    (report,), _ = run(make(documents), job)
    assert (report.documents, report.stored_documents, report.error) == (7, 0, "")
    assert sorted(model.blocks) == list(job.block_ids[2:])
    first = {block: keys.clone() for block, keys in model.blocks.items()}
    with torch.inference_mode():
        whole = torch.tensor(job.tokens[: job.stop_tokens])
        parts = [
            (span, compute_document(model, 1, torch.tensor(job.tokens[span.start : span.stop]))) for span in job.spans
        ]
        cut = parts[-1][0], parts[-1][1]
        room = job.stop_tokens - cut[0].start
        parts[-1] = Span(cut[0].start, job.stop_tokens), cut[1].rows(0, room)
        wanted = blend(model, whole, parts, ratio=0.3)
    assert report.recomputed_tokens == len(wanted.rows)
    assert torch.equal(first[job.block_ids[3]], wanted.states.keys[-1][3 * BLOCK : 4 * BLOCK])
    model.blocks.clear()
    last = job.tokens[job.spans[-1].start : job.spans[-1].stop]
    eventually(lambda: documents.read(ROOT, last, soon()) is not None)  # it is stored in the background
    (report,), _ = run(make(documents), replace(job, request_id="b"))
    assert report.stored_documents == 7
    for block, keys in first.items():
        assert torch.equal(model.blocks[block], keys)


def test_without_a_store_documents_are_computed(make: Callable[..., Blender]) -> None:
    """As while the weights are digested: the answer is the same."""
    (report,), _ = run(make(None), job_of(1, "a"))
    assert (report.stored_documents, report.error) == (0, "")


def test_an_error_is_reported_once(make: Callable[..., Blender], model: Written) -> None:
    """A request that cannot be blended fails, and the next one is blended."""
    blender = make(None)
    model.fails = True
    (report,), _ = run(blender, job_of(1, "a"))
    assert report.error == "RuntimeError: no blocks"
    model.fails = False
    (report,), _ = run(blender, job_of(2, "b"))
    assert report.error == ""


def test_a_job_that_comes_after_the_end_is_reported(make: Callable[..., Blender]) -> None:
    """vLLM waits for every request that was ordered."""
    blender = make(None)
    blender.close()
    (report,), _ = run(blender, job_of(1, "a"))
    assert report.error


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0.02, 20.0), (1.0, 0.0, 1e-6)])
def test_audits_tell_the_difference(make: Callable[..., Blender], ratio: float, least: float, most: float) -> None:
    """None where all is computed again; of a blended prompt that of its next token, and of each layer."""
    blender = make(None, ratio)
    _, audits = run(blender, *(job_of(seed, str(seed)) for seed in range(3)), job_of(9, "a", is_audited=True))
    (audit,) = audits
    assert audit.kl is not None and least <= audit.kl <= most
    assert len(audit.key_differences) == len(audit.value_differences) == 4
    # the first two layers are computed for all tokens, and so are keys of the third
    assert max(audit.key_differences[:3]) < 1e-5
    assert (audit.key_differences[3] > 0.01) == (ratio == 0.0)


def test_one_audit_at_a_time(make: Callable[..., Blender]) -> None:
    """Each holds a prompt's keys and values twice, so a second one is given up, and said to be."""
    jobs = [job_of(seed, str(seed), is_audited=True) for seed in range(3)]
    _, audits = run(make(None), *jobs)
    assert sorted(audit.kl is None for audit in audits) == [False, True, True]


def test_audits_go_on_between_requests(make: Callable[..., Blender]) -> None:
    """Else an engine that always has requests to blend would judge none of them, and never turn blending off."""
    blender = make(None)
    jobs = [job_of(seed, str(seed), is_audited=seed == 0) for seed in range(8)]
    num_blended = 0
    with torch.inference_mode():
        blender.work(jobs, may_wait=False)
        while (reports := blender.take_reports()) is None or not reports.audits:
            num_blended += len(reports.blended) if reports is not None else 0
            assert num_blended < len(jobs)
            blender.work((), may_wait=False)
    assert reports.audits[0].kl is not None


def test_parts_of_an_audit_are_small(
    make: Callable[..., Blender], model: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what follows the documents: other requests wait for each part."""
    job = job_of(0, "a", is_audited=True)
    long = replace(job, tokens=job.tokens + job.tokens * 4)
    sizes: list[int] = []
    embed = model.embed
    blender = make(None)
    with torch.inference_mode():
        blender.work((long,), may_wait=False)
        while blender.take_reports() is None:
            blender.work((), may_wait=False)
        monkeypatch.setattr(model, "embed", lambda tokens: sizes.append(len(tokens)) or embed(tokens))
        while (reports := blender.take_reports()) is None:
            blender.work((), may_wait=False)
    assert reports.audits[0].kl is not None
    assert sum(sizes) == 2 * len(long.tokens) - long.stop_tokens
    assert max(sizes) <= 256
