"""Keys rotated again, and layers computed for some tokens, on a model whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.blend_model import FOLDER, TransformersLayers, blend, compute_document, load_layers
from benchmarks.blend_task import NO_LABEL, draw
from connector.blend.recompute import LayerStates, extend
from connector.blend.rotation import Angles, rerotate
from kvstore.model.layout import Span


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> TransformersLayers:
    """The trained model of `benchmarks.blend`."""
    return load_layers(FOLDER)


# ---- rotation


def angles(positions: torch.Tensor, *, half: int, scale: float = 1.0, is_neox: bool = True) -> Angles:
    """As models make their tables, in float32."""
    frequencies = 1.0 / 10_000.0 ** (torch.arange(half, dtype=torch.float32) / half)
    turned = positions.to(torch.float32)[:, None] * frequencies
    return Angles(turned.cos() * scale, turned.sin() * scale, is_neox)


def rotate(keys: torch.Tensor, at: Angles) -> torch.Tensor:
    """As a model rotates fresh keys."""
    half = at.cos.shape[1]
    cos, sin = at.cos[:, None], at.sin[:, None]
    turned, kept = keys[..., : 2 * half], keys[..., 2 * half :]
    if at.is_neox:
        first, second = turned.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), -1)
    first, second = turned[..., 0::2], turned[..., 1::2]
    both = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((both.flatten(-2), kept), -1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("half", [16, 8])
@pytest.mark.parametrize("scale", [1.0, 1.2])
@pytest.mark.parametrize("seen", [1, 70_000])
@pytest.mark.parametrize("wanted", [1, 900, 131_000])
def test_a_second_rotation_equals_a_fresh_one(is_neox: bool, half: int, scale: float, seen: int, wanted: int) -> None:
    """Within the rounding of float32, whatever the positions: four products and three sums of each number."""
    keys = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(seen + wanted))
    places = torch.arange(64)
    before = angles(places + seen, half=half, scale=scale, is_neox=is_neox)
    after = angles(places + wanted, half=half, scale=scale, is_neox=is_neox)
    found, fresh = rerotate(rotate(keys, before), before, after), rotate(keys, after)
    size = keys.abs().max() * scale
    assert (found - fresh).abs().max() <= 8 * torch.finfo(torch.float32).eps * size
    assert torch.equal(found[..., 2 * half :], keys[..., 2 * half :])


def test_narrow_keys_lose_one_more_rounding() -> None:
    """Keys and tables in bfloat16, as most models have them: what is lost is what storing a number loses, twice."""
    keys = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(1))
    before, after = (angles(torch.arange(64) + at, half=16) for at in (1, 5000))
    narrow = [Angles(one.cos.bfloat16().float(), one.sin.bfloat16().float()) for one in (before, after)]
    stored = rotate(keys, narrow[0]).bfloat16()
    found = rerotate(stored, narrow[0], narrow[1])
    assert found.dtype is torch.bfloat16
    fresh = rotate(keys, narrow[1])
    assert (found.float() - fresh).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * fresh.abs().max()


def test_keys_at_their_own_place_stay() -> None:
    keys = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(2))
    at = angles(torch.arange(16) + 3, half=16)
    assert (rerotate(keys, at, at) - keys).abs().max() <= 4 * torch.finfo(torch.float32).eps * keys.abs().max()


# ---- layers


def prompt_of(seed: int) -> tuple[torch.Tensor, tuple[Span, ...], int]:
    """A question, where its documents are, and the answer."""
    batch = draw(np.random.default_rng(seed), 1, questions=1)
    last = int(np.flatnonzero(batch.labels[0] != NO_LABEL)[-1])
    size = batch.document_tokens
    spans = tuple(Span(1 + size * at, 1 + size * (at + 1)) for at in range(batch.num_documents))
    return torch.from_numpy(batch.tokens[0, : last + 1]), spans, int(batch.labels[0, last])


def documents_of(
    model: TransformersLayers, tokens: torch.Tensor, spans: tuple[Span, ...]
) -> list[tuple[Span, LayerStates]]:
    first = int(tokens[0])
    return [(span, compute_document(model, first, tokens[span.start : span.stop])) for span in spans]


@torch.inference_mode()
def test_all_tokens_computed_again_is_a_full_computation(model: TransformersLayers) -> None:
    """At ratio 1 nothing of a stored document is left: keys, values and logits are those without documents."""
    tokens, spans, _ = prompt_of(1)
    full = blend(model, tokens, (), ratio=1.0, wants_hidden=True)
    made = blend(model, tokens, documents_of(model, tokens, spans), ratio=1.0, wants_hidden=True)
    assert full.hidden is not None and made.hidden is not None
    assert (model.logits(full.hidden[-1:]) - model.logits(made.hidden[-1:])).abs().max() < 1e-4
    for one, other in zip(
        [*full.states.keys, *full.states.values], [*made.states.keys, *made.states.values], strict=True
    ):
        assert (one - other).abs().max() < 1e-4


@torch.inference_mode()
def test_the_arithmetic_is_that_of_the_model(model: TransformersLayers) -> None:
    """Layer by layer it computes what the model's own forward does."""
    tokens, _, _ = prompt_of(2)
    made = blend(model, tokens, (), ratio=1.0, wants_hidden=True)
    assert made.hidden is not None
    own = model.model(tokens[None]).logits[0]
    assert (model.logits(made.hidden) - own).abs().max() < 1e-4


@torch.inference_mode()
def test_a_split_prompt_equals_a_whole_one(model: TransformersLayers) -> None:
    """`extend` over two parts leaves the same keys and values as one computation."""
    tokens, _, _ = prompt_of(3)
    whole = blend(model, tokens, (), ratio=1.0, wants_hidden=True)
    empty = [torch.zeros_like(one) for one in whole.states.keys]
    states = LayerStates(empty, [torch.zeros_like(one) for one in whole.states.values])
    assert extend(model, states, tokens[:70], 0) is None
    hidden = extend(model, states, tokens[70:], 70, wants_hidden=True)
    assert hidden is not None and whole.hidden is not None
    assert (hidden[-1] - whole.hidden[-1]).abs().max() < 1e-4
    for one, other in zip(whole.states.keys, states.keys, strict=True):
        assert (one - other).abs().max() < 1e-4


@torch.inference_mode()
def test_the_answer_needs_tokens_that_are_computed_again(model: TransformersLayers) -> None:
    """On questions over several documents: all right in full, few right with documents as they are, most right when
    the fifteen of a hundred tokens that differ most are computed again.
    """
    right = dict.fromkeys(("full", "reused", "blended"), 0)
    differences = []
    questions = 24
    for seed in range(100, 100 + questions):
        tokens, spans, answer = prompt_of(seed)
        documents = documents_of(model, tokens, spans)
        ways = {
            "full": blend(model, tokens, (), ratio=1.0, wants_hidden=True),
            "reused": blend(model, tokens, documents, ratio=None, wants_hidden=True),
            "blended": blend(model, tokens, documents, ratio=0.15, wants_hidden=True),
        }
        seen = {}
        for name, made in ways.items():
            assert made.hidden is not None
            seen[name] = model.logits(made.hidden[-1:])[0].log_softmax(-1)
            right[name] += int(seen[name].argmax()) == answer
        differences.append(float((seen["full"].exp() * (seen["full"] - seen["blended"])).sum()))
    assert right["full"] == questions
    assert right["reused"] < questions / 2
    assert right["blended"] == questions
    assert np.mean(differences) < 0.01  # as many tokens chosen at random leave .3


@torch.inference_mode()
def test_stored_keys_and_values_are_used(model: TransformersLayers) -> None:
    """What is not computed again comes from the document, its keys rotated for their new place."""
    tokens, spans, _ = prompt_of(4)
    documents = documents_of(model, tokens, spans)
    made = blend(model, tokens, documents, ratio=0.1)
    kept = torch.ones(len(tokens), dtype=torch.bool)
    kept[made.rows] = False
    span, document = documents[3]
    at = torch.arange(span.start, span.stop)
    inside = kept[span.start : span.stop]
    assert inside.sum() > 10
    layer = model.num_layers - 1
    wanted = rerotate(document.keys[layer], model.angles(at - span.start + 1), model.angles(at))
    assert torch.equal(made.states.keys[layer][span.start : span.stop][inside], wanted[inside])
    assert torch.equal(made.states.values[layer][span.start : span.stop][inside], document.values[layer][inside])
