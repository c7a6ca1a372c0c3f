"""Ranks beside a store in memory, for the tests of the worker's side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.connector.rank_world import Make, ranks_on
from tests.unit.connector.support import LoopBridge, bridge_to_memory


@pytest.fixture
def bridge() -> Iterator[LoopBridge]:
    with bridge_to_memory() as made:
        yield made


@pytest.fixture
def rank(bridge: LoopBridge) -> Iterator[Make]:
    with ranks_on(bridge) as make:
        yield make
