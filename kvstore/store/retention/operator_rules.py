"""What operators ordered for all services that share a catalog: weights that are retired, quotas of tenants."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from kvstore.catalog.coordination import FOREIGN_TEXT, TextStore
from kvstore.errors import Closed, InvalidRequest, KVStoreError, Unavailable
from kvstore.eviction.holdings import Quota
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments

_log = logging.getLogger(__name__)

_CALL_S = 5.0
_PROBE_S = 2.0
_QUOTA, _RETIRED = "quota", "retired"


@dataclass(frozen=True, slots=True)
class Retirement:
    """Weights that are not to be used any more."""

    tenant: str | None
    """`None`: all tenants'."""
    weights_id: str
    """As in descriptions."""
    at_s: int
    """When it was ordered, in seconds since the Unix epoch."""


class OperatorRules:
    """Follows what operators ordered, which is in a book that the services share, and writes new orders there. Belongs
    to the store's loop; its attributes may be read from any thread.

    While the book does not answer, the last rules stay in force. If the book has lost rules, every service that
    remembers them writes them again.

    Args:
        quotas: From the settings, for tenants without a rule.

    Attributes:
        quotas: The tenants' quotas, from settings and rules together. Replaced, never changed.
        ordered: Those of them that come from rules.
        retired: The retired weights. Replaced, never changed.
        used_bytes: Returns the bytes of each tenant that count against its quota; `None`: not known.
    """

    def __init__(
        self, book: TextStore, quotas: Mapping[str, Quota], instruments: Instruments, *, poll_s: float = 1.0
    ) -> None:
        self.quotas = dict(quotas)
        self.ordered: Mapping[str, Quota] = {}
        self.retired: Mapping[tuple[str | None, str], Retirement] = {}
        self.used_bytes: Callable[[], Mapping[str, int] | None] = lambda: None
        self._book = book
        self._poll_s = poll_s
        self._from_settings = dict(quotas)
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._texts: dict[str, str] = {}
        self._turn = asyncio.Lock()  # a reading from before a rule was written must not overwrite it
        self._background = Background("operator rules")
        self._apply: Callable[[Mapping[str, Quota]], None] | None = None
        self._guaranteed_max: int | None = None

    async def start(self) -> None:
        """Read the rules now, and then regularly until `aclose`. If the book does not answer yet, only warn."""
        try:
            await self.read(Deadline.after(_PROBE_S, self._clock))
        except Unavailable as error:
            _log.warning("running without operators' rules (retired weights, quotas) until they answer: %s", error)
        if self._book.is_shared:
            self._background.repeat(self._read_again, "reading", every_s=self._poll_s)

    def apply_to(
        self,
        apply: Callable[[Mapping[str, Quota]], None],
        guaranteed_bytes_max: int | None,
        used_bytes: Callable[[], Mapping[str, int] | None] = lambda: None,
    ) -> None:
        """Set what applies quotas here.

        Args:
            apply: Called with all quotas, now and after each change.
            guaranteed_bytes_max: What may be guaranteed to all tenants together; `None`: there is no bound.
            used_bytes: Returns the bytes of each tenant in the last totals; `None`: not known. Safe from any thread.
        """
        self._apply, self._guaranteed_max, self.used_bytes = apply, guaranteed_bytes_max, used_bytes
        apply(self.quotas)

    async def _read_again(self) -> None:
        try:
            await self.read(Deadline.after(_CALL_S, self._clock))
        except Closed:
            raise
        except KVStoreError:  # also a book that is full, and cannot take again what it has lost
            self._meters.add("catalog_failures", call="orders")

    async def read(self, deadline: Deadline) -> None:
        """Read the book, and write to it again what it has lost.

        Raises:
            Unavailable: The book does not answer.
        """
        async with self._turn:
            texts = await self._book.read(deadline=deadline)
            lost = {name: text for name, text in self._texts.items() if name not in texts}
            self._take({**texts, **lost})
            for name, text in lost.items():
                await self._book.write(name, text, deadline=deadline)

    def _take(self, texts: Mapping[str, str]) -> None:
        if texts == self._texts:
            return
        ordered: dict[str, Quota] = {}
        retired: dict[tuple[str | None, str], Retirement] = {}
        for name, text in texts.items():
            try:
                kind, *place = json.loads(name)
                value = json.loads(text)
                if kind == _QUOTA and value["quota"] is not None:
                    guaranteed_bytes, maximum_bytes = value["quota"]
                    most = None if maximum_bytes is None else index(maximum_bytes)
                    ordered[str(place[0])] = Quota(index(guaranteed_bytes), most)
                elif kind == _RETIRED and value["is_retired"]:
                    tenant, weights_id = place
                    retired[tenant, weights_id] = Retirement(tenant, weights_id, int(value["at_s"]))
            except FOREIGN_TEXT:
                continue
        self._texts, self.retired, self.ordered = dict(texts), retired, ordered
        quotas = {**self._from_settings, **ordered}
        if quotas != self.quotas:
            self.quotas = quotas
            if self._apply is not None:
                self._apply(quotas)

    # retired weights

    def are_retired(self, tenant: str, weights_id: str) -> bool:
        """Whether a tenant's weights are retired, so that all that was computed with them counts as missing."""
        return bool(weights_id) and ((tenant, weights_id) in self.retired or (None, weights_id) in self.retired)

    async def retire(self, tenant: str | None, weights_id: str, *, is_retired: bool, deadline: Deadline) -> None:
        """Make all that was computed with some weights unreachable, or reachable again: here at once, and within a
        second or two on every service that shares the book and can read it.

        Args:
            tenant: Whose; `None`: all tenants'.
            weights_id: As in descriptions.
            is_retired: False: withdraw the rule.

        Raises:
            InvalidRequest: Too many rules.
            Unavailable: The book does not answer; nothing has changed.
        """
        async with deadline.scope("writing a rule"), self._turn:
            await self._write([_RETIRED, tenant, weights_id], {"is_retired": is_retired}, deadline)

    # quotas

    async def set_quota(self, tenant: str, quota: Quota | None, *, deadline: Deadline) -> None:
        """Give a tenant a quota, on every service that shares the book. `None`: withdraw the rule, so that the settings
        apply again.

        Raises:
            InvalidRequest: This service applies no quotas, or they would guarantee too much.
            Unavailable: The book does not answer; nothing has changed.
        """
        if self._apply is None:
            raise InvalidRequest("this service applies no quotas: it has no cold tier with a catalog", field="tenant")
        value = None if quota is None else [quota.guaranteed_bytes, quota.maximum_bytes]
        async with deadline.scope("writing a rule"), self._turn:
            if quota is not None:  # in this turn: others may be set at the same time
                self._check_guarantees({**self.quotas, tenant: quota})
            await self._write([_QUOTA, tenant], {"quota": value}, deadline)

    def _check_guarantees(self, quotas: Mapping[str, Quota]) -> None:
        guaranteed_bytes = sum(one.guaranteed_bytes for one in quotas.values())
        if self._guaranteed_max is not None and guaranteed_bytes > self._guaranteed_max:
            raise InvalidRequest(
                "quotas would guarantee more than three quarters of what cold may hold: lower this or others",
                field="guaranteed_bytes",
                seen=guaranteed_bytes,
                expected=f"at most {self._guaranteed_max}",
            )

    async def _write(self, name: list[str | None], value: dict[str, Any], deadline: Deadline) -> None:
        key, text = json.dumps(name), json.dumps({**value, "at_s": self._clock.wall_ms() // 1000})
        await self._book.write(key, text, deadline=deadline)
        self._take({**self._texts, key: text})

    async def aclose(self) -> None:
        """Stop reading. Idempotent."""
        await self._background.aclose()
