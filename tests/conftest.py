"""Fixtures of real servers, and hypothesis settings: no time limit per example, since the machines are shared."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["kvstore.testing.fixtures"]

settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvstore")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full`, and say so in the summary, unless `make test-full` asks for everything."""
    if os.environ.get("KVSTORE_TEST_FULL") == "1":
        return
    full = [item for item in items if item.get_closest_marker("full") is not None]
    if full:
        items[:] = [item for item in items if item not in full]
        config.hook.pytest_deselected(items=full)


@pytest.fixture(autouse=True)
def usual_log_level() -> Iterator[None]:
    """Commands that run in this process make our log quieter, for good."""
    yield
    logging.getLogger("kvstore").setLevel(logging.NOTSET)
