"""A look at a bucket, for operators: what our credentials may do there, and what S3 does by itself."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.names import ROOT
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.meters import Meters
from kvstore.tiers.locations import S3Location
from kvstore.tiers.s3.client import S3Client
from kvstore.tiers.s3.failures import Conflict, Taken
from kvstore.tiers.s3.lifecycle import LifecycleRule, parse_rules

__all__ = ["BucketExaminer", "Trial", "open_examiner"]

T = TypeVar("T")

_UNDO_S = 1.0
_BODY = b"kvstore doctor: may be removed"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of an object that was put, read, listed and removed.

    Attributes:
        refused: By the right that is missing, like `s3:PutObject`: S3's word for it.
        wrong: What was answered wrongly, in words; empty: nothing.
        writes_once: A second put under the same name was refused; `None`: it could not be tried.
    """

    refused: Mapping[str, str]
    wrong: str
    writes_once: bool | None


class BucketExaminer:
    """Looks at one location; see `open_examiner`. All its calls raise `Unavailable` where S3 does not answer.

    Attributes:
        endpoint: Where it is.
        clock_offset_s: How far its clock is ahead of ours, to a second or so; `None` before its first answer.
    """

    def __init__(self, client: S3Client, prefix: str) -> None:
        self._client = client
        self._root = f"{prefix}/" if prefix else ""
        self.endpoint = client.endpoint
        self.clock_offset_s: float | None = None
        client.on_answer(self._note_date)

    def _note_date(self, fields: Mapping[str, str]) -> None:
        with suppress(ValueError, TypeError):
            told_s = parsedate_to_datetime(fields.get("date", "")).timestamp()
            # cut to whole seconds: on average it was half of one later
            self.clock_offset_s = told_s + 0.5 - SYSTEM_CLOCK.wall_ms() / 1000

    async def namespaces(self) -> Sequence[str]:
        """What stands where namespaces do; the first request: its errors tell a missing bucket from bad credentials."""
        return await self._client.list_folders(f"{self._root}{ROOT}/")

    async def rules(self) -> list[LifecycleRule]:
        """The enabled lifecycle rules that remove or move records by themselves."""
        records = f"{self._root}{ROOT}/"
        return [rule for rule in parse_rules(await self._client.lifecycle()) if rule.touches(records)]

    async def try_out(self) -> Trial:
        """Put, put again, get, list and delete one small object under the prefix, beside the records.

        If cancelled, the object is removed, for at most a second.
        """
        name = f"{self._root}doctor/{secrets.token_hex(8)}"
        refused: dict[str, str] = {}
        wrong = ""
        writes_once: bool | None = None
        try:
            if await self._put(name, refused):
                writes_once = await self._is_taken(name)
                data = await self._tried("s3:GetObject", refused, self._client.get(name, _fresh))
                if "s3:GetObject" not in refused and (data is None or bytes(data) != _BODY):
                    wrong = "an object that was just put is not read back"
                if not await self._is_listed(name, refused):
                    wrong = wrong or "an object that was just put is not listed"
                await self._tried("s3:DeleteObject", refused, self._client.delete(name))
        except BaseException:
            with suppress(KVStoreError, TimeoutError):
                async with asyncio.timeout(_UNDO_S):
                    await self._client.delete(name)
            raise
        return Trial(refused, wrong, writes_once)

    async def _put(self, name: str, refused: dict[str, str]) -> bool:
        await self._tried("s3:PutObject", refused, self._client.put(name, _BODY, if_absent=False))
        return "s3:PutObject" not in refused

    async def _is_taken(self, name: str) -> bool:
        """A put on condition that there is nothing is refused for the reason that there is something."""
        try:
            await self._client.put(name, _BODY, if_absent=True)
        except (Taken, Conflict):
            return True
        except Unavailable as error:
            if "code" not in error.details:
                raise
            return False
        return False

    async def _is_listed(self, name: str, refused: dict[str, str]) -> bool:
        async def names() -> list[str]:
            return [found async for answer in self._client.list(name) for found, _ in answer]

        found = await self._tried("s3:ListBucket", refused, names())
        return found is None or name in found

    @staticmethod
    async def _tried(right: str, refused: dict[str, str], request: Awaitable[T]) -> T | None:
        """The answer; `None`, and an entry in `refused`, when S3 says that we may not."""
        try:
            return await request
        except Unavailable as error:
            if error.details.get("status") != 403:
                raise
            refused[right] = str(error.details.get("code"))
            return None


def _fresh(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


@asynccontextmanager
async def open_examiner(location: S3Location) -> AsyncIterator[BucketExaminer]:
    """An examiner of a location, with the credentials of the AWS environment; nothing is sent yet.

    Raises:
        InvalidRequest: The AWS settings are wrong.
    """
    client = await S3Client.open(
        location.bucket,
        endpoint_url=location.endpoint_url,
        region=location.region,
        access_key=None,
        secret_key=None,
        num_connections=2,
        meters=Meters(),
    )
    try:
        yield BucketExaminer(client, location.prefix)
    finally:
        await client.aclose()
