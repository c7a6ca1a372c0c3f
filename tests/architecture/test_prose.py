"""Prose as a test: no word that hides an actor or a mechanism, no sentence that holds too much."""

from __future__ import annotations

import pytest

from tests.architecture.prose import AVOIDED, PROSE, Sentence, sentences
from tests.architecture.sources import ROOT


@pytest.mark.parametrize("place", PROSE)
def test_plain_english(place: str) -> None:
    """Docstrings, comments, messages and pages use plain words and short sentences."""
    found = [
        f"{sentence.path}:{sentence.line}: {problem}: {sentence.text}"
        for sentence in sentences(place)
        for problem in sentence.problems()
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["Whoever owns it is told of it.", "It goes on anew.", "Records are put aside.", "one " * 41 + "word."],
)
def test_what_is_found(text: str) -> None:
    """The words to avoid and long sentences are found."""
    assert Sentence(ROOT, 1, "page", text).problems()


def test_prose_is_read_everywhere() -> None:
    """Each kind of prose is read: docstrings, comments, messages and pages. Otherwise the tests above find nothing."""
    assert {sentence.kind for sentence in sentences(*PROSE)} == {"docstring", "comment", "message", "page"}
    assert len(AVOIDED) > 15
