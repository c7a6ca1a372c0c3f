"""The words for why a prompt was not resumed any further."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.catalog.base import LeaveReason
from kvstore.cli.status_problems import LATE
from kvstore.store.explain.reasons import LEFT, REASONS

ROOT = Path(__file__).resolve().parents[3]


def test_every_word_is_documented() -> None:
    """The tables of docs/explain.md list each with what it means, and no other."""
    rows = re.findall(r"^\| (?:`(\w+)`|none) \| (.+?) \|", (ROOT / "docs/explain.md").read_text(), re.MULTILINE)
    told = {word: why for word, why in rows if why in {reason.why for reason in REASONS.values()}}
    assert told == {word: reason.why for word, reason in REASONS.items()}


@pytest.mark.parametrize("word", [word for word in REASONS if word in LATE or word.startswith("save_")])
def test_advice_does_not_go_in_a_circle(word: str) -> None:
    """`kvstore status` shows what to do about these reasons, and so does the doctor of losses: neither sends its reader
    to itself, or to the other one and back."""
    advice = REASONS[word].advice
    assert advice and "kvstore status" not in advice
    if word.startswith("save_"):
        assert "kvstore doctor" not in advice


def test_every_way_to_leave_has_a_word() -> None:
    """A tombstone's reason is never unknown."""
    assert set(LEFT) == set(LeaveReason)
    assert set(LEFT.values()) <= set(REASONS)


def test_every_word_of_the_connector_is_known() -> None:
    """What an engine tells has a sentence here."""
    text = "".join(path.read_text() for path in (ROOT / "connector/scheduler").glob("*.py"))
    told = set(re.findall(r"""(?:_miss|outcomes\.report)\(state, "(\w+)\"""", text))
    told |= set(re.findall(r"""return "(\w+)", \{""", text))
    assert len(told) > 12
    assert told - {"nothing_staged"} <= set(REASONS)
