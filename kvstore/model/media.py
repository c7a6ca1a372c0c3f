"""What cache events call the tiers: the names of media that routers know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kvstore.errors import InvalidRequest

_LOCAL, _REMOTE = "LOCAL", "REMOTE"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class Medium(NamedTuple):
    """Where a page is, in the words of vLLM's cache events.

    Attributes:
        name: vLLM's own events have `GPU`, `CPU` and `STORAGE`.
        locality: `LOCAL`: on the publisher's node. `REMOTE`: in a pool that other nodes share.
    """

    name: str
    locality: str

    @property
    def is_local(self) -> bool:
        return self.locality == _LOCAL


MEDIA: Mapping[str, Medium] = {
    "memory": Medium("CPU", _LOCAL),
    "filesystem": Medium("STORAGE", _LOCAL),
    "redis": Medium("STORAGE", _REMOTE),
    "s3": Medium("STORAGE", _REMOTE),
}
"""The medium of each tier, by the tier's name."""


def medium_of(tier: str, media: Mapping[str, Medium] = MEDIA) -> Medium:
    """The medium of a tier, by the tier's name.

    Raises:
        InvalidRequest: `MEDIA` lacks the tier: its pages could not be published.
    """
    try:
        return media[tier]
    except KeyError:
        fix = "add it to MEDIA in kvstore/model/media.py"
        raise InvalidRequest(f"a tier has no name for cache events: {fix}", tier=tier) from None


def parse_media(text: str) -> Mapping[str, Medium]:
    """`MEDIA` with the names that an operator gives to some tiers: `redis=SHARED_STORAGE,s3=OBJECT_STORE`.

    Localities stay: a router that asks for them must not take a shared pool for a node's own memory.

    Args:
        text: The setting `event_media`; empty for none.

    Raises:
        InvalidRequest: An unknown tier, a tier that is named twice, or a name of other characters than letters, digits,
            `_`, `.` and `-`, or of more than 32.
    """
    named: dict[str, Medium] = {}
    for part in text.split(",") if text.strip() else ():
        tier, _, name = (word.strip() for word in part.partition("="))
        if tier not in MEDIA or tier in named or not _NAME.fullmatch(name):
            expected = f"expected a name of some tiers ({', '.join(MEDIA)}), each once, like 's3=STORE,redis=SHARED'"
            raise InvalidRequest(expected, field="event_media", seen=part.strip())
        named[tier] = Medium(name, MEDIA[tier].locality)
    return {**MEDIA, **named}
