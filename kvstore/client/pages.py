"""`PageDoor`: pages under a caller's own keys, for engines that name their pages themselves. For plain threads.

`write_from` stores pages, `exists` fetches them to this node, `read_into` reads them; docs/engines.md has an example.

A key is a text or bytes that names all the content before its page and in it, like the hash of a chain of pages. What a
namespace's description says and the key together must determine a page's bytes: the first writer's bytes stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvstore.api import LeasedRecord, LeaseId, Outcome, PageStore, PrefixQuery, SaveOutcome, Staged
from kvstore.client.blocking import BlockingStore
from kvstore.client.page_arguments import (
    PageKey,
    check_element_bytes,
    check_fields,
    check_keys,
    check_report,
    check_timeout,
    checked_pages,
    checked_slices,
    layout_of,
    wrong,
)
from kvstore.client.page_buffers import BufferGuard, CallEnded, Pieces, Views, decode_page, encode_page, release
from kvstore.client.page_leases import Cuts, Leases
from kvstore.codec import RAW, CodecPool, chain_for_element_bytes
from kvstore.errors import Closed, CorruptRecord, InvalidRequest, KVStoreError, Unavailable
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import Keyed, KeyedAlone
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, NamespaceNotOpen, describe_layout
from kvstore.runtime.background import gather_all
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.wire.messages import SAVE_PLACES_MAX

_log = logging.getLogger(__name__)

Value = TypeVar("Value")
Item = TypeVar("Item")
_IN_FLIGHT, _IN_FLIGHT_BYTES = 12, 256 << 20
"""Pages that one call reads at a time."""
_TOGETHER_BYTES, _WRITES_AT_ONCE = 8 << 20, 3
"""Pages that one call makes and saves with one request, and such requests at a time. Fewer pages cost more for each;
with more of them the service waits longer for the first ones."""
_CODEC_BYTES = 256 << 20
_SEARCHED = ("nothing_stored", "gone")
"""For these reasons the report names the missing page, so that the store can find out why it is missing."""


def describe_pages(
    fields: Mapping[str, Any], *, page_tokens: int, num_slices: int = 1, chained: bool = True
) -> NamespaceDescription:
    """The description of a namespace of pages.

    Args:
        fields: Everything on which the bytes of a page depend, its key apart: plain values without floats. `weights_id`
            and `model` are shown to operators; `layout` is taken.
        page_tokens: Tokens of a page.
        num_slices: Parts of a page that are written separately, one by each rank. A page is there when all are.
        chained: A page is of use only behind all pages before it. False: it is of use alone, like a recurrent state, or
            with the few before it, like the last pages of a window.

    Raises:
        InvalidRequest: A value is not plain, or out of range.
    """
    check_fields(fields, page_tokens, num_slices, chained)
    layout = Layout(page_tokens, (GroupLayout(Keyed() if chained else KeyedAlone(), num_slices),))
    return NamespaceDescription.from_fields({**fields, "layout": describe_layout(layout)})


class PageDoor:
    """One namespace of pages. Calls wait, never much past `timeout_s`, and may be made by several threads at once.

    They fail as `BlockingStore` does: `Unavailable` when the store cannot be reached or does not answer in time,
    `Closed` once the door or its store was closed. A mistake of the caller's is an `InvalidRequest`, which names the
    argument, what was expected and what was seen; so is a call that the service refuses, as for a token that may not
    save. A page that is missing, damaged or not readable in time is not there, and no error. The caller's buffers are
    not touched once a call has returned or raised.

    Args:
        store: Stays the caller's.
        description: From `describe_pages`.
        slices: Which slices of a page this caller holds, each once.
        element_bytes: Width of the elements of a page, for compression; `None`: pages are stored as they are.
        timeout_s: The longest a call takes, above 0.
        pool: Threads for checksums and codecs, if the caller has some; else two of its own.

    Raises:
        InvalidRequest: An argument is wrong.
    """

    def __init__(
        self,
        store: BlockingStore,
        description: NamespaceDescription,
        *,
        slices: Sequence[int] = (0,),
        element_bytes: int | None = None,
        timeout_s: float = 10.0,
        pool: CodecPool | None = None,
    ) -> None:
        if not isinstance(store, BlockingStore):
            raise wrong("store", "a door needs a store for plain threads", "a BlockingStore", store)
        if pool is not None and not isinstance(pool, CodecPool):
            raise wrong("pool", "a door needs threads for codecs", "a CodecPool, or None", pool)
        check_element_bytes(element_bytes)
        check_timeout(timeout_s)
        self._store = store
        self._description = description
        self._layout = layout_of(description)
        self._slices = checked_slices(slices, self._layout.groups[0].num_slices)
        self._chain = RAW if element_bytes is None else chain_for_element_bytes(element_bytes)
        self._timeout_s = timeout_s
        self._owns_pool = pool is None
        self._pool = pool or CodecPool(num_threads=2, limit_bytes=_CODEC_BYTES)
        self._leases, self._cuts = Leases(), Cuts()
        self._namespace: NamespaceId | None = None
        self._closed = False

    @property
    def namespace(self) -> NamespaceId | None:
        """The namespace, once a call has opened it."""
        return self._namespace

    @property
    def layout(self) -> Layout:
        """Tokens of a page, and whether a page is of use only behind all pages before it."""
        return self._layout

    def open(self) -> NamespaceId:
        """Open the namespace, which the first call does otherwise."""
        return self._call(self._open, self._deadline(None))

    def present(self, keys: Sequence[PageKey], *, timeout_s: float | None = None) -> list[bool]:
        """Which pages look stored: an answer without I/O where the store has an index. Nothing is fetched.

        Args:
            keys: In the order of their chain, all different.
            timeout_s: The longest that this call takes; `None`: as the others. Zero or less is too late: `Unavailable`.
        """
        deadline = self._deadline(timeout_s)
        boundaries = _boundaries(keys, self._layout.page_tokens, None)
        return self._call(lambda call: self._present(call, boundaries), deadline)

    def exists(self, keys: Sequence[PageKey], *, after: PageKey | None = None) -> int:
        """How many of the pages, from the first on, are stored. They were fetched to this node and verified, and stay
        readable for as long as the service leases them, or until they are read.

        Args:
            keys: In the order of their chain, all different.
            after: The key of the page before them, where the caller knows it: retention keeps it as long as them.
        """
        deadline = self._deadline(None)
        boundaries = _boundaries(keys, self._layout.page_tokens, after)
        skipped = len(boundaries) - len(keys)
        return self._call(lambda call: self._exists(call, boundaries, skipped), deadline)

    def read_into(self, keys: Sequence[PageKey], pages: Sequence[Pieces], *, timeout_s: float | None = None) -> int:
        """Read pages until one is not there; returns how many. Buffers of the others hold anything.

        Args:
            keys: In the order of their chain, all different.
            pages: For each key where to write its page.
            timeout_s: As of `present`.

        Raises:
            InvalidRequest: As of every call; also if a page that is stored has another size than its buffers. Pages
                before it may have been read, and can be read again.
        """
        deadline = self._deadline(timeout_s)
        boundaries = _boundaries(keys, self._layout.page_tokens, None)
        views = checked_pages(keys, pages, len(self._slices), writable=True)
        return self._call(lambda call: self._read(call, boundaries, views), deadline, views)

    def write_from(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[Pieces],
        *,
        after: PageKey | None = None,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store the pages that are not stored yet.

        Returns for each whether it is stored now. True: in this node's memory or in a slower tier. False: the store has
        no room for it, or did not take it in time.

        Args:
            keys: In the order of their chain, all different.
            pages: For each key its page. It must not change during the call.
            after: As of `exists`.
            timeout_s: As of `present`.

        Raises:
            InvalidRequest: As of every call; also if the service refuses a page, since it is too large or the token may
                not save. Others may have been stored.
        """
        deadline = self._deadline(timeout_s)
        boundaries = _boundaries(keys, self._layout.page_tokens, after)
        views = checked_pages(keys, pages, len(self._slices), writable=False)
        return self._call(lambda call: self._write(call, boundaries, views), deadline, views)

    def report(
        self,
        request: str,
        keys: Sequence[PageKey],
        num_found: int,
        *,
        reason: str,
        held: int = 0,
        detail: Mapping[str, object] | None = None,
    ) -> None:
        """Report how far a query of pages reached, so that `kvstore explain` can say why not further. Returns at once,
        and may be lost. Nothing is reported before the namespace is open, or once the door is closed.

        Args:
            request: The name under which it is explained.
            keys: What was wanted, in the order of the chain.
            num_found: How many of them, from the first on, can be used.
            reason: Why not more, as docs/explain.md lists; not used if all can. For `nothing_stored` and `gone` the
                report has the reason for which the store cut the latest query short at this page, if it did.
            held: Pages before them that the engine has itself.
            detail: Plain values to show beside the reason: text, numbers, booleans.

        Raises:
            InvalidRequest: An argument is wrong. It fails for no other reason.
        """
        check_report(request, keys, num_found, self._layout.page_tokens, reason=reason, held=held, detail=detail)
        if self._namespace is None or self._closed or not keys:
            return
        page_tokens, wanted, stop, shown = self._layout.page_tokens, held + len(keys), None, dict(detail or {})
        if num_found < len(keys):
            key = keys[num_found]
            page_key = {"page_key": key if isinstance(key, str) else key.hex()}
            shown = page_key | shown | page_key  # first, since a service keeps the first details
            if reason in _SEARCHED:
                stop = Boundary((held + num_found + 1) * page_tokens, name_of_page(key))
        outcome = Outcome(
            request,
            self._namespace,
            prompt_tokens=wanted * page_tokens,
            cap_tokens=wanted * page_tokens,
            local_tokens=held * page_tokens,
            resume_tokens=(held + num_found) * page_tokens,
            reason=reason if num_found < len(keys) else "",
            detail=shown,
            stop=stop,
        )

        async def send(store: PageStore) -> None:
            store.report(self._with_cut(outcome))

        with suppress(Closed):
            self._store.submit(send)

    def _with_cut(self, outcome: Outcome) -> Outcome:
        """An outcome with the reason that the store gave for the page where it stops, if it gave one."""
        word, _, tier = self._cuts.at(outcome.stop.prefix).partition(":") if outcome.stop is not None else ("", "", "")
        if not word:
            return outcome
        detail = {**outcome.detail, "tier": tier} if tier else outcome.detail
        return replace(outcome, reason=word, detail=detail, stop=outcome.stop if word in _SEARCHED else None)

    def close(self) -> None:
        """End the door's own threads; later calls fail `Closed`. Idempotent."""
        self._closed = True
        if self._owns_pool:
            self._pool.close()

    # calls

    def _deadline(self, timeout_s: float | None) -> Deadline:
        """Of a call that begins now: to check the arguments of a large one takes seconds too."""
        if timeout_s is not None:
            check_timeout(timeout_s, may_be_over=True)
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def _call(
        self,
        work: Callable[[_Call], Coroutine[Any, Any, Value]],
        deadline: Deadline,
        views: Sequence[Views] = (),
    ) -> Value:
        """Wait for `work`. Views of the caller's buffers are released with its end, or they could not be closed yet."""
        if self._closed:
            raise Closed("the door is closed")
        guard = BufferGuard()
        try:
            return self._store.run(lambda store: self._work(_Call(store, guard, deadline), work), deadline=deadline)
        finally:
            guard.close()
            release(views)

    async def _work(self, call: _Call, work: Callable[[_Call], Coroutine[Any, Any, Value]]) -> Value:
        try:
            return await work(call)
        except NamespaceNotOpen:  # the client opens again those alone that it used last, and used many others since
            self._namespace = None
            return await work(call)
        except ValueError:
            if call.guard.closed:  # the caller has left, and its views were released
                raise asyncio.CancelledError from None
            raise

    async def _open(self, call: _Call) -> NamespaceId:
        if self._namespace is None:
            self._namespace = await call.store.open_namespace(self._description, deadline=call.deadline)
        return self._namespace

    async def _query(self, call: _Call, boundaries: Sequence[Boundary], skipped: int) -> PrefixQuery:
        return PrefixQuery(
            namespace=await self._open(call),
            boundaries=tuple(boundaries),
            local_tokens=skipped * self._layout.page_tokens,
            cap_tokens=boundaries[-1].tokens,
            step_tokens=self._layout.page_tokens,
        )

    async def _present(self, call: _Call, boundaries: Sequence[Boundary]) -> list[bool]:
        if not boundaries:
            return []
        found = await call.store.lookup(await self._query(call, boundaries, 0), deadline=call.deadline)
        present = [bool(bits & 1) for bits in found.groups_present]
        num_found = present.index(False) if False in present else len(present)
        cut = f"tier_failed:{found.silent[0]}" if found.silent else ""
        self._cuts.note([boundary.prefix for boundary in boundaries], num_found, cut)
        return present

    async def _exists(self, call: _Call, boundaries: Sequence[Boundary], skipped: int) -> int:
        staged = await self._stage(call, boundaries, skipped)
        num_pages = self._num_pages(staged, skipped)
        if staged.lease is not None:
            prefixes = [boundary.prefix for boundary in boundaries[skipped : skipped + num_pages]]
            for ended in self._leases.add(staged.lease, prefixes, staged.lease_s):
                await call.store.release(ended)
        return num_pages

    async def _stage(self, call: _Call, boundaries: Sequence[Boundary], skipped: int) -> Staged:
        if len(boundaries) <= skipped:
            return Staged(None, 0)
        query = await self._query(call, boundaries, skipped)
        staged = await call.store.stage(query, deadline=call.deadline)
        prefixes = [boundary.prefix for boundary in boundaries[skipped:]]
        self._cuts.note(prefixes, self._num_pages(staged, skipped), staged.cut)
        return staged

    def _num_pages(self, staged: Staged, skipped: int) -> int:
        return max(0, staged.resume_tokens // self._layout.page_tokens - skipped)

    # reading

    async def _read(self, call: _Call, boundaries: Sequence[Boundary], pages: Sequence[Views]) -> int:
        """At each place a lease that calls share is tried once, then staging once: what neither reads is not there."""
        prefixes = [boundary.prefix for boundary in boundaries]
        done, tried, staged_at = 0, -1, -1
        while done < len(prefixes) and staged_at < done:
            lease, num_pages = self._leases.find(prefixes[done:])
            if lease is not None and tried < done:
                tried, stop = done, done + num_pages
                num_read = await self._read_leased(call, lease, prefixes, pages, range(done, stop))
                for ended in self._leases.used(lease, prefixes[done:stop], all_of_it=num_read < num_pages):
                    await call.store.release(ended)
                done += num_read
                continue
            staged_at = done
            rest = _renumbered(boundaries[done:], self._layout.page_tokens)
            try:
                done += await self._read_staged(call, rest, prefixes, pages, done)
            except Unavailable as error:
                if not done:
                    raise
                _log.debug("of %d pages %d were read: %s", len(prefixes), done, error)
                break
        return done

    async def _read_staged(
        self,
        call: _Call,
        rest: Sequence[Boundary],
        prefixes: Sequence[PrefixHash],
        pages: Sequence[Views],
        start: int,
    ) -> int:
        """Stage the pages from `start` on for this call alone, and read them; returns how many. Another call can end a
        lease that they share, as often as it is repeated.
        """
        staged = await self._stage(call, rest, 0)
        if staged.lease is None:
            return 0
        try:
            stop = start + self._num_pages(staged, 0)
            return await self._read_leased(call, staged.lease, prefixes, pages, range(start, stop))
        finally:
            await call.store.release(staged.lease)

    async def _read_leased(
        self, call: _Call, lease: LeaseId, prefixes: Sequence[PrefixHash], pages: Sequence[Views], which: range
    ) -> int:
        """Read those of the pages that a lease holds; returns how many from the first on."""
        namespace = await self._open(call)
        wanted = [
            (RecordKey(namespace, prefixes[at], 0, index), target, f"pages[{at}]")
            for at in which
            for index, target in zip(self._slices, self._shares(pages[at]), strict=True)
        ]
        page_bytes = max((sum(piece.nbytes for piece in page) for page in pages), default=0)

        try:
            records = await call.store.load_many(lease, [key for key, _, _ in wanted], deadline=call.deadline)
        except (Unavailable, NamespaceNotOpen) as error:  # the lease has ended
            _log.debug("pages that were staged were not read: %s", error)
            return 0
        reads = list(zip(records, wanted, strict=True))
        was_read = await _in_turns(
            reads, _at_once(_IN_FLIGHT, page_bytes), call.deadline, lambda one: self._read_record(call, one[0], *one[1])
        )
        first_lost = next((at for at, done in enumerate(was_read) if not done), len(was_read))
        return first_lost // len(self._slices)

    async def _read_record(self, call: _Call, record: LeasedRecord, key: RecordKey, target: Views, field: str) -> bool:
        try:
            loaded = await record.load(deadline=call.deadline)
            await self._run(loaded.num_bytes, lambda: decode_page(loaded, target, call.guard, field), call.deadline)
        except CorruptRecord as error:
            with suppress(Unavailable, InvalidRequest):  # the service is gone, or this token may not discard
                await call.store.discard(key, str(error), deadline=call.deadline)
            return False
        except NamespaceNotOpen:
            return False
        except (Closed, InvalidRequest):
            raise
        except (KVStoreError, CallEnded) as error:
            _log.debug("a page that the store has was not read: %s", error)
            return False
        return True

    # writing

    async def _write(self, call: _Call, boundaries: Sequence[Boundary], pages: Sequence[Views]) -> list[bool]:
        skipped = len(boundaries) - len(pages)
        there = (await self._present(call, boundaries))[skipped:]
        namespace = await self._open(call)
        writes = [
            _Write(at, RecordKey(namespace, boundaries[skipped + at].prefix, 0, index), source)
            for at, page in enumerate(pages)
            if not there[at]
            for index, source in zip(self._slices, self._shares(page), strict=True)
        ]
        parts = _parts(writes)
        part_bytes = max((sum(write.num_bytes for write in part) for part in parts), default=0)
        outcomes = await _in_turns(
            parts, _at_once(_WRITES_AT_ONCE, part_bytes), call.deadline, lambda part: self._write_together(call, part)
        )
        written = [one for part, done in zip(parts, outcomes, strict=True) for one in done or [False] * len(part)]
        lost = {write.page for write, was_written in zip(writes, written, strict=True) if not was_written}
        return [at not in lost for at in range(len(pages))]

    async def _write_together(self, call: _Call, writes: Sequence[_Write]) -> list[bool]:
        """Make records in one thread and save them with one request; returns which are stored."""
        try:
            records = await self._run(
                sum(HEADER_BYTES + write.num_bytes for write in writes), self._encoder(call, writes), call.deadline
            )
            outcomes = await call.store.save_many(records, deadline=call.deadline)
        except NamespaceNotOpen:
            return [False] * len(writes)
        except InvalidRequest as error:
            if len(writes) > 1:  # it does not say which of them: so each one by itself
                return [(await self._write_together(call, [write]))[0] for write in writes]
            if error.details.get("field") != "record":
                raise
            raise InvalidRequest(error.message, **{**error.details, "field": f"pages[{writes[0].page}]"}) from error
        except Closed:
            raise
        except (KVStoreError, CallEnded):
            return [False] * len(writes)
        return [outcome in (SaveOutcome.STORED, SaveOutcome.EXISTS) for outcome in outcomes]

    def _encoder(self, call: _Call, writes: Sequence[_Write]) -> Callable[[], list[Record]]:
        """What makes the records, in a thread."""
        kind, span = self._layout.groups[0].record_at(self._layout.page_tokens, self._layout.page_tokens)
        made = []
        for write in writes:
            header = HeaderV1.unsealed(
                write.key,
                kind,
                span,
                codec_chain=self._chain,
                decoded_bytes=write.num_bytes,
                created_ms=SYSTEM_CLOCK.wall_ms(),
            )
            made.append((header, write.source, call.store.shared_buffer(HEADER_BYTES + write.num_bytes)))
        return lambda: [encode_page(header, source, call.guard, target) for header, source, target in made]

    def _shares(self, page: Views) -> list[Views]:
        """The buffers of each slice."""
        step = len(page) // len(self._slices)
        return [page[at : at + step] for at in range(0, len(page), step)]

    async def _run(self, num_bytes: int, work: Callable[[], Value], deadline: Deadline) -> Value:
        return await self._pool.run(min(num_bytes, self._pool.limit_bytes), work, deadline=deadline)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a door, on the loop's thread."""

    store: PageStore
    guard: BufferGuard
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class _Write:
    """A slice of a page that becomes a record: the index of its page, its key and where it is."""

    page: int
    key: RecordKey
    source: Views

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.source)


def _parts(writes: Sequence[_Write]) -> list[Sequence[_Write]]:
    """The writes, divided into those that are saved together: some megabytes of them."""
    largest_bytes = max((write.num_bytes for write in writes), default=0)
    step = min(SAVE_PLACES_MAX, max(1, _TOGETHER_BYTES // max(1, largest_bytes)))
    return [writes[start : start + step] for start in range(0, len(writes), step)]


def _boundaries(keys: Sequence[PageKey], page_tokens: int, after: PageKey | None) -> list[Boundary]:
    """The keys as boundaries of a query, one page apart.

    Raises:
        InvalidRequest: Two keys are the same, they are too many for one query, or one is no key.
    """
    check_keys(keys, page_tokens, after)
    named = keys if after is None else [after, *keys]
    boundaries = [Boundary((at + 1) * page_tokens, name_of_page(key)) for at, key in enumerate(named)]
    if len({boundary.prefix for boundary in boundaries}) < len(boundaries):
        seen = set[PrefixHash]()
        for at, boundary in enumerate(boundaries, start=len(keys) - len(named)):
            if boundary.prefix in seen:
                raise wrong(f"keys[{at}]", "a chain of pages has each key once", "a key that is new", keys[at])
            seen.add(boundary.prefix)
    return boundaries


def _at_once(most: int, item_bytes: int) -> int:
    """How many items may be in memory of ours at a time: at most `most`, and fewer large ones."""
    return max(1, min(most, _IN_FLIGHT_BYTES // max(1, item_bytes)))


async def _in_turns(
    items: Sequence[Item], at_once: int, deadline: Deadline, work: Callable[[Item], Coroutine[Any, Any, Value]]
) -> list[Value | None]:
    """The result of `work` for each item, `at_once` of them at a time; `None`: it had not begun at the deadline.

    A task for each item would be simpler: 10,000 of them take longer to end than a caller waits behind its deadline.
    """
    results: list[Value | None] = [None] * len(items)
    rest = iter(range(len(items)))

    async def take_turns() -> None:
        for at in rest:
            if deadline.expired:
                return
            results[at] = await work(items[at])

    await gather_all(take_turns() for _ in range(min(at_once, len(items))))
    return results


def _renumbered(boundaries: Sequence[Boundary], page_tokens: int) -> list[Boundary]:
    return [Boundary((at + 1) * page_tokens, boundary.prefix) for at, boundary in enumerate(boundaries)]


def name_of_page(key: PageKey) -> PrefixHash:
    """The name under which the store keeps a page: the prefix hash in its records' keys."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    return PrefixHash(hashlib.sha256(b"kvstore page v1\0" + data).digest())
