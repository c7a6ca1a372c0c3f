"""Ranks beside a store in memory, for the tests of the worker's side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.unit.connector.support import LoopBridge, bridge_to_memory

if TYPE_CHECKING:
    from tests.unit.connector.rank_harness import Make


@pytest.fixture
def bridge() -> Iterator[LoopBridge]:
    with bridge_to_memory() as made:
        yield made


@pytest.fixture
def rank(bridge: LoopBridge) -> Iterator[Make]:
    from tests.unit.connector.rank_harness import ranks_on  # which needs torch, as the other tests here do not

    with ranks_on(bridge) as make:
        yield make
