"""Dates in answers of S3 and of those who give credentials: read as botocore reads them, however they are spelled."""

from __future__ import annotations

import pytest
from botocore.utils import parse_timestamp

from kvstore.tiers.s3.client import _timestamp


@pytest.mark.parametrize(
    "spelled",
    ["2026-11-22T13:00:01.250Z", "2026-11-22T13:00:01Z", "2026-11-22T13:00:01+00:00", "1795352401", 1795352401,
     "Sun, 22 Nov 2026 13:00:01 GMT"],
)  # fmt: skip
def test_a_date_is_what_botocore_reads(spelled: str | int) -> None:
    """A listing's, one with a zone, seconds since 1970 as text and as a number, and a header's."""
    assert _timestamp(spelled) == parse_timestamp(spelled)


def test_what_is_no_date_is_refused() -> None:
    """As botocore does, though it ends as a listing's date does."""
    with pytest.raises(ValueError, match="Invalid timestamp"):
        _timestamp("no dateZ")
