"""What an error of the S3 client means for a tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, NoCredentialsError

from kvstore.errors import Unavailable

__all__ = ["Absent", "Conflict", "NoBucket", "Taken", "translated"]

_CREDENTIALS = "check the access key, the secret key and that they belong to this endpoint"
_POLICY = "give the credentials s3:GetObject, PutObject, DeleteObject and ListBucket on the bucket, or use other ones"
_BUSY = "the endpoint is over its limits: it may be asked again later"

_NEXT_STEP = {
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": "renew the credentials",
    "AccessDenied": _POLICY,
    "403": f"{_CREDENTIALS}; {_POLICY}",
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": "name the bucket's own region and endpoint",
    "SlowDown": _BUSY,
    "503": _BUSY,
    "QuotaExceeded": "raise the quota or remove objects",
}


class Absent(Exception):
    """No such object. Stays inside this package, as do the others."""


class NoBucket(Exception):
    """No such bucket."""


class Taken(Exception):
    """A conditional put found an object."""


class Conflict(Exception):
    """A conditional put met another one under way."""


@contextmanager
def translated(bucket: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the client into `Unavailable` with the next step, or into one of the outcomes above."""
    where = {"bucket": bucket, "endpoint": endpoint}
    try:
        yield
    except ClientError as error:
        answer = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(answer.get("Code", status))
        if code == "NoSuchBucket":
            raise NoBucket from error
        if code in ("NoSuchKey", "404", "NotFound"):
            raise Absent from error
        if code in ("PreconditionFailed", "412"):
            raise Taken from error
        if code in ("ConditionalRequestConflict", "OperationAborted", "409"):
            raise Conflict from error
        next_step = _NEXT_STEP.get(code, "see the endpoint's log")
        raise Unavailable(f"S3 refused a request: {next_step}", **where, code=code, status=status) from error
    except NoCredentialsError as error:
        raise Unavailable(
            "there are no S3 credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE", **where
        ) from error
    except EndpointConnectionError as error:
        raise Unavailable(
            "cannot connect to S3: check the endpoint's address and that something listens there", **where
        ) from error
    except (TimeoutError, BotoCoreError, HttpError, OSError) as error:
        raise Unavailable(
            "S3 did not answer in full: check the endpoint's health and the network",
            **where,
            error=type(error).__name__,
        ) from error
