"""Removes many objects with one request, if the endpoint can."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstore.errors import Unavailable
from kvstore.tiers.gather import gather_all
from kvstore.tiers.s3.failures import Transient, refusal

__all__ = ["BulkDelete", "add_content_md5"]

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
