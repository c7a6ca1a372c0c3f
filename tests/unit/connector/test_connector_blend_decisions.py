"""Who may be blended, which tokens are computed again, and when audits end it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector.blend.choice import FIRST_TOKENS, always_computed, choose_rows
from connector.blend.consent import ROPES, may_hold_blended, read_spans, refuse_engine, refuse_rope
from connector.blend.gate import Gate
from connector.blend.jobs import BlendAudit, BlendReport, BlendReports
from connector.blend.requests import BlendRequests
from connector.settings import ConnectorSettings
from kvstore.api import Outcome
from kvstore.errors import InvalidRequest
from kvstore.model.kinds import Latent, Recurrent, SlidingWindow
from kvstore.model.layout import Span
from kvstore.runtime.meters import Meters
from tests.unit.connector.support import make_facts

LLAMA = make_facts(architecture="LlamaForCausalLM")
SETTINGS = ConnectorSettings.parse({"blend": True, "blend_audit_rate": 1.0}, {})


# ---- consent


def test_a_request_that_says_all() -> None:
    wish = {"documents": [[1, 5], [5, 9], (12, 20)]}
    assert read_spans(wish, "blend:team", 20) == (Span(1, 5), Span(5, 9), Span(12, 20))


@pytest.mark.parametrize("salt", [None, "", "team", " blend:", "Blend:"])
def test_a_missing_salt(salt: str | None) -> None:
    """Without it vLLM's own cache would give blended blocks to requests that did not ask."""
    assert not may_hold_blended(salt)
    with pytest.raises(InvalidRequest, match=r"field=cache_salt.*expected=to begin with 'blend:'"):
        read_spans({"documents": [[1, 5]]}, salt, 20)


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (True, "documents "),
        ({}, "documents "),
        ({"documents": "1,5"}, "documents "),
        ({"documents": []}, "documents "),
        ({"documents": [[1, 2]] * 65}, "documents "),
        ({"documents": [5]}, r"documents\[0\]"),
        ({"documents": [[1, 5, 6]]}, r"documents\[0\]"),
        ({"documents": [[1.0, 5]]}, r"documents\[0\]"),
        ({"documents": [[True, 5]]}, r"documents\[0\]"),
        ({"documents": [[0, 5]]}, r"documents\[0\]"),
        ({"documents": [[5, 5]]}, r"documents\[0\]"),
        ({"documents": [[1, 21]]}, r"documents\[0\]"),
        ({"documents": [[1, 5], [4, 9]]}, r"documents\[1\]"),
    ],
)
def test_a_wrong_wish_names_the_field(wish: object, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"kv_transfer_params.kvstore.blend.{field}"):
        read_spans(wish, "blend:", 20)


def test_an_engine_that_may() -> None:
    assert refuse_engine(LLAMA, SETTINGS) is None


@pytest.mark.parametrize(
    ("changes", "settings", "name"),
    [
        ({"kind": Latent()}, {}, "MLA"),
        ({"kind": Recurrent()}, {}, "hybrid"),
        ({"kind": SlidingWindow(64)}, {}, "sliding window"),
        ({"drafts": True}, {}, "drafts"),
        ({"architecture": "GptOssForCausalLM"}, {}, "architecture GptOssForCausalLM"),
        ({"pp_size": 2}, {}, "2 pipeline stages"),
        ({"device": "cuda"}, {}, "device cuda"),
        ({"quantization": "fp8"}, {}, "quantization fp8"),
        ({"dtype": "fp8_e4m3", "cache_dtype": "fp8"}, {}, "cache type fp8"),
        ({"untested_release": "0.99"}, {}, "vLLM 0.99"),
        ({}, {"weights_may_change": True}, "weights_may_change"),
        ({}, {"mode": "load"}, "mode load"),
    ],
)
def test_refusals_of_engines_by_name(changes: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> None:
    facts = LLAMA
    group_changes = {key: changes[key] for key in ("kind", "drafts") if key in changes}
    if "dtype" in changes:
        group_changes["content"] = replace(facts.groups[0].content, dtype=changes["dtype"])
    facts = replace(facts, groups=(replace(facts.groups[0], **group_changes),))
    facts = replace(facts, **{key: value for key, value in changes.items() if key not in ("kind", "drafts", "dtype")})
    reason = refuse_engine(facts, replace(SETTINGS, **settings))
    assert reason is not None and reason.startswith(name)


def test_two_groups_are_refused() -> None:
    """As of a model whose every second layer has a window, which vLLM keeps in full."""
    facts = replace(LLAMA, groups=(LLAMA.groups[0], LLAMA.groups[0]))
    assert "2 groups of layers" in str(refuse_engine(facts, SETTINGS))


def test_ropes() -> None:
    """Known by name; one whose angles depend on the prompt's length is not."""
    assert all(refuse_rope(rope, scales_by_position=False) is None for rope in ROPES)
    assert "unknown rope DynamicNTK" in str(refuse_rope("DynamicNTKScalingRotaryEmbedding", scales_by_position=False))
    assert "unknown rope" in str(refuse_rope("RotaryEmbedding", scales_by_position=True))


# ---- choice


@st.composite
def spans_of_a_prompt(draw: st.DrawFn) -> tuple[int, tuple[Span, ...]]:
    at, spans = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(1, 5))):
        stop = at + draw(st.integers(1, 30))
        spans.append(Span(at, stop))
        at = stop + draw(st.integers(0, 4))
    return at + draw(st.integers(0, 5)), tuple(spans)


@given(spans_of_a_prompt(), st.floats(0, 1), st.integers(0, 1000))
def test_what_is_chosen(prompt: tuple[int, tuple[Span, ...]], ratio: float, seed: int) -> None:
    """All outside of documents, their first tokens, and then those that differ most, as many as the ratio says."""
    num_tokens, spans = prompt
    differences = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed))
    rows = choose_rows(differences, spans, ratio)
    always = always_computed(num_tokens, spans)
    chosen = torch.zeros(num_tokens, dtype=torch.bool)
    chosen[rows] = True
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert chosen[always].all()
    document_tokens = sum(span.num_tokens for span in spans)
    firsts = sum(min(FIRST_TOKENS, span.num_tokens) for span in spans)
    outside = num_tokens - document_tokens
    assert int(always.sum()) == outside + firsts
    assert len(rows) == outside + max(firsts, math.ceil(ratio * document_tokens))
    left, more = differences[~chosen], differences[chosen & ~always]
    if len(left) and len(more):
        assert left.max() <= more.min()


def test_all_and_none() -> None:
    spans = (Span(1, 9),)
    assert choose_rows(torch.zeros(10), spans, 1.0).tolist() == list(range(10))
    assert choose_rows(torch.zeros(10), spans, 0.0).tolist() == [0, 1, 2, 9]


def test_equal_differences_are_chosen_by_position() -> None:
    assert choose_rows(torch.ones(12), (Span(1, 11),), 0.5).tolist() == [0, 1, 2, 3, 4, 5, 11]


# ---- the gate


def test_the_gate_closes_within_a_hundred_audits() -> None:
    """A model whose blended answers differ by more than is allowed; it stays closed."""
    gate = Gate(0.1)
    closed = [gate.note(0.5) for _ in range(100)]
    assert closed.index(True) == 7 and closed.count(True) == 1
    assert not gate.is_open
    assert not gate.note(0.0) and not gate.is_open


def test_the_gate_stays_open_below_its_limit() -> None:
    gate = Gate(0.1)
    assert not any(gate.note(0.09) for _ in range(200)) and gate.is_open


def test_the_gate_forgets_old_audits() -> None:
    """Documents that are harder to blend come later: after a thousand good audits some dozens of bad ones close it."""
    gate = Gate(0.1)
    assert not any(gate.note(0.0) for _ in range(1000))
    assert any(gate.note(0.5) for _ in range(20))


def test_a_difference_that_is_no_number_closes_the_gate() -> None:
    gate = Gate(0.1)
    assert any(gate.note(math.nan) for _ in range(8))


# ---- the scheduler side


class Side:
    """A scheduler side, and what it told."""

    def __init__(self, **settings: Any) -> None:
        self.told: list[Outcome] = []
        self.meters = Meters()
        self.requests = BlendRequests(
            replace(SETTINGS, **settings), block_tokens=16, report=self.told.append, meters=self.meters
        )

    def ask(self, name: str, num_tokens: int, *spans: list[int], salt: str | None = "blend:") -> str | None:
        return self.requests.on_new_request(name, {"documents": list(spans)}, range(num_tokens), salt)


def test_a_request_is_blended_up_to_its_last_document() -> None:
    """By whole blocks, beyond what vLLM has, and one token is left to vLLM."""
    side = Side()
    assert side.ask("a", 100, [1, 40], [40, 70]) is None
    assert side.requests.matched_tokens("a", 0) == 64
    assert side.requests.matched_tokens("a", 16) == 48
    assert side.requests.matched_tokens("a", 80) == 0
    assert side.ask("whole", 64, [1, 64]) is None
    assert side.requests.matched_tokens("whole", 0) == 48


def test_what_vllm_has_itself_is_not_blended() -> None:
    """Its own cache, under the same salt, holds as much: said once, since vLLM may ask often."""
    side = Side()
    side.ask("a", 100, [1, 40])
    assert [side.requests.matched_tokens("a", 48) for _ in range(3)] == [0, 0, 0]
    assert [told.reason for told in side.told] == ["held_by_engine"]


def test_documents_within_the_first_block() -> None:
    """There is no whole block to write."""
    side = Side()
    assert "first block" in str(side.ask("a", 100, [1, 15]))
    assert not side.requests.knows("a")


def test_a_job_is_ordered_once() -> None:
    side = Side()
    side.ask("a", 100, [1, 40], [40, 70])
    side.requests.on_allocated("a", [7, 8, 9, 10, 11], 48)
    (job,) = side.requests.take_jobs()
    assert (job.start_tokens, job.stop_tokens, job.block_ids) == (16, 64, (7, 8, 9, 10))
    assert job.is_audited and side.requests.has_open_audits
    assert side.requests.take_jobs() == ()


def test_requests_without_a_wish_are_not_known() -> None:
    side = Side()
    assert not side.requests.knows("a") and side.requests.matched_tokens("a", 0) == 0
    side.requests.on_allocated("a", [1], 16)
    assert side.requests.take_jobs() == ()


def test_a_wish_without_a_salt_is_refused() -> None:
    side = Side()
    assert "cache_salt" in str(side.ask("a", 100, [1, 40], salt=None))
    assert not side.requests.knows("a")
    assert side.meters.get("connector_blend_refused") == 1


def test_explain_says_how_many_tokens_were_computed_again() -> None:
    side = Side(blend_audit_rate=0.0)
    side.ask("a", 100, [1, 40], [40, 70])
    side.requests.on_allocated("a", [7, 8, 9, 10], 64)
    side.requests.on_reports(BlendReports((BlendReport("a", 64, 12, 2, 1),)))
    (told,) = side.told
    assert (told.reason, told.resume_tokens, told.cap_tokens) == ("blended", 64, 64)
    assert told.detail == {"blended": "12 of 64 tokens recomputed", "stored_documents": "1 of 2"}
    assert not side.requests.has_open_audits


def test_a_request_that_fails_is_computed() -> None:
    side = Side()
    side.ask("a", 100, [1, 40])
    side.requests.on_allocated("a", [7, 8, 9, 10], 32)
    side.requests.on_reports(BlendReports((BlendReport("a", error="no memory"),)))
    assert side.requests.matched_tokens("a", 0) == 0
    assert not side.requests.has_open_audits
    assert (side.told[0].reason, side.told[0].detail) == ("not_blended", {"because": "no memory"})


def test_a_request_that_ends_is_given_up() -> None:
    """If the ranks have it and have not reported it. It counts as no failure, since it is not computed."""
    side = Side(blend_audit_rate=0.0)
    for name in ("ordered", "asked", "blended"):
        side.ask(name, 100, [1, 40])
    for name in ("ordered", "blended"):
        side.requests.on_allocated(name, [7, 8], 32)
    side.requests.on_reports(BlendReports((BlendReport("blended", 32, 5, 1, 1),)))
    for name in ("ordered", "asked", "blended"):
        side.requests.on_finished(name)
    assert [side.requests.take_ended() for _ in range(2)] == [("ordered",), ()]
    side.requests.on_reports(BlendReports((BlendReport("ordered", error="it has ended"),)))
    assert side.meters.get("connector_blend_failed") == 0
    assert [told.reason for told in side.told] == ["blended"]


def test_audits_come_at_their_rate() -> None:
    side = Side(blend_audit_rate=0.25)
    audited = []
    for number in range(40):
        side.ask(str(number), 100, [1, 40])
        side.requests.on_allocated(str(number), [7, 8], 32)
        audited += [job.is_audited for job in side.requests.take_jobs()]
    assert sum(audited) == 10


def test_an_audit_that_is_given_up_leaves_nothing() -> None:
    """What waited for its difference is dropped: else each would take memory for ever."""
    side = Side()
    side.ask("a", 100, [1, 40])
    side.requests.on_allocated("a", [7, 8], 32)
    side.requests.on_reports(BlendReports((BlendReport("a", 32, 5, 1, 1),), (BlendAudit("a", None),)))
    side.requests.on_reports(BlendReports(audits=(BlendAudit("a", 0.7),)))
    assert [told.detail.get("audit_kl") for told in side.told] == [None]


def test_bad_audits_turn_blending_off(caplog: pytest.LogCaptureFixture) -> None:
    """Later requests are computed, and the log and a metric say why."""
    side = Side()
    for number in range(100):
        side.ask(str(number), 100, [1, 40])
        side.requests.on_allocated(str(number), [7, 8], 32)
        side.requests.on_reports(BlendReports((BlendReport(str(number), 32, 5, 1, 1),)))
        side.requests.on_reports(BlendReports(audits=(BlendAudit(str(number), 0.7, (0.1,), (0.2,)),)))
        if side.requests.refusal:
            break
    assert number < 100 and "blend_kl_max is 0.1" in side.requests.refusal
    assert side.requests.matched_tokens("0", 0) == 0
    assert "blend_kl_max is 0.1" in str(side.ask("later", 100, [1, 40]))
    assert side.meters.get("connector_blend_turned_off") == 1
    assert side.meters.get("connector_blend_kl") == pytest.approx(0.7)
    assert "this engine does not blend" in caplog.text
    assert side.told[-1].detail["audit_kl"] == 0.7
    assert not side.requests.has_open_audits
