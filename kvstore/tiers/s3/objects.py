"""GET and PUT of records, with botocore's credentials and our own connections: the byte path of the tier.

aioboto3 delivers a body in pieces, each of which is copied again; `make bench-store` prints the difference.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

from botocore.exceptions import NoCredentialsError
from botocore.utils import percent_encode

from kvstore.runtime.meters import Meters
from kvstore.tiers.locations import without_secrets
from kvstore.tiers.s3.failures import (
    REGION_FIELD,
    broken_off,
    cannot_connect,
    lacking,
    refusal,
    translated,
    untrusted,
)
from kvstore.tiers.s3.http import Answer, Connections, Lost, Place
from kvstore.tiers.s3.pacing import Pace

_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_REGION = re.compile(rb"<Region>([a-z0-9-]{1,32})</Region>")
_UNSIGNED = "UNSIGNED-PAYLOAD"
"""Records carry their own checksums: hashing every byte again would triple the cost of a transfer."""


@dataclass(frozen=True, slots=True)
class Object:
    """The bytes of an object, and its ETag, which another object of the same name would not have."""

    data: memoryview
    tag: str


def allocate_once(allocate: Place) -> Place:
    """As `allocate`, but a second call for the same size, in a retry, returns the same buffer."""
    held: memoryview | None = None

    def place(num_bytes: int) -> memoryview:
        nonlocal held
        if held is None or len(held) != num_bytes:
            held = allocate(num_bytes)
        return held

    return place


class Objects:
    """Requests on objects of one bucket.

    Args:
        endpoint: Its url, as botocore spells it.
        region: The region that signatures are made for.
        credentials: botocore's, which refreshes them. `None`: there are none, and the first request fails.
        connections: Owned from now on.
        pace: Limits and retries requests; shared by all requests to the endpoint.
    """

    def __init__(
        self,
        bucket: str,
        endpoint: str,
        region: str,
        credentials: Any,
        *,
        connections: Connections,
        pace: Pace,
        meters: Meters,
    ) -> None:
        endpoint = endpoint.rstrip("/")
        self._where = {"bucket": bucket, "endpoint": without_secrets(endpoint)}
        self._path = f"{urlsplit(endpoint).path}/{bucket}"
        self._signer = Signer(urlsplit(endpoint).netloc, region)
        self._credentials = credentials
        self._connections = connections
        self._pace = pace
        self._meters = meters

    async def get(self, name: str, allocate: Callable[[int], memoryview]) -> Object:
        """An object, in a buffer of its size from `allocate`.

        Raises:
            Absent: There is no such object.
            NoBucket: The bucket does not exist.
            Unavailable: S3 refused, or did not answer in full, even after retries.
        """
        place = allocate_once(allocate)
        answer = await self._pace.send(lambda: self._request("GET", name, None, {}, place))
        self._meters.add("s3_received_bytes", len(answer.body))
        return Object(answer.body if len(answer.body) else place(0), answer.fields.get("etag", ""))

    async def put(self, name: str, body: memoryview) -> None:
        """Store an object, if there is none of this name.

        Raises:
            Taken: There is one.
            Conflict: Another put of the same name was in progress.
            Absent, NoBucket: The bucket does not exist.
            Unavailable: As `get`.
        """
        fields = {"Content-Type": "application/octet-stream", "If-None-Match": "*"}
        answer = await self._pace.send(
            lambda: self._request("PUT", name, body, fields, lambda size: memoryview(bytearray(size)))
        )
        if "etag" not in answer.fields:  # another server may say yes to anything
            raise lacking(self._where, "ETag")
        self._meters.add("s3_sent_bytes", len(body))

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        await self._connections.aclose()

    async def _request(
        self, verb: str, name: str, body: memoryview | None, fields: Mapping[str, str], place: Place
    ) -> Answer:
        where = self._where
        while True:
            with translated(where):
                head = await self._signed(verb, name, len(body) if body is not None else None, fields)
            self._meters.add("s3_requests", verb=verb)
            try:
                async with self._connections.one() as (connection, is_used):
                    answer = await connection.request(head, body, place)
            except Lost as error:
                if is_used and error.before_answer:
                    continue  # the peer closed it while it was idle: use another one, at last a new one
                raise broken_off(where, error) from error
            except ssl.SSLError as error:
                raise untrusted(where, error) from error
            except OSError as error:
                raise cannot_connect(where, error) from error
            if 200 <= answer.status < 300:
                has_length = "content-length" in answer.fields and "transfer-encoding" not in answer.fields
                if verb == "GET" and not has_length:
                    # without a length, a body that was cut short would be quarantined as damaged
                    raise broken_off(where, "a body without a length: check what stands between us and the endpoint")
                return answer
            code, region = _CODE.search(answer.body), _REGION.search(answer.body)
            elsewhere = answer.fields.get("location")
            raise refusal(
                code[1].decode() if code is not None else str(answer.status),
                answer.status,
                where if elsewhere is None else {**where, "location": without_secrets(elsewhere[:200])},
                region[1].decode() if region is not None else answer.fields.get(REGION_FIELD, ""),
            )

    async def _signed(self, verb: str, name: str, body_bytes: int | None, fields: Mapping[str, str]) -> bytes:
        """Request line and fields, the empty line included."""
        if self._credentials is None:
            raise NoCredentialsError
        frozen = await self._credentials.get_frozen_credentials()
        path = f"{self._path}/{percent_encode(name, safe='/~')}"
        signed = self._signer.sign(verb, path, fields, frozen, datetime.now(UTC))
        lines = [f"{verb} {path} HTTP/1.1", *(f"{field}: {value}" for field, value in signed.items())]
        if body_bytes is not None:
            lines.append(f"Content-Length: {body_bytes}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class FrozenCredentials(Protocol):
    """Credentials as botocore freezes them; `token` is a session's, or `None`."""

    access_key: str
    secret_key: str
    token: str | None


class Signer:
    """Signs requests for whole objects to one endpoint: AWS Signature Version 4, payload unsigned, no query.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. botocore's signer derives the day's
    key for each request and copies the request's fields several times: 145 us a request where this takes 20.

    Args:
        host: The endpoint's, with its port if requests name it.
        region: The region that signatures are made for.
    """

    def __init__(self, host: str, region: str) -> None:
        self._host = host
        self._region = region
        self._key = b""
        self._key_of = ("", "")  # the secret and the day that it was derived from

    def sign(
        self, verb: str, path: str, fields: Mapping[str, str], credentials: FrozenCredentials, now: datetime
    ) -> dict[str, str]:
        """All fields to send, names in lower case: `fields`, the host's, and the signature's.

        Args:
            path: As it is sent: encoded, without a query.
            fields: Further fields, which are signed too.
            credentials: The signer's.
            now: The time in UTC.
        """
        at = now.strftime("%Y%m%dT%H%M%SZ")
        signed = {name.lower(): value for name, value in fields.items()}
        signed |= {"host": self._host, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": at}
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names = sorted(signed)
        lines = [f"{name}:{' '.join(signed[name].split())}" for name in names]
        request = "\n".join((verb, path, "", *lines, "", ";".join(names), _UNSIGNED))
        scope = f"{at[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = _hmac(self._key_for(credentials.secret_key, at[:8]), text).hex()
        who = f"Credential={credentials.access_key}/{scope}"
        signed["authorization"] = f"AWS4-HMAC-SHA256 {who}, SignedHeaders={';'.join(names)}, Signature={signature}"
        return signed

    def _key_for(self, secret_key: str, day: str) -> bytes:
        if self._key_of != (secret_key, day):
            key = f"AWS4{secret_key}".encode()
            for text in (day, self._region, "s3", "aws4_request"):
                key = _hmac(key, text)
            self._key, self._key_of = key, (secret_key, day)
        return self._key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
