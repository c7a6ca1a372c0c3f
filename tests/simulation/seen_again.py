"""What is seen again is kept: under second sight a prompt that is asked for again and again reaches the cold tier."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.catalog.entry import Level
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.testing.prompts import Prompt
from tests.simulation.rest import told, under_way
from tests.simulation.sightings import RULE

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster
    from tests.simulation.service import Service

__all__ = ["check_what_is_seen_again"]

_TIMES_MAX = 12
"""Queues are short and Redis is small: so often a prompt is served until all of it must be kept."""


async def check_what_is_seen_again(cluster: SimulatedCluster) -> None:
    """Without faults, a prompt that a service which just started is asked for again and again is in an unbounded cold
    tier in the end, from its first page to its last.
    """
    sizes = cluster.plan.sizes
    if sizes.admission != RULE or sizes.cold_bytes is not None:
        return
    service, prompt = cluster.new_service("again"), cluster.plan.prompts[0]
    await service.start()
    cluster.services.append(service)
    for _ in range(_TIMES_MAX):
        await _serve(cluster, service, prompt)
        await _quiet(cluster)
        if _kept_tokens(cluster, prompt) == prompt.num_tokens:
            return
    cluster.oracle.violate(
        f"{prompt.name} is seen again and again, and kept up to {_kept_tokens(cluster, prompt)} tokens"
    )


async def _serve(cluster: SimulatedCluster, service: Service, prompt: Prompt) -> None:
    """As an engine does that has all the time there is."""
    store = service.store
    sightings = cluster.oracle.sightings
    assert sightings is not None
    sightings.looks_up(prompt.query(), prompt.layout)

    def soon() -> Deadline:
        return Deadline.after(30.0, service.clock)

    await service.process.spawn(store.open_namespace(prompt.description, deadline=soon()))
    lookup = await service.process.spawn(store.lookup(prompt.query(), deadline=soon()))
    # beside an incomplete catalog a lookup guesses; the next one knows what was not there
    staged = await service.process.spawn(store.stage(prompt.query(), deadline=soon()))
    if staged.lease is not None:
        await service.process.spawn(store.release(staged.lease))
    for record in prompt.records():
        if record.header.span.stop > lookup.resume_tokens:
            cluster.oracle.offered(record)
            await service.process.spawn(store.save(record, deadline=soon()))
            await service.process.spawn(store.drain(soon()))


async def _quiet(cluster: SimulatedCluster) -> None:
    while under_way(cluster):
        await asyncio.sleep(1.0)


def _kept_tokens(cluster: SimulatedCluster, prompt: Prompt) -> int:
    """How far the cold tier serves a prompt, by what it has or what the catalog tells that it has."""
    kept = told(cluster, Level.COLD).union(cluster.deployment.cold.records)
    query, layout = prompt.query(), prompt.layout
    bits = [
        sum(
            1 << index
            for index, group in enumerate(layout.groups)
            if all(RecordKey(query.namespace, one.prefix, index, at) in kept for at in range(group.num_slices))
        )
        for one in query.boundaries
    ]
    tokens = [boundary.tokens for boundary in query.boundaries]
    return longest_resumable(
        layout, tokens, bits, local_tokens=0, cap_tokens=prompt.num_tokens, step_tokens=query.step_tokens
    )
