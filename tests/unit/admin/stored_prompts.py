"""Random token sequences, whose records are in memory and the slower tiers, with holes; and prompts for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from connector.prefix_hash import PrefixChain
from kvstore.api import Ack, PrefixQuery, Retention
from kvstore.client import RemoteStore
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.instance import EngineInstance
from kvstore.model.keys import RecordKey
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import Prompt
from kvstore.testing.waiting import soon
from tests.unit.admin.service_harness import ServiceHarness

__all__ = ["EngineHit", "StoredPrompts", "ask_as_engine", "stored_prompts"]

_SALTS = (None, "a user")
_PAYLOAD_BYTES = 100
_AT_ONCE = 32


@dataclass(frozen=True)
class EngineHit:
    """What an engine gets.

    Attributes:
        tokens: That it resumes.
        memory_tokens: That its node's memory alone would restore.
        is_from_memory: Every record was read from memory.
    """

    tokens: int
    memory_tokens: int
    is_from_memory: bool


@dataclass
class StoredPrompts:
    """What is stored, and where: the questions leave it as it is."""

    store: TieredStore
    prompt: Prompt
    sequences: list[tuple[str | None, list[int]]]
    in_memory: set[RecordKey]
    numbers: np.random.Generator

    def questions(self, count: int) -> Iterator[tuple[list[int], str | None]]:
        """Prompts that begin as a stored one does and continue in another way, and their salts."""
        for _ in range(count):
            salt, tokens = self.sequences[self.numbers.integers(len(self.sequences))]
            kept = int(self.numbers.integers(len(tokens) + 1)) if self.numbers.random() < 0.5 else len(tokens)
            new = self.numbers.integers(1 << 32, size=int(self.numbers.integers(100)))
            yield tokens[:kept] + new.tolist(), salt


async def stored_prompts(made: ServiceHarness, prompt: Prompt, *, seed: int, num_sequences: int = 12) -> StoredPrompts:
    """Save in the prompt's namespace: pages, and some tails and states between, of which a few are missing. Memory and
    each slower tier hold the start of a sequence, each up to a token of its own.
    """
    store = made.store
    assert isinstance(store, TieredStore)
    numbers = np.random.default_rng(seed)
    sequences, in_memory = [], set()
    saves: list[Coroutine[Any, Any, object]] = []
    removals: list[Coroutine[Any, Any, object]] = []
    for number in range(num_sequences):
        salt = _SALTS[number % 2]
        tokens = numbers.integers(1 << 32, size=int(numbers.integers(64, 700))).tolist()
        sequences.append((salt, tokens))
        chain = PrefixChain(16, salt)
        chain.extend(tokens)
        reach = [int(numbers.integers(len(tokens))) for _ in range(1 + len(store.slower))]
        for boundary in chain.boundaries:
            if boundary.tokens % 64 and numbers.random() < 0.5:
                continue
            for record in _records(prompt, boundary.prefix, boundary.tokens):
                is_held = [boundary.tokens <= most and numbers.random() > 0.01 for most in reach]
                if any(is_held[1:]):
                    saves.append(store.save(record, ack=Ack.COLD, deadline=soon()))
                elif is_held[0]:
                    saves.append(store.save(record, retention=Retention.SHORT, deadline=soon()))
                if is_held[0]:
                    in_memory.add(record.key)
                else:
                    removals.append(store.memory.delete(record.key, deadline=soon()))
                removals += [
                    tier.delete(record.key, deadline=soon())
                    for tier, holds in zip(store.slower, is_held[1:], strict=True)
                    if not holds
                ]
    for some in (saves, removals):
        for start in range(0, len(some), _AT_ONCE):
            await asyncio.gather(*some[start : start + _AT_ONCE])
        await made.settle()
    return StoredPrompts(store, prompt, sequences, in_memory, numbers)


def _records(prompt: Prompt, prefix: bytes, tokens: int) -> Iterator[Record]:
    for group, layout in enumerate(prompt.layout.groups):
        kind, span = layout.record_at(tokens, prompt.layout.page_tokens)
        for slice_ in range(layout.num_slices):
            key = RecordKey(prompt.namespace, prefix, group, slice_)  # type: ignore[arg-type]
            header = HeaderV1.unsealed(
                key, kind, span, codec_chain=0, decoded_bytes=_PAYLOAD_BYTES, created_ms=1_700_000_000_000
            )
            yield seal(header, bytearray(HEADER_BYTES + _PAYLOAD_BYTES))


async def ask_as_engine(
    stored: StoredPrompts, engine: RemoteStore, instance: EngineInstance, tokens: Sequence[int], salt: str | None
) -> EngineHit:
    """Look up and stage as the connector does, then put the store back to what it was."""
    chain = PrefixChain(instance.step_tokens, salt)
    chain.extend(tokens)
    usable = len(tokens) if instance.whole_prompts else max(0, len(tokens) - 1)
    cap_tokens = usable // instance.step_tokens * instance.step_tokens
    query = PrefixQuery(
        stored.prompt.namespace,
        tuple(chain.boundaries),
        local_tokens=0,
        cap_tokens=cap_tokens,
        step_tokens=instance.step_tokens,
    )
    found = await engine.lookup(query, deadline=soon())
    offers = [offer.resume_tokens for offer in found.offers if set(offer.tier_bytes) == {"memory"}]
    staged = await stored.store.stage(query, deadline=soon())
    if staged.lease is not None:
        await stored.store.release(staged.lease)
    for key in staged.keys:
        if key not in stored.in_memory:
            stored.store.memory.remove(key)
    assert staged.resume_tokens == found.resume_tokens
    return EngineHit(staged.resume_tokens, max(offers, default=0), set(staged.sources) <= {"memory"})
