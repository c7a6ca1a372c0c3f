"""The body of `/v1/lookup` and `/v1/plan`: a prompt, whose token ids are parsed in pieces.

A parser that reads the ids of a long prompt at once holds Python's lock, and with it the data loop, for too long.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.errors import InvalidRequest
from kvstore.runtime.wrong_values import not_json
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, NAMESPACE_PATTERN, TokenId
from kvstore.service.admin.problems import Refused

_TOKENS_MAX = 262_144
# Inside a JSON text a quote is written \" , so this never matches there.
_LIST = re.compile(rb'"token_ids"[ \t\r\n]*:[ \t\r\n]*\[([0-9, \t\r\n]*)\]')
_ITEM = re.compile(rb"[ \t\r\n]*(?:0|[1-9][0-9]{0,9})[ \t\r\n]*")
_PIECE_BYTES = 8 << 10
_PLAIN_BYTES_MAX = 64 << 10
"""A body up to this size is parsed at once; pydantic then names what is wrong with it."""


class Prompt(BaseModel):
    """A prompt as an engine sees it: token ids, no text."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"namespace": NAMESPACE_EXAMPLE, "token_ids": list(range(1, 33))}},
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    token_ids: list[TokenId] = Field(
        max_length=_TOKENS_MAX, description="of the whole prompt; tokens after the last multiple of 16 are ignored"
    )
    cache_salt: str | None = Field(default=None, max_length=4096, description="the request's `cache_salt`")


P = TypeVar("P", bound=Prompt)


async def read_prompt(request: Request, model: type[P]) -> tuple[P, Sequence[int]]:
    """The body of a request without its token ids, and these.

    Raises:
        Refused: 422: it is not sent as JSON.
        InvalidRequest: As of `split_token_ids`.
        RequestValidationError: A field is wrong.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(422, "the body is not sent as JSON", field="body", expected="Content-Type: application/json")
    fields, token_ids = await split_token_ids(await request.body(), _TOKENS_MAX)
    if token_ids is None:
        token_ids = _plain_ids(fields.get("token_ids"))
    try:
        prompt = model.model_validate(fields if token_ids is None else {**fields, "token_ids": []})
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems) from error
    return prompt, prompt.token_ids if token_ids is None else token_ids


async def split_token_ids(body: bytes, ids_max: int) -> tuple[dict[str, Any], array[int] | None]:
    """The fields of a JSON object without `token_ids`, and these; `None`: the body is small and `token_ids` is among
    the fields.

    Args:
        ids_max: How many ids are allowed.

    Raises:
        InvalidRequest: Not a JSON object, too many ids, or a large body whose ids are not a list of whole numbers.
    """
    if len(body) <= _PLAIN_BYTES_MAX:
        return _object(body), None
    found = _LIST.search(body)
    if found is None:
        raise _no_list()
    rest = body[: found.start(1)] + body[found.end(1) :]
    if len(rest) > _PLAIN_BYTES_MAX:
        raise InvalidRequest("the body has too much besides one list of token_ids", field="body")
    fields = _object(rest)
    if fields.pop("token_ids", None) != []:  # there is a second one, or this one is inside another field
        raise InvalidRequest("token_ids must be given once", field="body.token_ids")
    return fields, await _numbers(body, found.start(1), found.end(1), ids_max)


async def _numbers(body: bytes, start: int, stop: int, ids_max: int) -> array[int]:
    ids = array("I")
    while start < stop:
        comma = body.find(b",", start + _PIECE_BYTES, stop)
        end = stop if comma < 0 else comma
        items = body[start:end].split(b",")
        if not all(map(_ITEM.fullmatch, items)) or comma == stop - 1:  # nothing follows that comma
            raise _no_list()
        try:
            ids.extend(map(int, items))
        except OverflowError as error:
            raise InvalidRequest("a token id must fit in 32 bits", field="body.token_ids") from error
        if len(ids) > ids_max:
            raise InvalidRequest(f"at most {ids_max} token ids", field="body.token_ids", seen=f"{len(ids)} or more")
        start = end + 1
        await asyncio.sleep(0)
    return ids


def _plain_ids(ids: object) -> array[int] | None:
    """Token ids of a small body that need no further check, which takes milliseconds; `None`: they need one."""
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        return None
    try:
        return array("I", ids)
    except OverflowError:
        return None


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON", field="body", seen=not_json(error)) from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", field="body", seen=type(fields).__name__)
    return fields


def _no_list() -> InvalidRequest:
    return InvalidRequest("token_ids must be a list of whole numbers", field="body.token_ids")
