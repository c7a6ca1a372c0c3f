"""The S3 client: its configuration, and every request except those for records, which `objects.py` makes."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime
from typing import Any

import aioboto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.utils import get_environ_proxies, parse_timestamp

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.background import gather_all
from kvstore.runtime.meters import Meters
from kvstore.tiers.locations import without_secrets
from kvstore.tiers.s3.failures import (
    Absent,
    Conflict,
    NoBucket,
    Taken,
    Throttled,
    Transient,
    plain,
    refusal,
    translated,
)
from kvstore.tiers.s3.http import Connections
from kvstore.tiers.s3.objects import Object, Objects
from kvstore.tiers.s3.pacing import Pace
from kvstore.tiers.s3.trust import endpoint_tls, require_host_names

__all__ = ["BulkDelete", "S3Client", "add_content_md5"]

_CHUNK_BYTES = 1 << 20
_CONNECT_S = 3.0
_READ_S = 20.0
_ATTEMPTS = 3

_VERBS = {"ListObjectsV2": "LIST", "CopyObject": "COPY", "DeleteObjects": "DELETE"}
"""Operations that are not counted under their HTTP method, because they are priced differently."""

_NO_CONDITIONS = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest"})
"""What endpoints answer that know no conditions on a copy or a removal."""


class S3Client:
    """Requests on one bucket; make one with `open`. Foreign exceptions do not leave it (see `failures`).

    Attributes:
        bucket: Its name.
        endpoint: Where it is, for people: without a login.
        objects: The byte path; `None` behind an HTTP proxy, which it does not support.
        delete_all: Removes many objects.
    """

    def __init__(self, bucket: str, client: Any, stack: AsyncExitStack, pace: Pace, meters: Meters) -> None:
        self.bucket = bucket
        self.endpoint = without_secrets(client.meta.endpoint_url)
        self.objects: Objects | None = None
        self._client = client
        self._stack = stack
        self._pace = pace
        self._meters = meters
        self._bucket_seen = False
        where = {"bucket": bucket, "endpoint": self.endpoint}
        self.delete_all = BulkDelete(self._delete_many, self.delete, where)
        client.meta.events.register("before-send.s3", self._count)
        client.meta.events.register("before-sign.s3.DeleteObjects", add_content_md5)

    @classmethod
    async def open(
        cls,
        bucket: str,
        *,
        endpoint_url: str | None,
        region: str | None,
        access_key: str | None,
        secret_key: str | None,
        num_connections: int,
        meters: Meters,
    ) -> S3Client:
        """Make the client; sends nothing to the bucket. What is `None` comes from the usual AWS environment.

        Raises:
            InvalidRequest: The AWS settings are wrong, e.g. an unknown profile or an endpoint that is no url. Or the
                installed client cannot be made to check the endpoint's host name.
        """
        require_host_names()
        config = Config(
            signature_version="s3v4",
            max_pool_connections=num_connections,
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            # Records carry their own checksums: hashing every byte again would triple the cost of a transfer.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        stack = AsyncExitStack()
        try:
            session = aioboto3.Session(aws_access_key_id=access_key, aws_secret_access_key=secret_key)
            # dates, which nobody here reads, took most of the time of a listing
            session._session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
            client = await stack.enter_async_context(
                session.client(
                    "s3",
                    endpoint_url=endpoint_url,
                    region_name=region or session.region_name or "us-east-1",
                    config=config,
                )
            )
            self = cls(bucket, client, stack, Pace(num_connections), meters)
            url = client.meta.endpoint_url
            if not get_environ_proxies(url):
                tls = endpoint_tls(client._endpoint.http_session._verify)  # the same authorities as for all else
                self.objects = Objects(
                    bucket,
                    url,
                    client.meta.region_name,
                    await session.get_credentials(),
                    connections=Connections(url, tls, num_idle_max=num_connections),
                    pace=self._pace,
                    meters=meters,
                )
        except (BotoCoreError, ValueError, OSError) as error:
            await stack.aclose()
            raise InvalidRequest("the AWS settings are wrong", bucket=bucket, error=error) from error
        except BaseException:
            await stack.aclose()
            raise
        return self

    def _count(self, request: Any, event_name: str, **_: Any) -> None:
        """Called by botocore before each attempt."""
        verb = _VERBS.get(event_name.rpartition(".")[2], request.method)
        self._meters.add("s3_requests", verb=verb)

    @asynccontextmanager
    async def _request(self, *, is_conditional: bool = False) -> AsyncIterator[None]:
        """One request, at the endpoint's pace, with the errors of this package."""
        try:
            async with self._pace.turn():
                with translated(self.bucket, self.endpoint):
                    yield
        except Throttled:
            self._meters.add("s3_throttled")
            raise
        except (Taken, Conflict) as error:
            if is_conditional:
                raise
            raise plain(error, {"bucket": self.bucket, "endpoint": self.endpoint}) from error

    async def get_record(self, name: str, allocate: Callable[[int], memoryview]) -> Object | None:
        """As `get`, over the byte path if there is one."""
        if self.objects is None:
            return await self.get(name, allocate)
        try:
            found = await self.objects.get(name, allocate)
        except NoBucket as error:
            raise self._no_bucket() from error
        self._bucket_seen = True
        return found

    async def put_record(self, name: str, body: memoryview) -> None:
        """As `put` with `if_absent`, over the byte path if there is one."""
        if self.objects is None:
            await self.put(name, bytes(body), if_absent=True)  # the client takes no memoryview
            return
        try:
            await self.objects.put(name, body)
        except NoBucket as error:
            raise self._no_bucket() from error
        self._bucket_seen = True

    async def head(self, name: str) -> int | None:
        """Bytes of an object, or `None`."""
        seen = await self.look(name)
        return seen[0] if seen is not None else None

    async def look(self, name: str) -> tuple[int, str] | None:
        """Bytes of an object and its ETag, or `None`."""
        try:
            async with self._request():
                answer = await self._client.head_object(Bucket=self.bucket, Key=name)
        except Absent:
            # A HEAD has no body to tell a missing object from a missing bucket.
            if not self._bucket_seen:
                await self.check_bucket()
            return None
        except NoBucket as error:
            raise self._no_bucket() from error
        self._bucket_seen = True
        return int(answer["ContentLength"]), str(answer.get("ETag", ""))

    async def get(self, name: str, allocate: Callable[[int], memoryview]) -> Object | None:
        """An object, in a buffer of its size from `allocate`; `None`: there is no such object."""
        try:
            async with self._request():
                answer = await self._client.get_object(Bucket=self.bucket, Key=name)
                num_bytes = int(answer["ContentLength"])
                async with answer["Body"] as body:
                    buffer = allocate(num_bytes)
                    done = 0
                    async for chunk in body.content.iter_chunked(_CHUNK_BYTES):
                        buffer[done : done + len(chunk)] = chunk
                        done += len(chunk)
        except Absent:
            self._bucket_seen = True
            return None
        except NoBucket as error:
            raise self._no_bucket() from error
        if done != num_bytes:
            raise Unavailable("S3 sent less than it announced", bucket=self.bucket, expected=num_bytes, seen=done)
        self._bucket_seen = True
        return Object(buffer, str(answer.get("ETag", "")))

    async def put(self, name: str, body: bytes, *, if_absent: bool) -> None:
        """Store an object.

        Raises:
            Taken: `if_absent`, and there is one.
            Conflict: Another put of the same name was under way.
        """
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            async with self._request(is_conditional=if_absent):
                await self._client.put_object(Bucket=self.bucket, Key=name, Body=body, **condition)
        except (NoBucket, Absent) as error:
            raise self._no_bucket() from error
        self._bucket_seen = True

    async def delete(self, name: str) -> None:
        """Remove an object; an absent one is no error."""
        try:
            async with self._request():
                await self._client.delete_object(Bucket=self.bucket, Key=name)
        except NoBucket as error:
            raise self._no_bucket() from error
        except Absent:
            return

    async def _delete_many(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Remove up to a thousand objects; returns S3's errors on those that it did not remove."""
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            async with self._request():
                answer = await self._client.delete_objects(Bucket=self.bucket, Delete=wanted)
        except (NoBucket, Absent) as error:
            raise self._no_bucket() from error
        return list(answer.get("Errors", ()))

    async def move(
        self, source: str, target: str, tag: str | None, *, keeps: Callable[[int], bool] = lambda _: True
    ) -> bool:
        """Copy an object and remove it. False: it is not there, or has another ETag than `tag` (`None`: any) by now.

        Args:
            source: The object's name.
            target: The copy's.
            tag: As above.
            keeps: Whether an object of so many bytes is copied at all.

        An endpoint that ignores conditions on copies and removals, as Ceph's gateway does, or refuses them, moves an
        object that took the name since our look, a few requests ago: nothing that it offers closes that gap.
        """
        seen = await self.look(source)
        if seen is None or tag not in (None, seen[1]):
            return False
        copy = target if keeps(seen[0]) else None
        try:
            try:
                await self._copy_and_remove(source, copy, {"CopySourceIfMatch": seen[1]}, {"IfMatch": seen[1]})
            except Unavailable as error:
                if error.details.get("code") not in _NO_CONDITIONS:
                    raise
                await self._copy_and_remove(source, copy, {}, {})
        except (Absent, Taken, Conflict):
            return False
        except NoBucket as error:
            raise self._no_bucket() from error
        return True

    async def _copy_and_remove(
        self, source: str, target: str | None, if_copied: Mapping[str, str], if_removed: Mapping[str, str]
    ) -> None:
        origin = {"Bucket": self.bucket, "Key": source}
        if target is not None:
            async with self._request(is_conditional=True):
                await self._client.copy_object(Bucket=self.bucket, Key=target, CopySource=origin, **if_copied)
        async with self._request(is_conditional=True):
            await self._client.delete_object(Bucket=self.bucket, Key=source, **if_removed)

    async def list(self, prefix: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Names that start with `prefix`, with their sizes, as many at a time as S3 lists in one answer."""
        token: dict[str, str] = {}
        while True:
            try:
                async with self._request():
                    answer = await self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **token)
            except (NoBucket, Absent) as error:
                raise self._no_bucket() from error
            yield [(item["Key"], int(item["Size"])) for item in answer.get("Contents", ())]
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    async def check_bucket(self) -> None:
        """Check that the bucket exists and may be used.

        Raises:
            Unavailable: It does not, or may not; the message names the next step.
        """
        try:
            async with self._request():
                await self._client.head_bucket(Bucket=self.bucket)
        except (Absent, NoBucket) as error:
            raise self._no_bucket() from error
        self._bucket_seen = True

    def on_answer(self, tell: Callable[[Mapping[str, str]], None]) -> None:
        """From now on `tell` gets the header fields, in lower case, of each answer that the general client receives."""

        def received(parsed: Mapping[str, Any], **_: Any) -> None:
            tell(parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}))

        self._client.meta.events.register("after-call.s3", received)

    async def lifecycle(self) -> Sequence[Mapping[str, Any]]:
        """The rules by which S3 removes or moves objects of the bucket by itself, as it spells them.

        Raises:
            Unavailable: They cannot be read; `details["code"]` is S3's error code, if it sent one.
        """
        try:
            async with self._request():
                answer = await self._client.get_bucket_lifecycle_configuration(Bucket=self.bucket)
        except (NoBucket, Absent) as error:
            raise self._no_bucket() from error
        except Unavailable as error:
            if error.details.get("code") == "NoSuchLifecycleConfiguration":
                return []
            raise
        rules: Sequence[Mapping[str, Any]] = answer.get("Rules", ())
        return rules

    async def list_folders(self, prefix: str) -> Sequence[str]:
        """The names' next components after `prefix`, up to a slash, each once; the first thousand."""
        try:
            async with self._request():
                answer = await self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, Delimiter="/")
        except (NoBucket, Absent) as error:
            raise self._no_bucket() from error
        return [item["Prefix"][len(prefix) : -1] for item in answer.get("CommonPrefixes", ())]

    def _no_bucket(self) -> Unavailable:
        self._bucket_seen = False
        return Unavailable(
            "the S3 bucket does not exist: create it, or correct its name", bucket=self.bucket, endpoint=self.endpoint
        )

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        if self.objects is not None:
            await self.objects.aclose()
        await self._stack.aclose()


def _timestamp(text: Any) -> datetime:
    """As botocore parses one, but faster for the spelling that listings use."""
    if isinstance(text, str) and text.endswith("Z"):
        with suppress(ValueError):
            return datetime.fromisoformat(text)
    read: datetime = parse_timestamp(text)
    return read


_log = logging.getLogger(__name__)

_NAMES_MAX = 1000
"""S3 takes no more in one request."""
_GONE = frozenset({"NoSuchKey", "NotFound", "404"})

DeleteMany = Callable[[Sequence[str]], Awaitable[Sequence[dict[str, Any]]]]
"""Sends one request; returns S3's errors on the names that it did not remove: their `Key` and `Code`."""


class BulkDelete:
    """Removes names, a thousand with each request; one by one on an endpoint that refuses such requests.

    Args:
        delete_many: As `DeleteMany`; raises the errors of this package.
        delete_one: Removes one name; an absent one is no error.
        where: Bucket and endpoint, for messages.
    """

    def __init__(self, delete_many: DeleteMany, delete_one: Callable[[str], Any], where: dict[str, str]) -> None:
        self._delete_many = delete_many
        self._delete_one = delete_one
        self._where = where
        self._refused = False

    async def __call__(self, names: Sequence[str]) -> None:
        """Remove names; absent ones are ignored.

        Raises:
            Unavailable: S3 refused some or did not answer. Others may be gone.
        """
        chunks = [names[start : start + _NAMES_MAX] for start in range(0, len(names), _NAMES_MAX)]
        await gather_all(self._chunk(chunk) for chunk in chunks)

    async def _chunk(self, names: Sequence[str]) -> None:
        if self._refused or len(names) == 1:
            await self._one_by_one(names)
            return
        try:
            left = await self._delete_many(names)
        except Transient:
            raise
        except Unavailable as error:
            # Either it does not know this request, or it refuses us everything: then this raises.
            await self._one_by_one(names)
            if not self._refused:
                self._refused = True
                _log.warning("S3 refuses to remove many objects at once, which costs a request each: %s", error)
            return
        again = []
        for item in left:
            code = str(item.get("Code", ""))
            if code in _GONE:
                continue
            outcome = refusal(code, None, self._where)
            if not isinstance(outcome, Transient):
                raise (
                    outcome
                    if isinstance(outcome, Unavailable)
                    else Unavailable("S3 did not remove an object: see the endpoint's log", **self._where, code=code)
                )
            again.append(item["Key"])
        await self._one_by_one(again)

    async def _one_by_one(self, names: Sequence[str]) -> None:
        await gather_all(self._delete_one(name) for name in names)


def add_content_md5(request: Any, **_: Any) -> None:
    """Called by botocore before it signs: older endpoints insist on this digest of the list."""
    digest = hashlib.md5(request.data, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()
