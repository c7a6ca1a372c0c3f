"""Examines a bucket for operators: rights of our credentials, the endpoint's clock, the bucket's lifecycle rules."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.names import ROOT
from kvstore.runtime.buffers import fresh_buffer
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.tiers.locations import S3Location
from kvstore.tiers.s3.client import S3Client
from kvstore.tiers.s3.failures import Conflict, Taken

T = TypeVar("T")

_UNDO_S = 1.0
_BODY = b"kvstore doctor: may be removed"


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of putting, reading, listing and removing an object.

    Attributes:
        refused: By missing right, for example `s3:PutObject`: S3's error code.
        wrong: What was wrong in an answer; empty: nothing.
        writes_once: Whether a second put under the same name was refused; `None`: not tried.
    """

    refused: Mapping[str, str]
    wrong: str
    writes_once: bool | None


class BucketExaminer:
    """Examines one location; see `open_examiner`. All its calls raise `Unavailable` if S3 does not answer.

    Attributes:
        clock_offset_s: How far the endpoint's clock is ahead of ours, to about 1 s; `None` before its first answer.
    """

    def __init__(self, client: S3Client, prefix: str) -> None:
        self._client = client
        self._root = f"{prefix}/" if prefix else ""
        self.clock_offset_s: float | None = None
        client.on_answer(self._read_date)

    def _read_date(self, fields: Mapping[str, str]) -> None:
        with suppress(ValueError, TypeError):
            date_s = parsedate_to_datetime(fields.get("date", "")).timestamp()
            # truncated to whole seconds: on average the true time is half a second later
            self.clock_offset_s = date_s + 0.5 - SYSTEM_CLOCK.wall_ms() / 1000

    async def namespaces(self) -> Sequence[str]:
        """The names of namespaces. Call it first: its errors tell a missing bucket from bad credentials."""
        return await self._client.list_folders(f"{self._root}{ROOT}/")

    async def rules(self) -> list[LifecycleRule]:
        """The enabled lifecycle rules that remove or move records."""
        records = f"{self._root}{ROOT}/"
        return [rule for rule in parse_rules(await self._client.lifecycle()) if rule.touches(records)]

    async def try_out(self) -> Trial:
        """Put, put again, get, list and delete one small object under the prefix, beside the records.

        If cancelled, it takes up to a second to remove the object.
        """
        name = f"{self._root}doctor/{secrets.token_hex(8)}"
        refused: dict[str, str] = {}
        wrong = ""
        writes_once: bool | None = None
        try:
            await self._try("s3:PutObject", refused, self._client.put(name, _BODY, if_absent=False))
            if not refused:
                writes_once = await self._is_taken(name)
                found = await self._try("s3:GetObject", refused, self._client.get(name, fresh_buffer))
                if "s3:GetObject" not in refused and (found is None or bytes(found.data) != _BODY):
                    wrong = "an object that was just put is not read back"
                names = await self._try("s3:ListBucket", refused, self._list(name))
                if names is not None and name not in names:
                    wrong = wrong or "an object that was just put is not listed"
                await self._try("s3:DeleteObject", refused, self._client.delete(name))
        except BaseException:
            with suppress(KVStoreError, TimeoutError):
                async with asyncio.timeout(_UNDO_S):
                    await self._client.delete(name)
            raise
        return Trial(refused, wrong, writes_once)

    async def _is_taken(self, name: str) -> bool:
        """Whether a conditional put is refused because the object exists."""
        try:
            await self._client.put(name, _BODY, if_absent=True)
        except (Taken, Conflict):
            return True
        except Unavailable as error:
            if "code" not in error.details:
                raise
        return False

    async def _list(self, prefix: str) -> list[str]:
        return [found async for answer in self._client.list(prefix) for found, *_ in answer]

    @staticmethod
    async def _try(right: str, refused: dict[str, str], request: Awaitable[T]) -> T | None:
        """The answer; `None`, and an entry in `refused`, if we lack the right."""
        try:
            return await request
        except Unavailable as error:
            if error.details.get("status") != 403:
                raise
            refused[right] = str(error.details.get("code"))
            return None


@asynccontextmanager
async def open_examiner(location: S3Location) -> AsyncIterator[BucketExaminer]:
    """An examiner of a location, with the credentials of the AWS environment; nothing is sent yet.

    Raises:
        InvalidRequest: The AWS settings are wrong.
    """
    client = await S3Client.open(location, num_connections=2)
    try:
        yield BucketExaminer(client, location.prefix)
    finally:
        await client.aclose()


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """The effect of one enabled rule on current objects without tags, as ours are.

    Attributes:
        name: Its id; S3 assigns one if its author did not.
        prefix: Prefix of the names that it applies to.
        expires: When it removes them, in words like `after 30 days`; `None`: never.
        moves_to: By storage class: when it moves them there, in the same words.
    """

    name: str
    prefix: str
    expires: str | None
    moves_to: Mapping[str, str]

    def touches(self, root: str) -> bool:
        """Whether it removes or moves an object whose name starts with `root`."""
        overlaps = root.startswith(self.prefix) or self.prefix.startswith(root)
        return overlaps and (self.expires is not None or bool(self.moves_to))


def parse_rules(rules: Iterable[Mapping[str, Any]]) -> list[LifecycleRule]:
    """The enabled rules that apply to objects without tags.

    The effect of a rule on old versions and unfinished uploads does not matter: records are written once.
    """
    parsed = []
    for rule in rules:
        filter_ = rule.get("Filter") or {}
        conditions = {**filter_, **filter_.get("And", {})}
        if rule.get("Status") != "Enabled" or conditions.get("Tag") or conditions.get("Tags"):
            continue
        parsed.append(
            LifecycleRule(
                name=str(rule.get("ID", "")),
                prefix=str(conditions.get("Prefix", rule.get("Prefix", "")) or ""),
                expires=_when(rule.get("Expiration", {})),
                moves_to={
                    str(move.get("StorageClass")): _when(move) or "at once" for move in rule.get("Transitions", ())
                },
            )
        )
    return parsed


def _when(action: Mapping[str, Any]) -> str | None:
    if action.get("Days") is not None:
        return f"after {action['Days']} days"
    return f"on {action['Date']}" if action.get("Date") is not None else None
