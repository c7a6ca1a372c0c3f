"""The S3 client: many objects removed at once, and dates in answers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.utils import parse_timestamp

from kvstore.errors import Unavailable
from kvstore.runtime.meters import Meters
from kvstore.tiers.s3.client import S3Client, timestamp
from kvstore.tiers.s3.pacing import Pace

ANSWERED: dict[str, Any] = {"ResponseMetadata": {"HTTPHeaders": {"content-type": "application/xml"}}}
NAMES = [f"v1/{number}" for number in range(2500)]


class Bucket:
    """A client of a bucket that holds names. `refuses` is the error code for requests on many names; `keeps` has the
    code that a name is not removed for."""

    def __init__(self, refuses: str = "", keeps: dict[str, str] | None = None) -> None:
        self.names = set(NAMES)
        self.refuses = refuses
        self.keeps = keeps or {}
        self.lengths: list[int] = []
        self.num_single = 0
        events = SimpleNamespace(register=lambda *_: None)
        self.meta = SimpleNamespace(endpoint_url="http://127.0.0.1:9", events=events)
        self.delete_all = S3Client("pages", self, AsyncExitStack(), Pace(8), Meters()).delete_all

    async def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        names = [item["Key"] for item in Delete["Objects"]]
        self.lengths.append(len(names))
        if self.refuses:
            raise ClientError({"Error": {"Code": self.refuses}}, "DeleteObjects")
        self.names -= set(names) - set(self.keeps)
        kept = [{"Key": name, "Code": self.keeps[name]} for name in names if name in self.keeps]
        return {**ANSWERED, "Errors": kept}

    async def delete_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        self.num_single += 1
        self.names.discard(Key)
        return ANSWERED


async def test_a_thousand_with_each_request() -> None:
    """2,500 names are three requests; none is none, and one needs no list."""
    bucket = Bucket()
    await bucket.delete_all(NAMES)
    assert bucket.lengths == [1000, 1000, 500] and not bucket.names and bucket.num_single == 0
    await bucket.delete_all([])
    await bucket.delete_all(NAMES[:1])
    assert len(bucket.lengths) == 3 and bucket.num_single == 1


async def test_names_that_are_gone_or_stay_for_the_moment() -> None:
    """A name that is not there is no error; one that the endpoint had no time for is asked for alone."""
    bucket = Bucket(keeps={NAMES[3]: "NoSuchKey", NAMES[4]: "SlowDown", NAMES[5]: "InternalError"})
    await bucket.delete_all(NAMES[:10])
    assert bucket.lengths == [10] and bucket.num_single == 2
    assert bucket.names == {NAMES[3], *NAMES[10:]}


@pytest.mark.parametrize("code", ["AccessDenied", "PreconditionFailed", ""])
async def test_a_name_that_may_not_be_removed(code: str) -> None:
    """A name that S3 refuses to remove is unavailable, with the error code; it does not count as removed."""
    bucket = Bucket(keeps={NAMES[3]: code})
    with pytest.raises(Unavailable, match="S3"):
        await bucket.delete_all(NAMES[:10])


async def test_an_endpoint_that_knows_no_such_request() -> None:
    """It is asked once; from then on names go one by one."""
    bucket = Bucket(refuses="NotImplemented")
    await bucket.delete_all(NAMES[:10])
    await bucket.delete_all(NAMES[10:20])
    assert bucket.lengths == [10] and bucket.num_single == 20
    assert bucket.names == set(NAMES[20:])


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
async def test_a_passing_failure_is_no_refusal(code: str) -> None:
    """An endpoint that is busy is not sent a thousand requests instead, and many names are sent to it again."""
    bucket = Bucket(refuses=code)
    with pytest.raises(Unavailable, match=code):
        await bucket.delete_all(NAMES[:10])
    bucket.refuses = ""
    await bucket.delete_all(NAMES[:10])
    assert bucket.lengths == [10] * 4 and bucket.num_single == 0


@pytest.mark.parametrize(
    "spelled",
    ["2026-11-22T13:00:01.250Z", "2026-11-22T13:00:01Z", "2026-11-22T13:00:01+00:00", "1795352401", 1795352401,
     "Sun, 22 Nov 2026 13:00:01 GMT"],
)  # fmt: skip
def test_a_date_is_what_botocore_reads(spelled: str | int) -> None:
    """A listing's, one with a zone, seconds since 1970 as text and as a number, and a header's."""
    assert timestamp(spelled) == parse_timestamp(spelled)


def test_what_is_no_date_is_refused() -> None:
    """As botocore does, though it ends as a listing's date does."""
    with pytest.raises(ValueError, match="Invalid timestamp"):
        timestamp("no dateZ")
