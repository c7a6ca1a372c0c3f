"""The S3 client: its configuration, and all requests except those for records, which `objects.py` sends."""

from __future__ import annotations

import base64
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, TypeVar

import aioboto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.loaders import Loader, create_loader
from botocore.utils import get_environ_proxies, parse_timestamp

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.background import gather_all
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.io_loops import IoLoop
from kvstore.runtime.meters import Meters
from kvstore.runtime.retries import retry
from kvstore.tiers.locations import S3Location, without_secrets
from kvstore.tiers.s3.failures import (
    Absent,
    Conflict,
    NoBucket,
    NotFound,
    Taken,
    Transient,
    lacking,
    refusal,
    translated,
    unexpected,
)
from kvstore.tiers.s3.http import Connections
from kvstore.tiers.s3.objects import Object, Objects, allocate_once
from kvstore.tiers.s3.pacing import Pace
from kvstore.tiers.s3.trust import endpoint_tls, require_host_names

_log = logging.getLogger(__name__)

T = TypeVar("T")

Credentials = tuple[str, str]
"""Access key and secret key."""

_CHUNK_BYTES = 1 << 20
_CONNECT_S = 3.0
_READ_S = 20.0
_SEEN_S = 1.0
"""How long an answer of the bucket lets HEADs without an object be believed."""
_NAMES_MAX = 1000
"""S3's limit for names in one request."""

_VERBS = {"ListObjectsV2": "LIST", "CopyObject": "COPY", "DeleteObjects": "DELETE"}
"""Operations that are not counted under their HTTP method, because they are priced differently."""

_DOCUMENTS = frozenset({"list_objects_v2", "delete_objects", "copy_object"})
"""Operations that S3 answers by a document, also where it has nothing to say."""

_NO_CONDITIONS = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest"})
"""Error codes of endpoints that do not support conditions on a copy or a removal."""
_GONE = frozenset({"NoSuchKey", "NotFound", "404"})


@cache
def _loader(data_path: str | None) -> Loader:
    """What S3 is, as its library describes it in files that take three quarters of an `open` to read: read once."""
    return create_loader(data_path)


class S3Client:
    """Requests on one bucket; make one with `open`. Foreign exceptions do not leave it (see `failures`).

    Attributes:
        endpoint: Where the bucket is, for people: without a login.
        objects: The byte path; `None` behind an HTTP proxy, which it does not support.
    """

    def __init__(self, bucket: str, client: Any, stack: AsyncExitStack, pace: Pace, meters: Meters) -> None:
        self.bucket = bucket
        self.endpoint = without_secrets(client.meta.endpoint_url)
        self.objects: Objects | None = None
        self._where = {"bucket": bucket, "endpoint": self.endpoint}
        self._client = client
        self._stack = stack
        self._pace = pace
        self._meters = meters
        self._bucket_seen_s = -math.inf
        self._refuses_many = False
        client.meta.events.register("before-send.s3", self._count)
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_content_md5)

    @classmethod
    async def open(
        cls,
        location: S3Location,
        *,
        num_connections: int,
        credentials: Credentials | None = None,
        meters: Meters | None = None,
        io_loops: Sequence[IoLoop] = (),
    ) -> S3Client:
        """Make the client; sends nothing to the bucket. Without `credentials` it uses those of the AWS environment.
        The bytes of records move on `io_loops`, see `Connections`.

        Raises:
            InvalidRequest: The AWS settings are wrong, for example an unknown profile or a malformed endpoint. Or the
                installed client cannot be made to check the endpoint's host name.
        """
        require_host_names()
        meters = meters or Meters()
        config = Config(
            signature_version="s3v4",
            max_pool_connections=num_connections,
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": 1},  # `Pace` retries
            # Records carry their own checksums: hashing every byte again would triple the cost of a transfer.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        access_key, secret_key = credentials or (None, None)
        try:
            async with AsyncExitStack() as stack:
                session = aioboto3.Session(aws_access_key_id=access_key, aws_secret_access_key=secret_key)
                own = session._session
                own.register_component("data_loader", _loader(own.get_config_variable("data_path")))
                # botocore's own way of parsing dates took most of the time of a listing
                own.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=timestamp)
                region = location.region or session.region_name or "us-east-1"
                client = await stack.enter_async_context(
                    session.client("s3", endpoint_url=location.endpoint_url, region_name=region, config=config)
                )
                pace, url, objects = Pace(num_connections, meters), client.meta.endpoint_url, None
                if not get_environ_proxies(url):
                    tls = endpoint_tls(client._endpoint.http_session._verify)  # the authorities of other requests
                    objects = Objects(
                        location.bucket,
                        url,
                        client.meta.region_name,
                        await session.get_credentials(),
                        connections=Connections(url, tls, num_idle_max=num_connections, io_loops=io_loops),
                        pace=pace,
                        meters=meters,
                    )
                self = cls(location.bucket, client, stack.pop_all(), pace, meters)
        except OSError as error:
            text = (
                "the authorities of S3 cannot be read: AWS_CA_BUNDLE, or ca_bundle of the profile, must name a PEM file"
            )
            raise InvalidRequest(text, bucket=location.bucket, error=error) from error
        except (BotoCoreError, ValueError) as error:
            raise InvalidRequest("the AWS settings are wrong", bucket=location.bucket, error=error) from error
        self.objects = objects
        return self

    def _count(self, request: Any, event_name: str, **_: Any) -> None:
        """Called by botocore before each attempt."""
        verb = _VERBS.get(event_name.rpartition(".")[2], request.method)
        self._meters.add("s3_requests", verb=verb)

    async def _send(self, operation: str, *, expects: tuple[type[Exception], ...] = (), **parameters: Any) -> Any:
        """Send a request of the general client; see `_run`."""

        async def request() -> Any:
            with translated(self._where):
                answer = self._from_s3(await getattr(self._client, operation)(Bucket=self.bucket, **parameters))
            if operation in _DOCUMENTS and answer["ResponseMetadata"]["HTTPHeaders"].get("content-length") == "0":
                raise lacking(self._where, "content")  # botocore finds an empty list in it, or a done removal
            return answer

        return await self._run(lambda: self._pace.send(request), expects)

    def _from_s3(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer, unless it is a page: botocore follows a redirect to a login, and finds no content in it."""
        if "html" in answer["ResponseMetadata"]["HTTPHeaders"].get("content-type", ""):
            text = "a page for a browser was the answer: check endpoint_url, and what stands in front of S3"
            raise Unavailable(text, **self._where)
        return answer

    async def _run(self, request: Callable[[], Awaitable[T]], expects: tuple[type[Exception], ...]) -> T:
        """Run a request.

        Raises:
            Absent, Taken, Conflict: Those of `expects`.
            Unavailable: S3 refused or did not answer; without `expects` also in place of the above.
        """
        try:
            answer = await request()
        except expects:
            raise
        except (NoBucket, Absent) as error:
            self._bucket_seen_s = -math.inf
            raise Unavailable(
                "the S3 bucket does not exist: create it, or correct its name or the endpoint", **self._where
            ) from error
        except (Taken, Conflict) as error:
            raise unexpected(self._where) from error
        self._bucket_seen_s = SYSTEM_CLOCK.monotonic_s()
        return answer

    async def get_record(self, name: str, allocate: Callable[[int], memoryview]) -> Object | None:
        """As `get`, over the byte path if there is one."""
        objects = self.objects
        if objects is None:
            return await self.get(name, allocate)
        return await self._found(lambda: objects.get(name, allocate))

    async def _found(self, request: Callable[[], Awaitable[Object]]) -> Object | None:
        """Run a request for an object; `None`: there is no such object."""
        try:
            return await self._run(request, (Absent,))
        except NotFound:  # by another server, unless this one has the bucket
            await self.check_bucket()
        except Absent:
            self._bucket_seen_s = SYSTEM_CLOCK.monotonic_s()
        return None

    async def put_record(self, name: str, body: memoryview) -> None:
        """As `put` with `if_absent`, over the byte path if there is one."""
        objects = self.objects
        if objects is None:
            await self.put(name, bytes(body), if_absent=True)  # the client does not accept a memoryview
        else:
            await self._run(lambda: objects.put(name, body), (Taken, Conflict))

    async def head(self, name: str) -> tuple[int, str] | None:
        """Bytes of an object and its ETag, or `None`."""
        try:
            answer = await self._send("head_object", expects=(Absent,), Key=name)
        except Absent:
            # a HEAD has no body that tells a missing object from a missing bucket, or S3 from another server
            if SYSTEM_CLOCK.monotonic_s() - self._bucket_seen_s > _SEEN_S:
                await self.check_bucket()
            return None
        return int(self._said(answer, "ContentLength")), str(self._said(answer, "ETag"))

    def _said(self, answer: Mapping[str, Any], field: str) -> Any:
        """A field that S3 has in every answer of this kind."""
        if field not in answer:
            raise lacking(self._where, field)
        return answer[field]

    async def get(self, name: str, allocate: Callable[[int], memoryview]) -> Object | None:
        """An object, in a buffer of its size from `allocate`; `None`: there is no such object."""
        place = allocate_once(allocate)

        async def request() -> Object:
            with translated(self._where):
                answer = self._from_s3(await self._client.get_object(Bucket=self.bucket, Key=name))
                num_bytes = int(self._said(answer, "ContentLength"))
                async with answer["Body"] as body:
                    buffer = place(num_bytes)
                    done = 0
                    async for chunk in body.content.iter_chunked(_CHUNK_BYTES):
                        buffer[done : done + len(chunk)] = chunk
                        done += len(chunk)
            if done != num_bytes:
                raise Unavailable("S3 sent less than it announced", **self._where, expected=num_bytes, seen=done)
            return Object(buffer, str(answer.get("ETag", "")))

        return await self._found(lambda: self._pace.send(request))

    async def put(self, name: str, body: bytes, *, if_absent: bool) -> None:
        """Store an object.

        Raises:
            Taken: `if_absent`, and there is one.
            Conflict: `if_absent`, and another put of the same name was in progress.
        """
        if if_absent:
            answer = await self._send("put_object", expects=(Taken, Conflict), Key=name, Body=body, IfNoneMatch="*")
        else:
            answer = await self._send("put_object", Key=name, Body=body)
        self._said(answer, "ETag")

    async def delete(self, name: str) -> None:
        """Remove an object; an absent one is no error."""
        try:
            await self._send("delete_object", expects=(Absent,), Key=name)
        except NotFound:
            await self.check_bucket()
        except Absent:
            return

    async def delete_all(self, names: Sequence[str]) -> None:
        """Remove many objects, a thousand per request; one by one if the endpoint refuses such requests.

        Absent names are ignored.

        Raises:
            Unavailable: S3 refused some or did not answer. Others may be gone.
        """
        chunks = [names[start : start + _NAMES_MAX] for start in range(0, len(names), _NAMES_MAX)]
        await gather_all(self._delete_chunk(chunk) for chunk in chunks)

    async def _delete_chunk(self, names: Sequence[str]) -> None:
        if self._refuses_many or len(names) == 1:
            await gather_all(self.delete(name) for name in names)
            return
        try:
            # not `Quiet`: then Alibaba's OSS and others that follow it answer a removal without a word, as no S3 does
            wanted = {"Objects": [{"Key": name} for name in names]}
            answer = await self._send("delete_objects", Delete=wanted)
        except Transient:
            raise
        except Unavailable as error:
            # it refuses this kind of request, or all: in the second case the next line raises
            await gather_all(self.delete(name) for name in names)
            if not self._refuses_many:
                self._refuses_many = True
                _log.warning("S3 refuses to remove many objects at once, which costs a request each: %s", error)
            return
        again = []
        for item in answer.get("Errors", ()):
            code = str(item.get("Code", ""))
            if code in _GONE:
                continue
            outcome = refusal(code, None, self._where)
            if isinstance(outcome, Transient):
                again.append(item["Key"])
            elif isinstance(outcome, Unavailable):
                raise outcome
            else:
                raise Unavailable("S3 did not remove an object: see the endpoint's log", **self._where, code=code)
        await gather_all(self.delete(name) for name in again)

    async def move(
        self, source: str, target: str, tag: str | None, *, keeps: Callable[[int], bool] = lambda _: True
    ) -> bool:
        """Copy an object and remove it. False: it is absent, or its ETag is not `tag` (`None`: any).

        Args:
            tag: As above.
            keeps: Whether an object of this size is copied before it is removed.

        Some endpoints, like Ceph's gateway, ignore or refuse conditions on copies and removals. They may move an object
        that another writer stored a few requests ago; S3 offers nothing that prevents this.
        """
        seen = await self.head(source)
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
        return True

    async def _copy_and_remove(
        self, source: str, target: str | None, if_copied: Mapping[str, str], if_removed: Mapping[str, str]
    ) -> None:
        expects = (Absent, Taken, Conflict)
        if target is not None:
            origin = {"Bucket": self.bucket, "Key": source}
            await self._send("copy_object", expects=expects, Key=target, CopySource=origin, **if_copied)
        await self._send("delete_object", expects=expects, Key=source, **if_removed)

    async def list(self, prefix: str) -> AsyncIterator[list[tuple[str, int, float | None]]]:
        """Names that start with `prefix`, with their sizes and ages in seconds, as many at a time as S3 lists in one
        answer. A walk may last for hours, so what passes does not end it.
        """
        token: dict[str, Any] = {}
        while True:
            page = partial(self._send, "list_objects_v2", Prefix=prefix, **token)
            answer = await retry(page, Transient)
            age_s = _ages(answer["ResponseMetadata"]["HTTPHeaders"].get("date", ""))
            yield [
                (self._said(item, "Key"), int(self._said(item, "Size")), age_s(item))
                for item in answer.get("Contents", ())
            ]
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": self._said(answer, "NextContinuationToken")}

    async def list_folders(self, prefix: str) -> Sequence[str]:
        """The names' next components after `prefix`, up to a slash, each once; the first thousand."""
        answer = await self._send("list_objects_v2", Prefix=prefix, Delimiter="/")
        return [item["Prefix"][len(prefix) : -1] for item in answer.get("CommonPrefixes", ())]

    async def check_bucket(self) -> None:
        """Check that the bucket exists and may be used.

        Raises:
            Unavailable: It does not exist, or may not be used; the message names the next step.
        """
        await self._send("head_bucket")

    async def lifecycle(self) -> Sequence[Mapping[str, Any]]:
        """The bucket's lifecycle rules, by which S3 removes or moves objects, in S3's own form.

        Raises:
            Unavailable: They cannot be read; `details["code"]` is S3's error code, if it sent one.
        """
        try:
            answer = await self._send("get_bucket_lifecycle_configuration")
        except Unavailable as error:
            if error.details.get("code") == "NoSuchLifecycleConfiguration":
                return []
            raise
        rules: Sequence[Mapping[str, Any]] = answer.get("Rules", ())
        return rules

    def on_answer(self, report: Callable[[Mapping[str, str]], None]) -> None:
        """Call `report` with the header fields, in lower case, of each answer to the general client."""

        def received(parsed: Mapping[str, Any], **_: Any) -> None:
            report(parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}))

        self._client.meta.events.register("after-call.s3", received)

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        if self.objects is not None:
            await self.objects.aclose()
        await self._stack.aclose()


def _add_content_md5(request: Any, **_: Any) -> None:
    """Called by botocore before it signs: older endpoints require this digest of the list."""
    digest = hashlib.md5(request.data, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


def _ages(date: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Ages of listed objects in seconds, by the clock of S3: the date of the answer, and not that of this machine.
    `None` where the answer has no date, or the object has none.
    """
    listed_at: datetime | None = None
    with suppress(ValueError, OverflowError):
        listed_at = parsedate_to_datetime(date)

    def age_s(item: Mapping[str, Any]) -> float | None:
        stored_at: datetime | None = item.get("LastModified")
        if listed_at is None or stored_at is None or not (listed_at.tzinfo and stored_at.tzinfo):
            return None
        return (listed_at - stored_at).total_seconds()

    return age_s


def timestamp(text: Any) -> datetime:
    """As botocore's parser, but faster for the form that listings use."""
    if isinstance(text, str) and text.endswith("Z"):
        with suppress(ValueError):
            return datetime.fromisoformat(text)
    parsed: datetime = parse_timestamp(text)
    return parsed
