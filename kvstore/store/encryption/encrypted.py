"""`EncryptedStore`: the border between a store and its clients where records are encrypted, and names are keyed.

Below this border, in the store with its memory, queues, tiers, catalog and pending entries, there are only encrypted
records under keyed names, and nothing has access to keys. Above it, on the wire and in engines, there are only plain
records under plain names. A record is encrypted once, when it is accepted, and has the same bytes in every tier; it is
decrypted each time a rank loads it. So memory holds ciphertext, and is not shared with engines.

The checksum finds accidents when a record is staged, as without encryption. Only the tag reveals a forged record, when
it is loaded: the load fails, every tier quarantines the record, and the engine computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvstore.api import Ack, LeaseId, Lookup, Outcome, PageStore, PrefixQuery, Progress, Retention, SaveOutcome, Staged
from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable
from kvstore.format.encrypted import ENCRYPTION_BYTES, decrypt_record, encrypt_record
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.namespace import NamespaceDescription
from kvstore.model.page_blocks import PageBlocks
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import with_pauses
from kvstore.runtime.watched_file import Watched
from kvstore.store.encryption.key_ring import Generation, KeyRing
from kvstore.store.hints.ended_prompts import KeptPrompt
from kvstore.store.hints.hints import Hints
from kvstore.store.presence import Reach, ResumePoints
from kvstore.store.saving import verify_record
from kvstore.store.tiered import TieredStore
from kvstore.store.upkeep.operations import StoreOperations

_log = logging.getLogger(__name__)

_THREADS = 4
"""Records that are encrypted or decrypted at a time; `benchmarks.encryption` prints what one thread does."""
_INLINE_BYTES = 64 << 10
"""Smaller records are not worth a thread."""
_NAMED_AT_ONCE = 1024
"""Names computed before the event loop gets a turn; `benchmarks.encryption` prints names a second."""


class EncryptedStore(PageStore):
    """A `TieredStore` that keeps nothing readable.

    Args:
        inner: Closed with this store.
        keys: Where the tenants' keys come from; read again while this store is open.

    Attributes:
        tenant_keys: The keys of each tenant, and what is wrong with them.
    """

    def __init__(self, inner: TieredStore, keys: Watched[KeyRing]) -> None:
        self.inner = inner
        self.meters = inner.meters
        self.events = inner.events
        self.keys = keys
        self.tenant_keys = inner.check_keys(keys)
        self._turns = asyncio.Semaphore(_THREADS)

    @property
    def operations(self) -> StoreOperations:
        """As `TieredStore.operations`, under keyed names."""
        return self.inner.operations

    def buffer(self, num_bytes: int) -> memoryview:
        return fresh_buffer(num_bytes)  # plain bytes never enter memory that other processes may map

    def generations(self, tenant: str) -> tuple[Generation, ...]:
        """As `KeyRing.generations`. Safe from any thread."""
        return self.tenant_keys.generations(tenant)

    async def open_namespace(self, description: NamespaceDescription, *, deadline: Deadline) -> NamespaceId:
        return await self.inner.open_namespace(description, deadline=deadline)

    async def lookup(self, query: PrefixQuery, *, deadline: Deadline) -> Lookup:
        tenant = self.inner.tenant_of(query.namespace)
        generations = self.generations(tenant)
        if not generations:
            self._count_miss(tenant)
            return Lookup(query.local_tokens, (0,) * len(query.boundaries))
        named = await self._named(query, generations, deadline)
        # With names of several generations the catalog learns no parents: a boundary whose parent goes by another name
        # would look broken.
        learns = len(generations) == 1 or named == await _under(query, generations[0])
        found = await self.inner.lookup(named, deadline=deadline, learns=learns)
        if found.resume_tokens + query.step_tokens <= query.cap_tokens:
            self._count_miss(tenant)
        return found

    async def reaches(self, query: PrefixQuery, points: Sequence[ResumePoints], *, deadline: Deadline) -> list[Reach]:
        """As `TieredStore.reaches`; nothing for a tenant without a key."""
        generations = self.generations(self.inner.tenant_of(query.namespace))
        if not generations:
            return [Reach(query.local_tokens, query.local_tokens) for _ in points]
        return await self.inner.reaches(await self._named(query, generations, deadline), points, deadline=deadline)

    async def reaches_by_blocks(
        self, namespace: NamespaceId, hashes: Sequence[bytes], steps_tokens: Sequence[int], *, deadline: Deadline
    ) -> list[Reach]:
        """As `TieredStore.reaches_by_blocks`; nothing for a tenant without a key. Pages are known under the names that
        they had when they were named."""
        if not self.generations(self.inner.tenant_of(namespace)):
            return [Reach(0, 0) for _ in steps_tokens]
        return await self.inner.reaches_by_blocks(namespace, hashes, steps_tokens, deadline=deadline)

    async def stage(self, query: PrefixQuery, *, deadline: Deadline, progress: Progress | None = None) -> Staged:
        generations = self.generations(self.inner.tenant_of(query.namespace))
        if not generations:
            return Staged(None, query.local_tokens, cut="no_key")
        named = await self._named(query, generations, deadline)
        report = _plain_progress(progress) if progress is not None else None
        staged = await self.inner.stage(named, deadline=deadline, progress=report)
        try:
            return await self.inner.work.run(
                len(query.boundaries) + len(staged.keys), _plain_staged, staged, named, query
            )
        except BaseException:  # no caller will have the lease
            if staged.lease is not None:
                await self.inner.release(staged.lease)
            raise

    async def _named(self, query: PrefixQuery, generations: Sequence[Generation], deadline: Deadline) -> PrefixQuery:
        """The query, with each boundary named by the key under which most of its groups are stored; the current key
        wins ties. With one generation no tier is asked.
        """
        named = await _under(query, generations[0])
        if len(generations) == 1:
            return named
        found = await self.inner.probe(named, deadline=deadline)
        if found.resume_tokens + query.step_tokens > query.cap_tokens:
            return named
        boundaries, held = list(named.boundaries), list(found.groups_present)
        for generation in generations[1:]:
            other = await _under(query, generation)
            probed = await self.inner.probe(other, deadline=deadline)
            for index, groups in enumerate(probed.groups_present):
                if groups.bit_count() > held[index].bit_count():
                    boundaries[index], held[index] = other.boundaries[index], groups
        return replace(query, boundaries=tuple(boundaries))

    async def renew(self, lease: LeaseId, *, deadline: Deadline) -> bool:
        return await self.inner.renew(lease, deadline=deadline)

    async def load(
        self,
        lease: LeaseId,
        key: RecordKey,
        *,
        deadline: Deadline,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> Record:
        """As `PageStore.load`. A record whose tag does not match is quarantined in every tier and counts as missing."""
        error = Unavailable("the lease has ended, or does not hold the record", key=key)
        for generation in self.generations(self.inner.tenant_of(key.namespace)):
            named = key if generation is None else generation.named(key)
            try:
                record = await self.inner.load(lease, named, deadline=deadline)
            except Unavailable:
                continue
            try:
                return await self._decrypted(record, generation, key, deadline)
            except CorruptRecord as found:
                self.meters.add("encryption_misses", reason="tampered")
                _log.warning("quarantined a stored record that is not what was encrypted: %s", found)
                await self.inner.discard(named, found.message, deadline=deadline)
                error = Unavailable("the record is not what was encrypted", key=key)
        raise error

    async def _decrypted(self, record: Record, key: Generation, plain_key: RecordKey, deadline: Deadline) -> Record:
        if key is None:
            if record.header.key_id:
                raise CorruptRecord("an encrypted record stands under a plain name", key=plain_key)
            return record
        if record.header.payload_bytes < ENCRYPTION_BYTES:
            raise CorruptRecord("an encrypted record is too short", key=plain_key)
        target = fresh_buffer(record.num_bytes - ENCRYPTION_BYTES)
        async with deadline.scope("decrypting a record"):
            plain = await self._work(record.num_bytes, lambda: decrypt_record(record, key, target, plain_key.prefix))
        return plain

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        """As `PageStore.save`. `FULL` for a tenant that has no key, or whose current key is known to be wrong."""
        tenant = self.inner.tenant_of(record.key.namespace)
        generations = self.generations(tenant)
        if record.header.key_id:
            raise InvalidRequest("records are saved plain: the service encrypts them", key_id=record.header.key_id)
        if not generations:
            return self._refused("no_key")
        key = generations[0]
        if key is None:
            return await self.inner.save(record, ack=ack, retention=retention, deadline=deadline)
        if self.tenant_keys.is_wrong(tenant, key.key_id):
            return self._refused("wrong_key")
        async with deadline.scope("encrypting a record"):
            if not record.is_verified:
                await verify_record(record)
            target = self.inner.buffer(record.num_bytes + ENCRYPTION_BYTES)
            encrypted = await self._work(record.num_bytes, lambda: encrypt_record(record, key, target))
        self.meters.add("encrypted_records")
        return await self.inner.save(encrypted, ack=ack, retention=retention, deadline=deadline)

    async def _work(self, num_bytes: int, call: Callable[[], Record]) -> Record:
        if num_bytes <= _INLINE_BYTES:
            return call()
        async with self._turns:
            return await asyncio.to_thread(call)

    async def release(self, lease: LeaseId) -> None:
        await self.inner.release(lease)

    async def discard(self, key: RecordKey, reason: str, *, deadline: Deadline) -> None:
        """As `PageStore.discard`, under every key that the record may have been read with."""
        for generation in self.generations(self.inner.tenant_of(key.namespace)):
            named = key if generation is None else generation.named(key)
            await self.inner.discard(named, reason, deadline=deadline)

    def report(self, outcome: Outcome) -> None:
        """As `PageStore.report`; the boundary that stopped the request is kept under its current name."""
        generations = self.generations(outcome.tenant)
        if outcome.stop is not None and generations:
            outcome = replace(outcome, stop=_boundary(outcome.stop, generations[0]))
        self.inner.report(outcome)

    @property
    def takes_blocks(self) -> bool:
        return self.inner.takes_blocks

    def name_blocks(self, blocks: PageBlocks) -> None:
        """As `PageStore.name_blocks`, for the page under its current name."""
        generations = self.generations(self.inner.memory.owner_of(blocks.namespace))
        if generations and generations[0] is not None:
            blocks = blocks._replace(boundary=_boundary(blocks.boundary, generations[0]))
        self.inner.name_blocks(blocks)

    def knows_blocks(self, namespace: NamespaceId) -> bool:
        """As `TieredStore.knows_blocks`."""
        return self.inner.knows_blocks(namespace)

    def end_prompt(self, prompt: EndedPrompt) -> None:
        """As `PageStore.end_prompt`, under the current names."""
        self.inner.end_prompt(self._renamed(prompt))

    @property
    def hints(self) -> Hints:
        """As `TieredStore.hints`, under keyed names."""
        return self.inner.hints

    def keep_prompt(self, prompt: EndedPrompt) -> KeptPrompt:
        """As `TieredStore.keep_prompt`, under the current names."""
        return self.inner.keep_prompt(self._renamed(self.inner.hints.trimmed(prompt)))  # fewer names to compute

    def _renamed(self, prompt: EndedPrompt) -> EndedPrompt:
        """A prompt under its tenant's current names; without boundaries for a tenant that has no key."""
        generations = self.generations(prompt.tenant)
        named = [_boundary(boundary, generations[0]) for boundary in prompt.boundaries] if generations else ()
        return replace(prompt, boundaries=tuple(named))

    async def explain(self, request: str, *, deadline: Deadline, tenant: str | None = "") -> Mapping[str, object]:
        """As `PageStore.explain`; what seems never to have been stored may be stored under another key."""
        return await self.inner.explain(request, deadline=deadline, tenant=tenant)

    async def status(self, *, deadline: Deadline, tenant: str = "") -> Mapping[str, object]:
        return await self.inner.status(deadline=deadline, tenant=tenant)

    def _count_miss(self, tenant: str) -> None:
        """Count a lookup that found less than its whole prompt, if a key may be the reason."""
        if reason := self.tenant_keys.reason(tenant):
            self.meters.add("encryption_misses", reason=reason)

    def _refused(self, reason: str) -> SaveOutcome:
        self.meters.add("encryption_refused_saves", reason=reason)
        return SaveOutcome.FULL

    async def drain(self, deadline: Deadline) -> int:
        """As `TieredStore.drain`."""
        return await self.inner.drain(deadline)

    async def aclose(self) -> None:
        """As `TieredStore.aclose`, of the inner store too."""
        await self.inner.aclose()


async def named_under(boundaries: Sequence[Boundary], generation: Generation) -> Sequence[Boundary]:
    """Boundaries as they are named under one generation."""
    if generation is None:
        return boundaries
    return [_boundary(one, generation) async for one in with_pauses(boundaries, _NAMED_AT_ONCE)]


async def _under(query: PrefixQuery, generation: Generation) -> PrefixQuery:
    return replace(query, boundaries=tuple(await named_under(query.boundaries, generation)))


def _plain_staged(staged: Staged, named: PrefixQuery, query: PrefixQuery) -> Staged:
    """What is staged for a query, given what was staged for it under keyed names."""
    plain = {name.prefix: boundary.prefix for name, boundary in zip(named.boundaries, query.boundaries, strict=True)}
    keys = tuple(RecordKey(key.namespace, plain[key.prefix], key.group, key.slice) for key in staged.keys)
    num_encrypted = sum(name.prefix != key.prefix for name, key in zip(staged.keys, keys, strict=True))
    return replace(staged, keys=keys, num_bytes=staged.num_bytes - num_encrypted * ENCRYPTION_BYTES)


def _plain_progress(progress: Progress) -> Progress:
    """Reports plain bytes, given the encrypted bytes so far once for each record."""
    num_records = 0

    def report(num_bytes: int) -> None:
        nonlocal num_records
        num_records += 1
        progress(max(1, num_bytes - num_records * ENCRYPTION_BYTES))

    return report


def _boundary(boundary: Boundary, generation: Generation) -> Boundary:
    prefix: PrefixHash = boundary.prefix if generation is None else generation.name_of(boundary.prefix)
    return Boundary(boundary.tokens, prefix)
