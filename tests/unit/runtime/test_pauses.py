"""The collector's pauses."""

from __future__ import annotations

import gc

from kvstore.runtime.pauses import age_objects, collector_paused


def test_what_was_made_in_a_pause_is_not_searched_when_it_ends() -> None:
    """A collection of the youngest objects, as the next allocation may begin, has nothing of it to search."""
    with collector_paused():
        made = [[number] for number in range(10_000)]
        age_objects()
        youngest = {id(one) for one in gc.get_objects(generation=0)}
    assert not youngest.intersection(map(id, made))
    assert gc.isenabled() and gc.get_freeze_count() == 0
