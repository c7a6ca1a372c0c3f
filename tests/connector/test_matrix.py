"""The set of combinations that `make test` runs is what it claims to be."""

from __future__ import annotations

from tests.connector.support.matrix import EVERY, MODELS, PAIRWISE, pairs


def test_everything_is_every_possible_combination() -> None:
    """Five models, two forms, two stores, and the five ways that runner, async scheduling and drafts go together."""
    assert len(set(EVERY)) == len(EVERY) == len(MODELS) * 2 * 2 * 5
    assert all(combination.possible for combination in EVERY)


def test_every_pair_of_choices_is_covered() -> None:
    """Whatever two choices go together anywhere do so in the cover, which is a small part of the whole."""
    assert set(PAIRWISE) <= set(EVERY)
    covered = [pair for combination in PAIRWISE for pair in pairs(combination)]
    for combination in EVERY:
        assert pairs(combination) <= set(covered)
    assert len(PAIRWISE) <= 12
