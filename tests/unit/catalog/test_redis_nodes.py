"""How commands are sent to the nodes of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from kvstore.catalog.redis.nodes import RedisNodes
from kvstore.catalog.redis.replies import Command
from kvstore.catalog.redis.routes import Routes
from kvstore.errors import Unavailable
from kvstore.testing.waiting import soon


class TwoNodes:
    """Routes of a cluster with a node for each slot."""

    async def owner(self, slot: int) -> int:
        return slot


async def test_a_node_that_refuses_leaves_no_call_to_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing limits such a call any more, and it has one of the few connections that may be used at a time."""
    nodes = RedisNodes(cast(Redis, object()), gate=None)
    nodes._routes = cast(Routes, TwoNodes())
    hanging: list[int] = []

    async def on_node(node: int, commands: Sequence[Command]) -> list[Any]:
        if node == 0:
            raise ConnectionError("refused")
        hanging.append(node)
        try:
            await asyncio.Event().wait()
        finally:
            hanging.remove(node)
        return []

    monkeypatch.setattr(nodes, "_on_node", on_node)
    with pytest.raises(Unavailable):
        await nodes.run([(1, ("GET", "b")), (0, ("GET", "a"))], deadline=soon())
    assert not hanging
