"""Signatures of requests for whole objects: AWS Signature Version 4, payload unsigned, no query.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. botocore's signer derives the day's key
for each request and copies the request's fields several times: much of what a GET of 1 MiB costs in Python.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

__all__ = ["Credentials", "Signer"]

_UNSIGNED = "UNSIGNED-PAYLOAD"
"""Records carry their own checksums: hashing every byte again would triple the cost of a transfer."""


class Credentials(Protocol):
    """As botocore freezes them.

    Attributes:
        access_key: Who asks.
        secret_key: Proves it.
        token: Of a session; `None`: there is none.
    """

    access_key: str
    secret_key: str
    token: str | None


class Signer:
    """Signs requests to one endpoint.

    Args:
        host: The endpoint's, with its port where requests name it.
        region: The region that signatures are made for.
    """

    def __init__(self, host: str, region: str) -> None:
        self._host = host
        self._region = region
        self._key = b""
        self._key_of = ("", "")  # the secret and the day that it was derived from

    def sign(
        self, verb: str, path: str, fields: Mapping[str, str], credentials: Credentials, now: datetime
    ) -> dict[str, str]:
        """All fields to send, names in lower case: those given, the host's, and those that sign them.

        Args:
            verb: The HTTP method.
            path: As it is sent: encoded, without a query.
            fields: Further fields, which are signed too.
            credentials: Whose signature it is.
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
