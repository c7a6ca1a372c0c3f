"""Which named pages a service knows, and what it tells of blocks that several of them have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import msgpack
import pytest

from kvstore.catalog.base import Addition, Catalog, LeaveReason, Removal
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.media import MEDIA
from kvstore.model.page_blocks import BlockGroup, PageBlocks
from kvstore.runtime.clock import SYSTEM_CLOCK, SystemClock
from kvstore.runtime.deadline import Deadline
from kvstore.store.cache_events.encoding import Event, encode_batch
from kvstore.store.cache_events.pages import Page, Pages
from kvstore.store.cache_events.placements import PlacementEvents, Topics
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.event_subscriber import Entry, apply
from kvstore.testing.loop_held import LoopHeld
from kvstore.testing.prompts import ATTENTION, HYBRID
from kvstore.testing.waiting import until
from kvstore.tiers.memory import MemoryTier

RED, BLUE = NamespaceId(b"r" * 16), NamespaceId(b"b" * 16)
NODE = "kv@node:here@m"

T = TypeVar("T")


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses of these tests are for some rounds, or for one."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.ROUND_S", 0.2)


class Memory:
    """Where a memory tier has pages of one slice."""

    def __init__(self) -> None:
        self.at: dict[NamespaceId, dict[PrefixHash, dict[int, int]]] = {RED: {}, BLUE: {}}
        self.num_looks = 0

    def boundaries(self, namespace: NamespaceId) -> dict[PrefixHash, dict[int, int]]:
        self.num_looks += 1
        return self.at[namespace]


class Published:
    """What was published, and an index that has read it."""

    is_behind = lacks_some = False

    def __init__(self) -> None:
        self.batches: list[tuple[str, bytes]] = []
        self.index: set[Entry] = set()

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        self.batches.append((topic, encode_batch(0.0, events)))
        apply(self.index, topic, events)

    def begin_again(self) -> None:
        self.batches.clear()

    def told_all(self) -> None:
        self.lacks_some = False

    def close(self) -> None:
        pass


class Ask:
    """A connection to a catalog that hangs, or fails."""

    def __init__(self) -> None:
        self.hangs = self.fails = False
        self.num_failed = 0

    async def __call__(self, what: str, work: Callable[[], T], deadline: Deadline) -> T:
        if self.hangs:
            async with deadline.scope(what):
                await asyncio.Event().wait()
        if self.fails and what == "lookup":
            self.num_failed += 1
            raise Unavailable("no connection")
        return work()


class Service:
    """The events of a service that has only memory, or memory and a catalog of Redis."""

    def __init__(self, catalog: Catalog | None = None) -> None:
        self.memory, self.published = Memory(), Published()
        self.events = PlacementEvents(
            self.published,
            Topics(("node:here",), "pool:kvstore"),
            memory=cast(MemoryTier, self.memory),
            memory_medium=MEDIA["memory"],
            levels={} if catalog is None else {Level.HOT: MEDIA["redis"]},
            catalog=catalog,
            clock=SYSTEM_CLOCK,
        )

    def save(self, blocks: PageBlocks, tenant: str = "") -> None:
        """Store a page, and name it."""
        self.memory.at[blocks.namespace][blocks.boundary.prefix] = {blocks.group: 1}
        self.events.name(blocks, 1, tenant)

    def drop(self, blocks: PageBlocks) -> None:
        del self.memory.at[blocks.namespace][blocks.boundary.prefix]
        self.events.changed(RecordKey(blocks.namespace, blocks.boundary.prefix, blocks.group, 0))

    @property
    def blocks(self) -> set[object]:
        return {entry[3] for entry in self.published.index}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running() as service:
        yield service


@asynccontextmanager
async def running(catalog: Catalog | None = None) -> AsyncIterator[Service]:
    service = Service(catalog)
    service.events.start()
    try:
        yield service
    finally:
        await service.events.aclose()


def page(
    name: str,
    hashes: Sequence[int],
    *,
    namespace: NamespaceId = RED,
    groups: int = 1,
    tokens: int = 0,
    model: str = "m",
    parent: int | None = None,
) -> PageBlocks:
    """A page whose blocks have these hashes, and this number of token ids each, behind the block `parent`."""
    return PageBlocks(
        namespace=namespace,
        boundary=Boundary(64, PrefixHash(name.encode().ljust(32))),
        group=0,
        model=model,
        hash_bytes=8,
        hashes=b"".join(one.to_bytes(8, "big") for one in hashes),
        parent=b"" if parent is None else parent.to_bytes(8, "big"),
        block_tokens=tokens or 16,
        groups=tuple(BlockGroup(index, "full_attention") for index in range(groups)),
        tokens=b"\xff" * (4 * len(hashes) * tokens),
    )


async def test_a_block_is_gone_when_the_last_page_with_it_is(service: Service) -> None:
    """Also if another tenant's page has it, at another place in another page."""
    mine, others, third = page("mine", [1, 2, 3]), page("others", [9, 2, 2], namespace=BLUE), page("third", [3])
    service.save(mine, "red")
    await until(lambda: service.blocks == {1, 2, 3})
    service.save(others, "blue")
    await until(lambda: service.blocks == {1, 2, 3, 9})
    service.drop(others)
    await until(lambda: service.blocks == {1, 2, 3})
    service.save(third, "red")
    service.drop(mine)
    await until(lambda: service.blocks == {3})
    service.drop(third)
    await until(lambda: not service.blocks)


async def test_a_page_is_published_after_the_one_before_it(service: Service) -> None:
    """Whatever order they are named in: routers ignore blocks whose parent they do not know. What is published stays
    when its parent is gone for a time."""
    first, second, third = page("a", [1, 2]), page("b", [3, 4], parent=2), page("c", [5, 6], parent=4)
    service.save(third)
    service.save(second)
    await asyncio.sleep(0.3)  # some rounds
    assert not service.published.batches
    service.save(first)
    await until(lambda: service.blocks == {1, 2, 3, 4, 5, 6})
    events = [event for _, batch in service.published.batches for event in msgpack.unpackb(batch)[1]]
    in_order = [block for event in events for block in event.get("block_hashes", ())]
    assert in_order == [1, 2, 3, 4, 5, 6]
    service.drop(first)
    await until(lambda: service.blocks == {3, 4, 5, 6})
    service.save(first)
    await until(lambda: service.blocks == {1, 2, 3, 4, 5, 6})


async def test_a_state_is_published_after_the_page_that_it_ends_in(service: Service) -> None:
    """The block before a state is inside a page, whichever of the two is named first."""
    state, pages = page("state", [2], parent=1), page("page", [1, 2, 3])
    service.save(state)
    await asyncio.sleep(0.3)  # some rounds
    assert not service.published.batches
    service.save(pages)
    await until(lambda: service.blocks == {1, 2, 3})
    service.drop(pages)
    await until(lambda: service.blocks == {2})


async def test_pages_that_wait_are_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many pages without the one before them, nothing of the oldest stays."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.UNPLACED_MAX", 2)
    async with running() as service:
        for number in range(8):
            service.save(page(f"p{number}", [100 + number], parent=number))
            await asyncio.sleep(0.25)  # a round
        assert set(vars(service.events)["_orphans"]) == {6, 7}


async def test_a_page_whose_blocks_are_known_publishes_nothing(service: Service) -> None:
    """Not even a batch without events, when it comes and when it goes."""
    first, same = page("first", [1, 2]), page("same", [1, 2], namespace=BLUE)
    service.save(first, "red")
    await until(lambda: service.blocks == {1, 2})
    num_batches = len(service.published.batches)
    service.save(same, "blue")
    await asyncio.sleep(0.3)  # some rounds
    service.drop(first)
    await asyncio.sleep(0.3)
    assert len(service.published.batches) == num_batches
    service.drop(same)
    await until(lambda: not service.blocks)


async def test_pages_that_do_not_change_are_not_looked_at(service: Service) -> None:
    """A service with memory alone knows of each change: it reads only the pages that have changed."""
    pages = [page(f"p{number}", [number]) for number in range(50)]
    for one in pages:
        service.save(one)
    await until(lambda: len(service.blocks) == 50)
    looks = service.memory.num_looks
    await asyncio.sleep(0.5)
    assert service.memory.num_looks == looks
    service.drop(pages[7])
    await until(lambda: len(service.blocks) == 49)
    assert service.memory.num_looks == looks + 1


class Stopped(SystemClock):
    """A clock on which all happens in one second."""

    def wall_ms(self) -> int:
        return 1_700_000_000_000


async def catalogs(ask: Ask) -> tuple[Catalog, Catalog]:
    """That of the service, and that of another service that shares it."""
    books = CatalogBooks()
    for catalog in (found := (DictCatalog(books, ask=ask), DictCatalog(books, clock=Stopped()))):
        for namespace in (RED, BLUE):
            await catalog.register(namespace, ATTENTION, "", deadline=Deadline.after(60))
    return found


async def test_changes_of_memory_hardly_wait_for_a_catalog_that_hangs() -> None:
    """However many namespaces have changed. When it answers again, what changed in Redis meanwhile is published."""
    ask = Ask()
    catalog, other = await catalogs(ask)
    red, blue, gone = page("red", [1]), page("blue", [2], namespace=BLUE), page("gone", [3])
    key = RecordKey(RED, red.boundary.prefix, 0, 0)
    async with running(catalog) as service:
        for one in (red, blue, gone):
            service.save(one)
        await until(lambda: service.blocks == {1, 2, 3})
        ask.hangs = True
        await other.add([Addition(key, Level.HOT, 10, 64)], deadline=Deadline.after(60))
        service.events.changed(key)
        for one in (red, blue):
            service.drop(one)
        started_s = time.monotonic()
        await until(lambda: service.blocks == {3})
        assert time.monotonic() - started_s < 4.0  # a second, on a machine that does nothing else
        ask.hangs = False
        await until(lambda: service.blocks == {1, 3})


async def test_what_the_catalog_did_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal by another service is published, although the catalog failed when its tombstone had been read."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.SWEPT", 0)
    ask, one, key = Ask(), page("one", [1]), RecordKey(RED, page("one", [1]).boundary.prefix, 0, 0)
    catalog, other = await catalogs(ask)
    await other.add([Addition(key, Level.HOT, 10, 64)], deadline=Deadline.after(60))
    async with running(catalog) as service:
        service.events.name(one, 1, "red")
        await until(lambda: service.blocks == {1})
        ask.fails = True
        await other.remove([Removal(key, Level.HOT, 10, LeaveReason.EVICTED)], deadline=Deadline.after(60))
        await until(lambda: ask.num_failed > 0)
        await asyncio.sleep(0.5)  # some rounds
        ask.fails = False
        await until(lambda: not service.blocks)


async def test_a_page_that_another_service_removes_twice_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stored in between. Tombstones have seconds, so both are equal."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.SWEPT", 0)
    one, key = page("one", [1]), RecordKey(RED, page("one", [1]).boundary.prefix, 0, 0)
    catalog, other = await catalogs(Ask())
    async with running(catalog) as service:
        service.events.name(one, 1, "red")
        for _ in range(3):
            await other.add([Addition(key, Level.HOT, 10, 64)], deadline=Deadline.after(60))
            service.events.changed(key)
            await until(lambda: service.blocks == {1})
            await other.remove([Removal(key, Level.HOT, 10, LeaveReason.EVICTED)], deadline=Deadline.after(60))
            await until(lambda: not service.blocks)


async def test_removals_of_services_whose_clocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """One removes more pages in a round than are read at first, and then one whose clock is ahead removes a page."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.SWEPT", 0)
    pages = [page(f"{number}", [number]) for number in range(200)]
    keys = [RecordKey(RED, one.boundary.prefix, 0, 0) for one in pages]
    gone = [Removal(key, Level.HOT, 10, LeaveReason.EVICTED) for key in keys]
    catalog, behind = await catalogs(Ask())
    await behind.add([Addition(key, Level.HOT, 10, 64) for key in keys], deadline=Deadline.after(60))
    async with running(catalog) as service:
        for one in pages:
            service.events.name(one, 1, "red")
        await until(lambda: len(service.blocks) == 200)
        await catalog.remove(gone[:1], deadline=Deadline.after(60))
        await until(lambda: len(service.blocks) == 199)
        await behind.remove(gone[1:-1], deadline=Deadline.after(60))
        await catalog.remove(gone[-1:], deadline=Deadline.after(60))
        await until(lambda: not service.blocks)


async def test_all_pages_are_published_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a subscriber asks for messages that are no longer kept: those that are there, in order, each block once. A
    page whose parent is gone waits for it."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.ALL_AGAIN_S", 0.0)
    first, second, third = page("first", [1, 2]), page("second", [3], parent=2), page("third", [2, 3, 4], parent=1)
    gone, orphan = page("gone", [8]), page("orphan", [9], parent=8)
    for one in (second, first, third, gone, orphan):
        service.save(one)
    await until(lambda: service.blocks == {1, 2, 3, 4, 8, 9})
    service.drop(gone)
    await until(lambda: service.blocks == {1, 2, 3, 4, 9})
    service.published.lacks_some = True
    service.save(page("new", [7]))
    await until(lambda: not service.published.lacks_some and service.blocks == {1, 2, 3, 4, 7})
    again = set[Entry]()
    for topic, batch in service.published.batches:
        apply(again, topic, msgpack.unpackb(batch)[1])
    assert again == service.published.index
    service.save(gone)
    service.drop(third)
    await until(lambda: service.blocks == {1, 2, 3, 7, 8, 9})


async def test_pages_that_all_wait_for_others_are_taken_back(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the node is published again, but who had its page is told that it is not there."""
    monkeypatch.setattr("kvstore.store.cache_events.placements.ALL_AGAIN_S", 0.0)
    gone, orphan = page("gone", [8]), page("orphan", [9], parent=8)
    for one in (gone, orphan):
        service.save(one)
    await until(lambda: service.blocks == {8, 9})
    service.drop(gone)
    await until(lambda: service.blocks == {9})
    service.published.lacks_some = True
    await until(lambda: not service.published.lacks_some)
    assert not service.blocks
    service.save(gone)
    await until(lambda: service.blocks == {8, 9})


async def test_groups_of_a_page_count_on_their_own(service: Service) -> None:
    wide, narrow = page("wide", [1, 2], groups=2), page("narrow", [1, 2], namespace=BLUE)
    service.save(wide)
    service.save(narrow)
    await until(lambda: len(service.published.index) == 4)
    service.drop(wide)
    await until(lambda: {entry[2:] for entry in service.published.index} == {(0, 1), (0, 2)})


async def test_a_page_that_is_not_stored_keeps_no_other_tenants_page_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are named: the oldest leave of the tenant that named most."""
    early = page("early", [7])
    service.events.name(early, 1, "red")
    for number in range(17_000):
        service.events.name(page(f"absent{number}", [number], namespace=BLUE), 1, "blue")
    service.save(early, "red")
    await until(lambda: service.blocks == {7})


async def test_of_too_many_pages_those_of_the_greedy_tenant_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.cache_events.placements.PAGES_MAX", 40)
    async with running() as service:
        for number in range(20):
            service.save(page(f"red{number}", [number]), "red")
        for number in range(60):
            service.save(page(f"blue{number}", [1000 + number], namespace=BLUE), "blue")
        expected = set[object]([*range(20), *range(1040, 1060)])
        await until(lambda: service.blocks == expected)
        assert len(service.published.batches) < 10, "those that leave share batches: a bounded number can be replayed"


def test_pages_of_engines_are_not_too_large() -> None:
    """Clients do not name larger ones, so that a service need not end their connections."""
    most = page("p", range(512), groups=10)  # 8,192 tokens between two boundaries, in a model of many states
    assert not most.is_too_large
    for larger in (
        page("p", range(512), groups=17),
        page("p", range(1024), groups=9),
        page("p", [1, 2], tokens=65_537),
    ):
        assert larger.is_too_large


async def test_a_node_is_cleared_once(service: Service) -> None:
    """With its first message, not with that of each model: llm-d drops the blocks of all models."""
    for number, model in enumerate(("one", "two", "three")):
        service.save(page(model, [number], model=model))
        await until(lambda upto=number: service.blocks == set(range(upto + 1)))  # type: ignore[misc]
    cleared = [b"AllBlocksCleared" in batch for _, batch in service.published.batches]
    assert cleared == [True, False, False, False]
    assert service.published.batches[0][0] == "kv@node:here@one"


def test_a_models_name_does_not_change_a_topics_parts() -> None:
    topics = Topics(("node:here", "10.0.0.7:8000"), "pool:kvstore")
    assert topics.of(MEDIA["memory"], "org/model") == ["kv@node:here@org/model", "kv@10.0.0.7:8000@org/model"]
    assert topics.of(MEDIA["redis"], "a@b%40c") == ["kv@pool:kvstore@a%40b%2540c"]


def test_names_are_bounded_in_bytes() -> None:
    pages = Pages(1000, 100_000)
    few = [Page(page(f"few{number}", [1]), "few", 1) for number in range(3)]
    many = [Page(page(f"many{number}", range(16), tokens=64), "many", 1) for number in range(50)]
    for one in [*few, *many]:
        pages.add(one)
    left = []
    while (oldest := pages.excess()) is not None:
        pages.remove(oldest)
        left.append(oldest)
    assert left and left == many[: len(left)]
    assert pages.used_bytes <= 100_000
    for one in [*few, *many[len(left) :]]:
        pages.remove(one)
    assert (len(pages), pages.used_bytes) == (0, 0)


async def test_large_pages_do_not_hold_the_loop(service: Service) -> None:
    """They are compared and published in pieces; no batch is large."""
    held = LoopHeld()
    large = [page(f"{number}", range(number << 20, (number << 20) + 256), groups=16, tokens=32) for number in range(10)]
    async with held.watching():
        for one in large:
            service.save(one)
        await until(lambda: len(service.blocks) == 10 * 256)
        for one in large:
            service.drop(one)
        await until(lambda: not service.blocks)
    assert max(len(batch) for _, batch in service.published.batches) <= 64 << 10
    assert held.longest_s < 0.2, held.longest_s


async def test_many_models_do_not_hold_the_loop(service: Service) -> None:
    """Pages that wait for the block before them ask for it in their own model alone: a tenant may name any number."""
    models = [page(f"{number}", [number], groups=16, model=f"m{number}") for number in range(2_000)]
    waiting = [page(f"w{number}", [1 << 40 | number], parent=1 << 50) for number in range(128)]
    for one in models:
        service.save(one)
    await until(lambda: len(service.published.index) == 16 * 2_000)
    held = LoopHeld()
    async with held.watching():
        for one in waiting:
            service.save(one)
        await asyncio.sleep(0.5)
    assert held.longest_s < 0.2, held.longest_s


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hashes": bytes(5 * 8)}, "blocks"),
        ({"block_tokens": 17}, "blocks"),
        ({"group": 2}, "group"),
        ({"boundary": Boundary(0, PrefixHash(bytes(32)))}, "boundary"),
        ({"boundary": Boundary(1 << 30, PrefixHash(bytes(32)))}, "boundary"),
        ({"boundary": Boundary(96, PrefixHash(bytes(32)))}, "blocks"),
        ({"group": 1, "block_tokens": 65, "hashes": bytes(8)}, "blocks"),
    ],
)
def test_blocks_that_are_not_of_one_page_are_refused(change: dict[str, object], field: str) -> None:
    layout: Layout = HYBRID
    blocks = page("p", [1, 2, 3, 4])
    blocks.check_page(ATTENTION)
    blocks._replace(group=1, block_tokens=64, hashes=bytes(8)).check_page(layout)
    with pytest.raises(InvalidRequest, match=field):
        blocks._replace(**change).check_page(layout)  # type: ignore[arg-type]
