"""Both sides of the connector beside a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.connector.support import LoopBridge, bridge_to_memory

if TYPE_CHECKING:
    from tests.unit.connector.rank_harness import Make
    from tests.unit.connector.scheduler_harness import SchedulerHarness


@pytest.fixture
def bridge() -> Iterator[LoopBridge]:
    with bridge_to_memory() as made:
        yield made


@pytest.fixture
def rank(bridge: LoopBridge) -> Iterator[Make]:
    from tests.unit.connector.rank_harness import ranks_on  # which needs torch, as the other tests here do not

    with ranks_on(bridge) as make:
        yield make


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SchedulerHarness]:
    """A scheduler side."""
    from tests.unit.connector.scheduler_harness import harness

    with harness(tmp_path) as made:
        yield made
