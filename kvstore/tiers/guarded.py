"""A wrapper that keeps a failing tier from delaying its callers: breaker, limits, meters, version check."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvstore.errors import KVStoreError, Unavailable, UnsupportedFormat, next_step
from kvstore.format.manifest import STORE_VERSION_PLACE, check_store_version
from kvstore.format.record import Record
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import EventKind, Events
from kvstore.runtime.instruments import Instruments
from kvstore.tiers.base import Entry, PutOutcome, Tier, TierUsage, TierWrapper
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.refusals import WRITES, PartDown, Refusals, Refused

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_KEY = RecordKey(NamespaceId(bytes(NAMESPACE_BYTES)), PrefixHash(bytes(PREFIX_BYTES)), 0, 0)
_READS = {"head", "get", "get_manifest"}
"""Calls that need the rights that a probe needs."""
_PROBE_S = 2.0
_VERSION_S = 10.0
"""How long writes trust the tier's version while calls succeed."""
_USAGE_S = 2.0
"""How long a call that succeeded counts as proof that the tier answers. An idle tier that freezes is
reported as working until then."""


def report_quarantine(events: Events, tier: str, key: RecordKey, reason: str) -> None:
    """Emit the event of a quarantined record."""
    about: dict[str, str | int | float] = {"tier": tier, "group": key.group, "slice": key.slice, "reason": reason}
    text = f"a record in {tier} was quarantined, and not served: {reason}"
    events.add(EventKind.QUARANTINED, text, namespace=key.namespace.hex(), detail={**about, "prefix": key.prefix.hex()})


class GuardedTier(TierWrapper):
    """Passes calls to `inner` while it is healthy. Otherwise refuses them at once with `Unavailable`.

    A newer release may take the tier over during an outage or while we run. So the tier's version is read before it is
    used again after an outage, before the first write after a failed call, and before a write if the last check is 10 s
    ago. It is also read for the tier's usage, at most every 2 s. A tier with a newer version is treated like one that
    does not answer.

    Args:
        inner: The tier; owned from now on.
        instruments: For counting calls, bytes and errors (see README.md), for a span of each call, and for events
            of outages and quarantined records.
        breaker: Decides when calls are refused; `None`: a default one.
        calls_max: Calls at a time. Further ones are refused, so that a slow tier does not exhaust the node's memory.
    """

    def __init__(
        self, inner: Tier, instruments: Instruments, *, breaker: Breaker | None = None, calls_max: int = 1024
    ) -> None:
        super().__init__(inner)
        self._clock = instruments.clock
        self._meters = instruments.meters
        self._events = instruments.events
        self._tracing = instruments.tracing
        self._breaker = breaker or Breaker()
        self._breaker.on_open = self._opened
        self._calls_max = calls_max
        self._num_calls = 0
        self._background = Background(f"guard of tier {inner.name}")
        self._reason = ""  # for the outage, by the last probe
        self._refusals = Refusals(inner.name, instruments.clock)
        # the version was read when the tier was opened
        self._version_read_s = self._clock.monotonic_s()
        self._reading_version = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """True while calls are refused."""
        return self._breaker.is_open

    def check_usable(self) -> None:
        """Refuse other requests to the tier's server, like those of the catalog, while the tier is not used.

        Raises:
            Unavailable: The breaker is open.
        """
        if self._breaker.is_open:
            self._meters.add("tier_refused", tier=self.name)
            raise Unavailable(f"{self.name} failed and is not used until a probe succeeds", reason=self._reason)

    def open_breaker(self, reason: str) -> None:
        """Refuse calls until a probe succeeds, because the tier did not answer when it was opened. The caller logs it.

        Otherwise a tier whose usage is known without a request would seem healthy until the first call.
        """
        if self._breaker.open():
            self._report_down(reason)

    async def get(
        self, key: RecordKey, *, deadline: Deadline, allocate: Callable[[int], memoryview] | None = None
    ) -> Record | None:
        record = await super().get(key, deadline=deadline, allocate=allocate)
        if record is not None:
            self._meters.add("tier_read_bytes", record.num_bytes, tier=self.name)
        return record

    async def put(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        return self._counted(record, await super().put(record, deadline=deadline))

    async def put_evictable(self, record: Record, *, deadline: Deadline) -> PutOutcome:
        call = partial(self.inner.put_evictable, record, deadline=deadline)
        return self._counted(record, await self._pass("put", call, deadline))

    def _counted(self, record: Record, outcome: PutOutcome) -> PutOutcome:
        if outcome is PutOutcome.STORED:
            self._meters.add("tier_put_bytes", record.num_bytes, tier=self.name)
            self._refusals.done("put")
        elif outcome is PutOutcome.FULL:
            self._meters.add("tier_full", tier=self.name)
            if self.inner.no_room:
                self._refusals.add("put", self.inner.no_room)
        return outcome

    async def delete_all(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        await self._pass("delete_all", partial(self.inner.delete_all, keys, deadline=deadline), deadline)

    async def _pass(self, what: str, call: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        with self._call(what, deadline):
            if what in WRITES:
                await self._check_version(deadline)
            return await call()

    async def scan(self, namespace: NamespaceId | None = None) -> AsyncIterator[Entry]:
        """As `Tier.scan`. Does not affect the breaker: operators scan, and no request waits for that."""
        self.check_usable()
        async for entry in self.inner.scan(namespace):
            yield entry

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        """As `Tier.usage`. A tier that knows its usage without a request is asked for its version, at most every 2 s.
        So one that does not answer is found out, and one that was taken over, though no call reads or writes. It also
        refuses writes if it did so with the last one, up to half a minute ago.
        """
        with self._call("usage", deadline, is_asked=not self._version_holds(_USAGE_S)):
            await self._check_version(deadline, _USAGE_S)
            usage = await self.inner.usage(deadline=deadline)
        return replace(usage, refuses_writes=usage.refuses_writes or self._refusals.of_writes)

    async def aclose(self) -> None:
        self._closed = True
        await self._background.aclose()
        await self.inner.aclose()

    def _inner_quarantined(self, key: RecordKey, reason: str) -> None:
        report_quarantine(self._events, self.name, key, reason)
        super()._inner_quarantined(key, reason)

    @contextmanager
    def _call(self, what: str, deadline: Deadline, *, is_asked: bool = True) -> Iterator[None]:
        """Refuse the call, or run it in a span and report its end to the breaker. `is_asked`: as `Breaker.observe`.

        A tier that refuses a call which no probe makes, as a write without the right for it, is used on for others. So
        is one of which only a part does not answer: a probe would meet another part, and close the breaker at once.
        """
        tracing = self._tracing
        with tracing.span(f"{self.name}.{what}", tier=self.name) if tracing is not None else nullcontext():
            if not self._closed:  # otherwise the inner tier raises `Closed`
                self.check_usable()
            if self._num_calls >= self._calls_max:
                self._meters.add("tier_refused", tier=self.name)
                raise Unavailable("too many calls wait for the tier", tier=self.name, limit=self._calls_max)
            self._num_calls += 1
            self._meters.set("tier_calls", self._num_calls, tier=self.name)
            try:
                answers = () if what in _READS else (Refused,)
                with self._breaker.observe(
                    deadline, self._clock, is_asked=is_asked, answers=answers, ignored=(PartDown,)
                ):
                    yield
            except Unavailable as error:
                self._meters.add("tier_errors", tier=self.name)
                if isinstance(error, Refused) and what not in _READS:
                    self._refusals.add(what, error.message, str(error))
                else:
                    self._version_read_s = -math.inf
                raise
            else:
                if what != "put":  # which may have written nothing
                    self._refusals.done(what)
            finally:
                self._num_calls -= 1
                self._meters.set("tier_calls", self._num_calls, tier=self.name)
                self._meters.set("tier_quarantined", self.inner.num_quarantined, tier=self.name)

    async def _check_version(self, deadline: Deadline, trusted_s: float = _VERSION_S) -> None:
        """Read the tier's version, unless it was read in the last `trusted_s`.

        Raises:
            Unavailable: A newer release has taken the tier over, or the version cannot be read.
        """
        if self._closed or self._version_holds(trusted_s):
            return
        async with deadline.scope(f"another reading of the version of tier {self.name}"):
            await self._reading_version.acquire()
        try:
            self.check_usable()
            if not self._version_holds(trusted_s):
                await self._read_version(deadline)
        except UnsupportedFormat as error:
            if self._breaker.open():
                self._opened(str(error))
            raise Unavailable(error.message, **error.details) from error
        except Refused as error:  # of a read: it counts, also before a write
            raise Unavailable(error.message, **error.details) from error
        finally:
            self._reading_version.release()

    def _version_holds(self, trusted_s: float) -> bool:
        return self._clock.monotonic_s() < self._version_read_s + trusted_s

    async def _read_version(self, deadline: Deadline) -> None:
        check_store_version(await self.inner.get_manifest(STORE_VERSION_PLACE, deadline=deadline), self.name)
        self._version_read_s = self._clock.monotonic_s()

    def _opened(self, reason: str) -> None:
        if not self._closed:
            _log.warning("tier %s is off, requests go on without it: %s", self.name, reason)
            self._report_down(reason)

    def _report_down(self, reason: str) -> None:
        self._reason = reason
        self._meters.set("tier_open", 1, tier=self.name)
        text = f"tier {self.name} is off, requests go on without it"
        self._events.add(EventKind.TIER_DOWN, text, is_public=True, detail={"tier": self.name, "reason": reason})
        self._background.spawn(self._probe_until_closed(), "probe")

    async def _probe_until_closed(self) -> None:
        opened_s = self._clock.monotonic_s()
        told = {next_step(self._reason)[1]}
        while self._breaker.is_open:
            await asyncio.sleep(self._breaker.delay_s)
            try:
                # first, because S3 gives no cause when it refuses a `head`
                await self._read_version(Deadline.after(_PROBE_S, self._clock))
                await self.inner.head([_PROBE_KEY], deadline=Deadline.after(_PROBE_S, self._clock))
            except KVStoreError as error:
                self._breaker.probe_failed()
                self._reason = str(error)
                if (step := next_step(self._reason)[1]) not in told:
                    told.add(step)
                    _log.warning("tier %s stays off, by now for another cause: %s", self.name, error)
            except Exception:  # noqa: BLE001 - a task's top: if it ended here, the tier would stay off
                self._breaker.probe_failed()
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
