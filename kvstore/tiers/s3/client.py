"""The S3 client: how it is configured, and how bytes get into a buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aioboto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.tiers.s3.failures import Absent, NoBucket, translated

__all__ = ["S3Client"]

_CHUNK_BYTES = 1 << 20
_CONNECT_S = 3.0
_READ_S = 20.0
_ATTEMPTS = 3


class S3Client:
    """Requests on one bucket; make one with `open`. Foreign exceptions do not leave it (see `failures`)."""

    def __init__(self, bucket: str, client: Any, stack: AsyncExitStack) -> None:
        self.bucket = bucket
        self.endpoint: str = client.meta.endpoint_url
        self._client = client
        self._stack = stack
        self._bucket_seen = False

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
    ) -> S3Client:
        """Make the client; sends nothing to the bucket. What is `None` comes from the usual AWS environment.

        Raises:
            InvalidRequest: The AWS settings are wrong, e.g. an unknown profile or an endpoint that is no url.
        """
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
            client = await stack.enter_async_context(
                session.client(
                    "s3",
                    endpoint_url=endpoint_url,
                    region_name=region or session.region_name or "us-east-1",
                    config=config,
                )
            )
        except (BotoCoreError, ValueError) as error:
            await stack.aclose()
            raise InvalidRequest("the AWS settings are wrong", bucket=bucket, error=error) from error
        except BaseException:
            await stack.aclose()
            raise
        return cls(bucket, client, stack)

    async def head(self, name: str) -> int | None:
        """Bytes of an object, or `None`."""
        try:
            with translated(self.bucket, self.endpoint):
                answer = await self._client.head_object(Bucket=self.bucket, Key=name)
        except Absent:
            # A HEAD has no body to tell a missing object from a missing bucket.
            if not self._bucket_seen:
                await self.check_bucket()
            return None
        except NoBucket as error:
            raise self._no_bucket() from error
        self._bucket_seen = True
        return int(answer["ContentLength"])

    async def get(self, name: str, allocate: Callable[[int], memoryview]) -> memoryview | None:
        """The bytes of an object in the buffer that `allocate` returns for their number, or `None`."""
        try:
            with translated(self.bucket, self.endpoint):
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
        return buffer

    async def put(self, name: str, body: bytes, *, if_absent: bool) -> None:
        """Store an object.

        Raises:
            Taken: `if_absent`, and there is one. `Conflict`: it could not be decided now.
        """
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            with translated(self.bucket, self.endpoint):
                await self._client.put_object(Bucket=self.bucket, Key=name, Body=body, **condition)
        except (NoBucket, Absent) as error:
            raise self._no_bucket() from error
        self._bucket_seen = True

    async def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        try:
            with translated(self.bucket, self.endpoint):
                await self._client.delete_object(Bucket=self.bucket, Key=name)
        except NoBucket as error:
            raise self._no_bucket() from error
        except Absent:
            return

    async def copy(self, source: str, target: str) -> bool:
        """Copy an object inside the bucket. False: it is not there."""
        try:
            with translated(self.bucket, self.endpoint):
                where = {"Bucket": self.bucket, "Key": source}
                await self._client.copy_object(Bucket=self.bucket, Key=target, CopySource=where)
        except Absent:
            return False
        except NoBucket as error:
            raise self._no_bucket() from error
        return True

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Names that start with `prefix`, with their bytes."""
        token: dict[str, str] = {}
        while True:
            try:
                with translated(self.bucket, self.endpoint):
                    answer = await self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **token)
            except NoBucket as error:
                raise self._no_bucket() from error
            for item in answer.get("Contents", ()):
                yield item["Key"], int(item["Size"])
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    async def check_bucket(self) -> None:
        """See that the bucket is there and may be used.

        Raises:
            Unavailable: It is not; the message names the next step.
        """
        try:
            with translated(self.bucket, self.endpoint):
                await self._client.head_bucket(Bucket=self.bucket)
        except (Absent, NoBucket) as error:
            raise self._no_bucket() from error
        self._bucket_seen = True

    def _no_bucket(self) -> Unavailable:
        self._bucket_seen = False
        return Unavailable(
            "the S3 bucket does not exist: create it, or correct its name", bucket=self.bucket, endpoint=self.endpoint
        )

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        await self._stack.aclose()
