"""A dict in pieces is a dict, for all keys; the collector's pauses."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.runtime.pauses import SplitDict, age_objects, collector_paused, empty_in_pieces

KEYS = st.binary(min_size=1, max_size=3) | st.integers(0, 200)


@given(st.lists(st.tuples(st.sampled_from(["set", "del", "default"]), KEYS, st.integers())))
def test_it_does_what_a_dict_does(steps: list[tuple[str, bytes | int, int]]) -> None:
    """Set, removed, set where it was not there: the same keys with the same values as in a dict."""
    plain: dict[bytes | int, int] = {}
    split: SplitDict[bytes | int, int] = SplitDict()
    for what, key, value in steps:
        if what == "set":
            plain[key] = split[key] = value
        elif what == "default":
            assert plain.setdefault(key, value) == split.setdefault(key, value)
        elif key in plain:
            del plain[key], split[key]
        assert (key in split) == (key in plain) and split.get(key) == plain.get(key)
    assert (dict(split), len(split), bool(split)) == (plain, len(plain), bool(plain))
    empty_in_pieces(split)
    assert not split
    with pytest.raises(KeyError):
        split.popitem()


def test_what_was_made_in_a_pause_is_not_searched_when_it_ends() -> None:
    """A collection of the youngest objects, as the next allocation may begin, has nothing of it to search."""
    with collector_paused():
        made = [[number] for number in range(10_000)]
        age_objects()
        youngest = {id(one) for one in gc.get_objects(generation=0)}
    assert not youngest.intersection(map(id, made))
    assert gc.isenabled() and gc.get_freeze_count() == 0
