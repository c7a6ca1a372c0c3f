"""Places of records in shared memory, as messages carry them: per place 3 u64, its offset, bytes and stamp."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.runtime.arena import Place
from kvstore.wire import messages

_PLACE = struct.Struct("<3Q")
_NOWHERE = bytes(_PLACE.size)


def located_reply(request_id: int, places: Sequence[Place | None]) -> messages.Located:
    """Where records are in the service's memory, as a message; `None`: elsewhere."""
    return messages.Located(request_id, b"".join(_NOWHERE if place is None else _pack(place) for place in places))


def parse_located(message: messages.Located, num_keys: int) -> list[Place | None]:
    """Where records are, from a message; `None`: elsewhere.

    Raises:
        InvalidRequest: There is not one place per key.
    """
    if len(message.places) != num_keys * _PLACE.size:
        raise _wrong_length("located.places", str(num_keys * _PLACE.size), message.places)
    return [place if place.stamp else None for place in _unpack(message.places)]


def save_fields(memory: bytes, places: Sequence[Place]) -> dict[str, Any]:
    """The fields that say where records are in a client's memory, as `messages.Save` carries them.

    Args:
        memory: Its id.
        places: At least one, and at most `messages.SAVE_PLACES_MAX`.
    """
    if len(places) == 1:
        (place,) = places
        return {"memory": memory, "offset": place.offset, "num_bytes": place.num_bytes, "stamp": place.stamp}
    num_bytes = sum(place.num_bytes for place in places)
    return {"memory": memory, "num_bytes": num_bytes, "places": b"".join(map(_pack, places))}


def parse_save_places(message: messages.Save) -> list[Place]:
    """Where the records of a save are in its client's memory.

    Raises:
        InvalidRequest: They are too many, or have other bytes than the message says.
    """
    if not message.places:
        return [Place(message.offset, message.num_bytes, message.stamp)]
    if len(message.places) % _PLACE.size:
        raise _wrong_length("save.places", f"n x {_PLACE.size}", message.places)
    if (num_places := len(message.places) // _PLACE.size) > messages.SAVE_PLACES_MAX:
        raise InvalidRequest(
            "too many records in one save",
            field="save.places",
            expected=f"at most {messages.SAVE_PLACES_MAX}",
            seen=num_places,
        )
    places = _unpack(message.places)
    if (num_bytes := sum(place.num_bytes for place in places)) != message.num_bytes:
        raise InvalidRequest(
            "the records of a save have other bytes than it says",
            field="save.num_bytes",
            expected=num_bytes,
            seen=message.num_bytes,
        )
    return places


def _pack(place: Place) -> bytes:
    return _PLACE.pack(place.offset, place.num_bytes, place.stamp)


def _unpack(data: bytes) -> list[Place]:
    return [Place(*numbers) for numbers in _PLACE.iter_unpack(data)]


def _wrong_length(where: str, expected: str, seen: bytes) -> InvalidRequest:
    return InvalidRequest("a field has the wrong length", field=where, expected=expected, seen=len(seen))
