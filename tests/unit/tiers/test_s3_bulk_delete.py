"""Many objects removed at once: how many requests, names that S3 keeps, endpoints that know no such request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.tiers.s3.client import BulkDelete
from kvstore.tiers.s3.failures import Throttled, Transient

NAMES = [f"v1/{number}" for number in range(2500)]


class Bucket:
    """Holds names; `refuses` is raised for many at once, `keeps` has the code that a name is not removed for."""

    def __init__(self, refuses: Exception | None = None, keeps: dict[str, str] | None = None) -> None:
        self.names = set(NAMES)
        self.refuses = refuses
        self.keeps = keeps or {}
        self.lengths: list[int] = []
        self.num_single = 0
        self.delete_all = BulkDelete(self.delete_many, self.delete_one, {"bucket": "pages"})

    async def delete_many(self, names: Sequence[str]) -> list[dict[str, Any]]:
        self.lengths.append(len(names))
        if self.refuses is not None:
            raise self.refuses
        self.names -= set(names) - set(self.keeps)
        return [{"Key": name, "Code": self.keeps[name]} for name in names if name in self.keeps]

    async def delete_one(self, name: str) -> None:
        self.num_single += 1
        self.names.discard(name)


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
    """Whatever S3 refuses for good is unavailable, with its code: never taken for removed."""
    bucket = Bucket(keeps={NAMES[3]: code})
    with pytest.raises(Unavailable, match="S3"):
        await bucket.delete_all(NAMES[:10])


async def test_an_endpoint_that_knows_no_such_request() -> None:
    """It is asked once; from then on names go one by one."""
    bucket = Bucket(refuses=Unavailable("S3 refused a request", code="NotImplemented"))
    await bucket.delete_all(NAMES[:10])
    await bucket.delete_all(NAMES[10:20])
    assert bucket.lengths == [10] and bucket.num_single == 20
    assert bucket.names == set(NAMES[20:])


@pytest.mark.parametrize("error", [Throttled("busy"), Transient("lost")])
async def test_a_passing_failure_is_no_refusal(error: Unavailable) -> None:
    """An endpoint that is busy or was lost is not asked a thousand times instead, and is asked for many again."""
    bucket = Bucket(refuses=error)
    with pytest.raises(type(error)):
        await bucket.delete_all(NAMES[:10])
    bucket.refuses = None
    await bucket.delete_all(NAMES[:10])
    assert bucket.lengths == [10, 10] and bucket.num_single == 0
