"""Turns errors of S3 and of its client into the errors of this package."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import ClientError as HttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from kvstore.errors import Unavailable
from kvstore.runtime.files import NO_MORE_FILES
from kvstore.tiers.refusals import Refused

_CREDENTIALS = "check the access key, the secret key and that they belong to this endpoint"
_POLICY = "give the credentials s3:GetObject, PutObject, DeleteObject and ListBucket on the bucket, or use others"
_REGION = "name the bucket's own region with ?region= in the url of cold or in AWS_REGION, and its endpoint"
_BUSY = "the endpoint is over its limits: try again later"

_NEXT_STEP = {
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": f"{_CREDENTIALS}; AWS_SESSION_TOKEN belongs to temporary keys, and to no others",
    "ExpiredToken": "renew AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the login of AWS_PROFILE",
    "AccessDenied": _POLICY,
    "403": f"{_CREDENTIALS}; {_POLICY}",
    "RequestTimeTooSkewed": "set this machine's clock",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    **dict.fromkeys(("301", "302", "303", "307", "308"), "write the address that it redirects to as endpoint_url"),
    "QuotaExceeded": "raise the quota or remove objects",
    "XMinioStorageFull": "make room on its disks, or set a smaller cold_bytes",
    "413": "a server in front of it limits the size of requests: raise that limit (client_max_body_size of nginx)",
}
_BUSY_CODES = frozenset({"SlowDown", "503", "429", "Throttling", "ThrottlingException", "RequestLimitExceeded"})
_PASSING_CODES = frozenset({"InternalError", "RequestTimeout", "ServiceUnavailable"})
_REFUSED_CODES = frozenset({"AccessDenied", "QuotaExceeded", "XMinioStorageFull", "413"})
"""Codes with which an endpoint that answers refuses some kinds of requests."""
_PASSING_STATUS = frozenset({500, 502, 504})

REGION_FIELD = "x-amz-bucket-region"
"""Field of an answer."""


class Absent(Exception):
    """No such object. This error and the next four do not leave this package."""


class NotFound(Absent):
    """HTTP's 404 without S3's code: so S3 answers a HEAD, and any other server a path that it does not know."""


class NoBucket(Exception):
    """No such bucket."""


class Taken(Exception):
    """A conditional put found an object."""


class Conflict(Exception):
    """A conditional put of this name is in progress."""


class Transient(Unavailable):
    """A retry may succeed."""


class Throttled(Transient):
    """The endpoint asks for fewer requests."""


def refusal(code: str, status: int | None, where: dict[str, str], region: str = "") -> Exception:
    """The error for an unsuccessful answer: one of the outcomes above, or `Unavailable` with the next step.

    Args:
        code: S3's code for the error; without one the status.
        status: As HTTP has it; `None`: the answer was on several objects.
        where: Details of the error.
        region: The bucket's, as the answer names it.
    """
    if code == "NoSuchBucket":
        return NoBucket()
    if code == "NoSuchKey":
        return Absent()
    if code in ("404", "NotFound"):
        return NotFound()
    if code in ("PreconditionFailed", "412"):
        return Taken()
    if code in ("ConditionalRequestConflict", "OperationAborted", "409"):
        return Conflict()
    if code in _BUSY_CODES or status in (429, 503):
        return Throttled(f"S3 refused a request: {_BUSY}", **where, code=code, status=status)
    next_step = _NEXT_STEP.get(code, "see the endpoint's log")
    if next_step is _REGION and re.fullmatch("[a-z0-9-]{1,32}", region):
        next_step = f"the bucket is in {region}: write ?region={region} in the url of cold, or set AWS_REGION"
    is_passing = code in _PASSING_CODES or status in _PASSING_STATUS
    kind = Transient if is_passing else Refused if code in _REFUSED_CODES else Unavailable
    return kind(f"S3 refused a request: {next_step}", **where, code=code, status=status)


def unexpected(where: dict[str, str]) -> Unavailable:
    """`Taken` or `Conflict` for a request without a condition."""
    return Unavailable("S3 refused a request as if it had a condition: see the endpoint's log", **where)


def cannot_connect(where: dict[str, str], reason: object) -> Transient:
    """No server listens at the endpoint, its name is unknown, or this process has too many open files."""
    number, next_step = _number(reason), "check the endpoint's address and that something listens there"
    error = {"error": os.strerror(number)} if number > 0 else {}
    return Transient(f"cannot connect to S3: {NO_MORE_FILES.get(number, next_step)}", **where, **error)


def _number(error: object) -> int:
    """Of an error of the operating system; 0: it has none."""
    number = getattr(error, "errno", None)
    return number if isinstance(number, int) else 0


def untrusted(where: dict[str, str], reason: object) -> Unavailable:
    """TLS with the endpoint failed, usually because its certificate is not trusted."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        step = "name the authority in AWS_CA_BUNDLE, and the endpoint as its certificate does"
        return Unavailable(f"the certificate of S3 is not trusted: {step}", **where, error=reason.verify_message)
    return Unavailable("S3 refused TLS: without TLS, the endpoint is http://, not https://", **where, error=reason)


def broken_off(where: dict[str, str], reason: object) -> Transient:
    """A connection was lost before the answer was whole."""
    return Transient("S3 did not answer in full: check the endpoint's health and the network", **where, error=reason)


def lacking(where: dict[str, str], field: str) -> Transient:
    """An answer has no field that S3 has in every answer of this kind."""
    return broken_off(where, f"no {field} in the answer: check what stands between us and the endpoint")


@contextmanager
def translated(where: dict[str, str]) -> Iterator[None]:
    """Turn errors of the client into `Unavailable` with the next step, or into one of the errors above."""
    try:
        yield
    except ClientError as error:
        answer = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        fields = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = str(answer.get("Region", fields.get(REGION_FIELD, "")))
        raise refusal(str(answer.get("Code", status)), status, where, region) from error
    except NoCredentialsError as error:
        raise Unavailable(
            "there are no S3 credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE", **where
        ) from error
    except (CredentialRetrievalError, SSOError, TokenRetrievalError) as error:
        text = "the S3 credentials can no longer be fetched: renew the login of AWS_PROFILE, or see what provides them"
        raise Unavailable(text, **where, error=type(error).__name__) from error
    except EndpointConnectionError as error:
        raise cannot_connect(where, error.kwargs.get("error")) from error
    except SSLError as error:
        inner = error.kwargs.get("error")
        raise untrusted(where, getattr(inner, "certificate_error", getattr(inner, "os_error", error))) from error
    except (TimeoutError, BotoCoreError, ResponseParserError, HttpError, OSError) as error:
        cause = error.kwargs.get("error") if isinstance(error, BotoCoreError) else error
        if _number(cause) in NO_MORE_FILES:
            raise cannot_connect(where, cause) from error
        raise broken_off(where, type(error).__name__) from error
