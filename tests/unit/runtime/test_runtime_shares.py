"""Shares: whatever some tenants take, something is left for the next one, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InternalError
from kvstore.runtime.budget import Shares


@pytest.mark.parametrize("num_tenants", [1, 2, 7])
def test_greedy_tenants_leave_room_for_one_more(num_tenants: int) -> None:
    """All of them take one by one as long as they may: they get the same, three quarters together at least, and
    another one still gets at least half of what each has."""
    shares = Shares(1000)
    tenants = [f"tenant {number}" for number in range(num_tenants)]
    while sum(shares.try_take(tenant, 1) for tenant in tenants):
        pass
    held = [shares.used_by(tenant) for tenant in tenants]
    assert max(held) - min(held) <= 2
    assert shares.used >= 740
    taken = 0
    while shares.try_take("late", 1):
        taken += 1
    assert taken >= 0.1 * min(held) and taken > 30


def test_without_tenants_all_is_to_be_had() -> None:
    """The service's own user may have everything, and gives it back."""
    shares = Shares(10)
    assert shares.try_take("", 10)
    assert not shares.try_take("", 1)
    assert not shares.try_take("a", 1)
    shares.give_back("", 10)
    assert shares.used == 0
    with pytest.raises(InternalError):
        shares.give_back("", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=60))
def test_never_more_than_there_is(calls: list[tuple[str, int]]) -> None:
    """Whatever is asked for: never more is held than there is, and all that was taken can be given back."""
    shares = Shares(100)
    taken = [(tenant, amount) for tenant, amount in calls if shares.try_take(tenant, amount)]
    assert shares.used == sum(amount for _, amount in taken) <= 100
    for tenant, amount in taken:
        shares.give_back(tenant, amount)
    assert shares.used == 0
