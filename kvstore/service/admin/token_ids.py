"""A body with a prompt's token ids, read in pieces: a parser that reads all of them in one go holds up engines."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from typing import Any

from kvstore.errors import InvalidRequest

__all__ = ["split_token_ids"]

# A quote inside a text is written \" in JSON, so that this is never found inside one.
_LIST = re.compile(rb'"token_ids"[ \t\r\n]*:[ \t\r\n]*\[([0-9, \t\r\n]*)\]')
_ITEM = re.compile(rb"[ \t\r\n]*(?:0|[1-9][0-9]{0,9})[ \t\r\n]*")
_PIECE_BYTES = 8 << 10
_PLAIN_BYTES_MAX = 64 << 10
"""So much is read in one go, whatever it is: who sends something else is told what is wrong with it."""


async def split_token_ids(body: bytes, ids_max: int) -> tuple[dict[str, Any], array[int] | None]:
    """The fields of a JSON object, and its `token_ids`; `None`: they are among the fields, as they were sent.

    Args:
        body: What was sent.
        ids_max: How many ids there may be.

    Raises:
        InvalidRequest: Not a JSON object, too many ids, or a large body whose ids are no list of whole numbers.
    """
    found = _LIST.search(body)
    if found is None or len(body) <= _PLAIN_BYTES_MAX:
        if len(body) > _PLAIN_BYTES_MAX:
            raise InvalidRequest("token_ids must be a list of whole numbers", field="body.token_ids")
        return _object(body), None
    rest = body[: found.start(1)] + body[found.end(1) :]
    if len(rest) > _PLAIN_BYTES_MAX:
        raise InvalidRequest("the body has too much beside one list of token_ids", field="body")
    fields = _object(rest)
    if fields.get("token_ids") != []:  # another one behind it, or inside something else
        raise InvalidRequest("token_ids must be given once", field="body.token_ids")
    del fields["token_ids"]
    return fields, await _numbers(body, found.start(1), found.end(1), ids_max)


async def _numbers(body: bytes, start: int, stop: int, ids_max: int) -> array[int]:
    ids = array("I")
    while start < stop:
        comma = body.find(b",", start + _PIECE_BYTES, stop)
        end = stop if comma < 0 else comma
        items = body[start:end].split(b",")
        if not all(map(_ITEM.fullmatch, items)) or comma == stop - 1:  # nothing comes behind that comma
            raise InvalidRequest("token_ids must be a list of whole numbers", field="body.token_ids")
        try:
            ids.extend(map(int, items))
        except OverflowError as error:
            raise InvalidRequest("a token id has 32 bits", field="body.token_ids") from error
        if len(ids) > ids_max:
            raise InvalidRequest(f"at most {ids_max} token ids", field="body.token_ids", seen=f"{len(ids)} or more")
        start = end + 1
        await asyncio.sleep(0)
    return ids


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON", field="body", seen=str(error)) from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", field="body", seen=type(fields).__name__)
    return fields
