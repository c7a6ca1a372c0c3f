"""A tier wrapper that keeps a failing tier from holding up its callers: breaker, limits, meters."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from kvstore.errors import KVStoreError, Unavailable, UnsupportedFormat
from kvstore.format.record import Record
from kvstore.format.versions import STORE_VERSION_PLACE, check_store_version
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import EventKind, Events
from kvstore.runtime.meters import Meters
from kvstore.runtime.tracing import Tracing
from kvstore.tiers.base import Concern, Entry, PutOutcome, Tier, TierUsage
from kvstore.tiers.wrap.breaker import Breaker

__all__ = ["GuardedTier", "tell_put_aside"]

_log = logging.getLogger(__name__)

_PROBE_KEY = RecordKey(NamespaceId(bytes(NAMESPACE_BYTES)), PrefixHash(bytes(PREFIX_BYTES)), 0, 0)
_PROBE_S = 2.0
_VERSION_S = 10.0
"""How long an answer to "which version has the tier?" holds while calls succeed."""


def tell_put_aside(events: Events, tier: str, key: RecordKey, reason: str) -> None:
    """Emit an event for a record that a tier has put aside."""
    about: dict[str, str | int | float] = {"tier": tier, "group": key.group, "slice": key.slice, "reason": reason}
    text = f"a record in {tier} was put aside, and not served: {reason}"
    events.add(EventKind.QUARANTINED, text, namespace=key.namespace.hex(), detail={**about, "prefix": key.prefix.hex()})


class GuardedTier(Tier):
    """Passes calls on to `inner` while it is healthy, refuses them at once with `Unavailable` while it is not.

    A newer release may take the tier over while it is away, or while we run. So its version is read again before it is
    used again, before the first write after a failed call, and before a write when the last look is 10 s ago. A tier
    with a newer version is left alone, as one that does not answer.

    Args:
        inner: The tier; owned from now on.
        meters: Where calls, hits, bytes and errors are counted (see README.md).
        breaker: Decides when to stop asking; `None`: a default one.
        calls_max: Calls at a time; further ones are refused, so that a slow tier does not tie up the whole node.
        clock: For the length of calls.
        events: Told when the tier is left alone, when it is back, and of each record that is put aside.
        tracing: Makes a span of each call.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        meters: Meters,
        breaker: Breaker | None = None,
        calls_max: int = 1024,
        clock: Clock = SYSTEM_CLOCK,
        events: Events | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self.name = inner.name
        self.inner = inner
        inner.on_quarantine = self._put_aside
        inner.on_drop = self._dropped
        self._meters = meters
        self._breaker = breaker or Breaker()
        self._calls_max = calls_max
        self._num_calls = 0
        self._clock = clock
        self._events = events if events is not None else Events(clock)
        self._background = Background(f"guard of tier {inner.name}")
        self._closed = False
        self._why = ""  # it was left alone last
        self._version_holds_until_s = clock.monotonic_s() + _VERSION_S  # whoever opens the tier has read it
        self._reading_version = asyncio.Lock()

    @property
    def num_quarantined(self) -> int:
        return self.inner.num_quarantined

    @property
    def is_open(self) -> bool:
        """True while calls are refused."""
        return self._breaker.is_open

    def check_used(self) -> None:
        """Refuse what is asked of the tier's server past the tier, while the tier is left alone.

        Raises:
            Unavailable: It is left alone.
        """
        self._check_closed_breaker()

    def leave_alone(self, why: str) -> None:
        """Refuse calls until a probe succeeds: whoever opened the tier has seen that it does not answer, and has said
        so. Without that a tier which knows its usage without asking would pass for a healthy one until it is needed.
        """
        if self._breaker.gave_proof():
            self._off(why)

    async def head(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        with self._call("head", deadline):
            self._count("heads", len(keys))
            return await self.inner.head(keys, deadline=deadline)

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        with self._call("get", deadline):
            self._count("reads")
            record = await self.inner.get(key, deadline=deadline, allocate=allocate)
        if record is not None:
            self._count("hits")
            self._count("read_bytes", record.num_bytes)
        return record

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        return await self._put(self.inner.put, record, deadline)

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        return await self._put(self.inner.put_evictable, record, deadline)

    async def _put(self, put: Callable[..., Awaitable[PutOutcome]], record: Record, deadline: Deadline) -> PutOutcome:
        with self._call("put", deadline):
            self._count("puts")
            await self._check_version(deadline)
            outcome = await put(record, deadline=deadline)
        if outcome is PutOutcome.STORED:
            self._count("put_bytes", record.num_bytes)
        elif outcome is PutOutcome.FULL:
            self._count("full")
        return outcome

    async def delete(self, key: RecordKey, *, deadline: Deadline) -> bool:
        with self._call("delete", deadline):
            await self._check_version(deadline)
            return await self.inner.delete(key, deadline=deadline)

    def cost_bytes(self, num_bytes: int) -> int:
        return self.inner.cost_bytes(num_bytes)

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        with self._call("delete_all", deadline):
            await self._check_version(deadline)
            await self.inner.delete_all(keys, deadline=deadline)

    async def allow_eviction(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        with self._call("allow_eviction", deadline):
            await self._check_version(deadline)
            await self.inner.allow_eviction(keys, deadline=deadline)

    async def quarantine(self, key: RecordKey, reason: str, *, seen: Record | None = None, deadline: Deadline) -> bool:
        with self._call("quarantine", deadline):
            await self._check_version(deadline)
            return await self.inner.quarantine(key, reason, seen=seen, deadline=deadline)

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        """As `Tier.scan`. Does not affect the breaker: scans are the operator's, and no request waits for them."""
        self._check_closed_breaker()
        async for entry in self.inner.scan(namespace):
            yield entry

    async def put_manifest(self, namespace: NamespaceId, manifest: bytes, *, deadline: Deadline) -> None:
        with self._call("put_manifest", deadline):
            await self._check_version(deadline)
            await self.inner.put_manifest(namespace, manifest, deadline=deadline)

    async def get_manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        with self._call("get_manifest", deadline):
            return await self.inner.get_manifest(namespace, deadline=deadline)

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        with self._call("usage", deadline):
            usage = await self.inner.usage(deadline=deadline)
        if not self._version_holds() and not self._reading_version.locked():  # nobody may write for a long time
            self._background.spawn(self._look_at_version(), "version")
        return usage

    async def concerns(self, *, deadline: Deadline) -> list[Concern]:
        with self._call("concerns", deadline):
            return await self.inner.concerns(deadline=deadline)

    async def aclose(self) -> None:
        self._closed = True
        await self._background.aclose()
        await self.inner.aclose()

    def _put_aside(self, key: RecordKey, reason: str) -> None:
        tell_put_aside(self._events, self.name, key, reason)
        if self.on_quarantine is not None:
            self.on_quarantine(key, reason)

    def _dropped(self, keys: Sequence[RecordKey]) -> None:
        if self.on_drop is not None:
            self.on_drop(keys)

    def _call(self, what: str, deadline: Deadline) -> AbstractContextManager[None]:
        return self._guard(deadline) if self._tracing is None else self._traced(self._tracing, what, deadline)

    @contextmanager
    def _traced(self, tracing: Tracing, what: str, deadline: Deadline) -> Iterator[None]:
        with tracing.span(f"{self.name}.{what}", tier=self.name), self._guard(deadline):
            yield

    @contextmanager
    def _guard(self, deadline: Deadline) -> Iterator[None]:
        """Refuse the call, or run it and tell the breaker how it ended."""
        if not self._closed:  # else the inner tier raises `Closed`
            self._check_closed_breaker()
        if self._num_calls >= self._calls_max:
            self._count("refused")
            raise Unavailable("too many calls wait for the tier", tier=self.name, limit=self._calls_max)
        started_s = self._clock.monotonic_s()
        self._num_calls += 1
        self._meters.set("tier_calls", self._num_calls, tier=self.name)
        try:
            yield
        except Unavailable as error:
            self._count("errors")
            self._version_holds_until_s = -math.inf
            if deadline.expired:
                opened = self._breaker.ran_out(started_s, self._clock.monotonic_s(), by_deadline=True)
            else:
                opened = self._breaker.failed()
            if opened:
                self._opened(str(error))
            raise
        except asyncio.CancelledError:
            if self._breaker.ran_out(started_s, self._clock.monotonic_s(), by_deadline=False):
                self._opened("its callers went away before an answer came: check its load and the network")
            raise
        else:
            self._breaker.succeeded(self._clock.monotonic_s())
        finally:
            self._num_calls -= 1
            self._meters.set("tier_calls", self._num_calls, tier=self.name)
            self._meters.set("tier_quarantined", self.inner.num_quarantined, tier=self.name)

    async def _check_version(self, deadline: Deadline) -> None:
        """Read the tier's version if that was not done lately.

        Raises:
            Unavailable: It is a newer release's now, or cannot be read.
        """
        if self._closed or self._version_holds():
            return
        async with deadline.scope(f"reading the version of tier {self.name}"), self._reading_version:
            self._check_closed_breaker()
            if self._version_holds():
                return
            try:
                await self._read_version(deadline)
            except UnsupportedFormat as error:
                if self._breaker.gave_proof():
                    self._opened(str(error))
                raise Unavailable(error.message, **error.details) from error

    async def _look_at_version(self) -> None:
        """As `_check_version`, for nobody: a tier that is slow to answer this is not left alone for it."""
        with suppress(KVStoreError):
            await self._check_version(Deadline.after(_PROBE_S, self._clock))

    def _version_holds(self) -> bool:
        return self._clock.monotonic_s() < self._version_holds_until_s

    async def _read_version(self, deadline: Deadline) -> None:
        check_store_version(await self.inner.get_manifest(STORE_VERSION_PLACE, deadline=deadline), self.name)
        self._version_holds_until_s = self._clock.monotonic_s() + _VERSION_S

    def _check_closed_breaker(self) -> None:
        if self._breaker.is_open:
            self._count("refused")
            text = "the tier failed and is left alone until a probe succeeds"
            raise Unavailable(text, tier=self.name, reason=self._why)

    def _opened(self, why: str) -> None:
        if not self._closed:
            _log.warning("tier %s is off, requests go on without it: %s", self.name, why)
            self._off(why)

    def _off(self, why: str) -> None:
        self._why = why
        self._meters.set("tier_open", 1, tier=self.name)
        text = f"tier {self.name} is off, requests go on without it"
        self._events.add(EventKind.TIER_DOWN, text, is_public=True, detail={"tier": self.name, "reason": why})
        self._background.spawn(self._probe_until_closed(), "probe")

    async def _probe_until_closed(self) -> None:
        opened_s = self._clock.monotonic_s()
        while self._breaker.is_open:
            await asyncio.sleep(self._breaker.delay_s)
            try:
                await self.inner.head([_PROBE_KEY], deadline=Deadline.after(_PROBE_S, self._clock))
                await self._read_version(Deadline.after(_PROBE_S, self._clock))
            except UnsupportedFormat as error:
                self._breaker.probe_failed()
                if (why := str(error)) != self._why:
                    _log.error("tier %s answers again, and stays off: %s", self.name, why)
                    self._why = why
            except Exception as error:  # noqa: BLE001 - a task's top: were it to end here, the tier would stay off for ever
                self._breaker.probe_failed()
                if not isinstance(error, KVStoreError):
                    _log.exception("a probe of tier %s failed, it is probed again", self.name)
            else:
                self._breaker.probe_succeeded()
        self._meters.set("tier_open", 0, tier=self.name)
        away_s = self._clock.monotonic_s() - opened_s
        _log.info("tier %s is back after %.1f s", self.name, away_s)
        text = f"tier {self.name} is back after {away_s:.1f} s"
        self._events.add(
            EventKind.TIER_BACK, text, is_public=True, detail={"tier": self.name, "away_s": round(away_s, 1)}
        )

    def _count(self, what: str, amount: int = 1) -> None:
        self._meters.add(f"tier_{what}", amount, tier=self.name)
