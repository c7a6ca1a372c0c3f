"""Which tier a hit's tokens came from, in the words of vLLM's cache-hit metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["split_tokens"]

_PLACES = {"memory": "host", "filesystem": "disk"}
_ELSEWHERE = "external_unspecified"
"""Redis and S3: vLLM has no word for stores that are neither this host nor its disk."""


def split_tokens(records_by_tier: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Divide a hit's tokens by where its records were read from; the shares add up to `tokens`.

    A record is not a number of tokens, so a hit from several tiers is shared in proportion to its records.

    Args:
        records_by_tier: By name of the tier, as the store counted them.
        tokens: Length of the hit.

    Returns:
        Tokens by the value of vLLM's `CacheHitSource`; none of them zero.
    """
    records: dict[str, int] = {}
    for tier, count in records_by_tier.items():
        place = _PLACES.get(tier, _ELSEWHERE)
        records[place] = records.get(place, 0) + count
    total = sum(records.values())
    if total == 0:
        return {_ELSEWHERE: tokens} if tokens else {}
    shares, given, seen = {}, 0, 0
    for place, count in sorted(records.items()):
        seen += count
        upto = tokens * seen // total  # rounding a running sum: nothing is lost or counted twice
        shares[place] = upto - given
        given = upto
    return {place: share for place, share in shares.items() if share}
