"""Bodies with prompts, whose token ids or block hashes are parsed in pieces.

A parser that reads those of a long prompt at once holds Python's lock, and with it the data loop, for too long.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, MutableSequence, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS, Boundary, PlainChain, Recall
from kvstore.runtime.wrong_values import not_json
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, NAMESPACE_PATTERN, TokenId
from kvstore.service.admin.problems import Refused

TOKENS_MAX = 262_144
"""Token ids in a body."""
ANSWER_S = 10.0
"""What is asked of the store for one request must be answered within this time, counted from its turn."""
_WHOLE_NUMBER = re.compile(rb"[ \t\r\n]*(0|[1-9][0-9]*)[ \t\r\n]*")
_SPACES = b" \t\r\n"
"""Those of JSON."""
_IN_LISTS = b"0123456789," + _SPACES
_TOKEN_ID_MAX = (1 << 32) - 1
_PIECE_BYTES = 32 << 10
_PLAIN_BYTES_MAX = 64 << 10
"""A body up to this size is parsed at once; pydantic then names what is wrong with it."""

_FIELD_CHARS_MAX = 100
_SEEN_BYTES_MAX = 50
_DIGITS_MAX = 10
"""Of a token id."""
_HASHED_AT_ONCE = 512 * LINK_TOKENS
"""Tokens that are hashed before other tasks of this thread get a turn."""

Model = TypeVar("Model", bound=BaseModel)
Entries = TypeVar("Entries", bound=Sized)
Pieces = TypeVar("Pieces", bound=MutableSequence[Any])


@dataclass(frozen=True)
class LongList(Generic[Entries]):
    """A field whose list may be long.

    Attributes:
        name: Of the field.
        words: What the entries are called.
        parse: Takes the list's text without its brackets, which has at least one entry, and the field. Raises
            `InvalidRequest` if an entry is wrong.
        plain: The same of a short list, which was parsed with its body.
        plain_bytes_max: A body up to this size is parsed at once, and its list is among its fields.
    """

    name: str
    words: str
    parse: Callable[[bytes, str], Coroutine[Any, Any, Entries]]
    plain: Callable[[Sequence[Any]], Entries]
    plain_bytes_max: int = _PLAIN_BYTES_MAX

    def find(self, body: bytes, start: int) -> re.Match[bytes] | None:
        """The next place where the field's list begins. Inside a JSON text a quote is written \\" , so there is none
        in it."""
        return re.compile(rb'"%s"[ \t\r\n]*:[ \t\r\n]*\[' % self.name.encode()).search(body, start)


class Prompt(BaseModel):
    """A prompt as an engine sees it: token ids, no text."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"namespace": NAMESPACE_EXAMPLE, "token_ids": list(range(1, 33))}},
    )

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    token_ids: list[TokenId] = Field(
        max_length=TOKENS_MAX, description="of the whole prompt; tokens after the last multiple of 16 are ignored"
    )
    cache_salt: str | None = Field(default=None, max_length=4096, description="the request's `cache_salt`")


P = TypeVar("P", bound=Prompt)


async def parse_prompt(body: bytes, model: type[P]) -> tuple[P, Sequence[int]]:
    """The body of a request without its token ids, and these.

    Raises:
        InvalidRequest: As of `split_token_ids`.
        RequestValidationError: A field is wrong.
    """
    fields, token_ids = await split_token_ids(body, TOKENS_MAX)
    if token_ids is None:
        token_ids = _plain_ids(fields.get("token_ids"))
    prompt = validated(model, fields if token_ids is None else {**fields, "token_ids": []})
    return prompt, prompt.token_ids if token_ids is None else token_ids


async def hash_prompt(
    token_ids: Sequence[int], cache_salt: str | None, step_tokens: int = LINK_TOKENS
) -> list[Boundary]:
    """The boundaries of a plain prompt at multiples of `step_tokens`, which is one of 16."""
    chain, boundaries = PlainChain(cache_salt, step_tokens), []
    for start in range(0, len(token_ids), _HASHED_AT_ONCE):
        boundaries += chain.extend(token_ids[start : start + _HASHED_AT_ONCE])
        await asyncio.sleep(0)
    return boundaries


def body_of(model: type[BaseModel], list_max: int = 0) -> dict[str, Any]:
    """For the description of a route that reads its body by `read_json`: an object, or a list of at most `list_max`."""
    schema = model.model_json_schema()
    if list_max:
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": list_max}]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_json(request: Request) -> bytes:
    """The body of a request.

    Raises:
        Refused: 422: it is not sent as JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(422, "the body is not sent as JSON", field="body", expected="Content-Type: application/json")
    return await request.body()


async def read_fields(request: Request, model: type[Model]) -> Model:
    """A body without a long list, as its model.

    Raises:
        Refused, InvalidRequest: It is not sent as JSON, or is none.
        RequestValidationError: A field is wrong.
    """
    return validated(model, _as_object(_parsed(await read_json(request))))


def validated(model: type[Model], fields: dict[str, Any], *where: int) -> Model:
    """The fields of a body as their model.

    Args:
        where: The index in the body, if that is a list.

    Raises:
        RequestValidationError: A field is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        known = {"known": ", ".join(model.model_fields)}
        problems = [{"ctx": known, **one, "loc": ("body", *where, *one["loc"])} for one in error.errors()]
        raise RequestValidationError(problems) from error


async def split_token_ids(body: bytes, ids_max: int) -> tuple[dict[str, Any], array[int] | None]:
    """The fields of a JSON object without `token_ids`, and these; `None`: the body is small and `token_ids` is among
    the fields.

    Args:
        ids_max: How many ids are allowed.

    Raises:
        InvalidRequest: Not a JSON object, too many ids, or a large body whose ids are not a list of whole numbers.
    """
    value, lists = await split_lists(body, ids_max, TOKEN_IDS)
    fields = _as_object(value)
    if lists is None:
        return fields, None
    if len(lists) != 1 or fields.pop("token_ids", None) != []:  # a second one, or this one is inside another field
        raise _not_once(TOKEN_IDS.name, len(lists), 1)
    return fields, lists[0]


async def split_objects(
    body: bytes, ids_max: int, long_list: LongList[Entries]
) -> tuple[list[dict[str, Any]], list[Entries] | None]:
    """As `split_token_ids`, of a list of objects, or of one object, each with its own long list.

    Args:
        ids_max: How many entries are allowed in all of them together.
    """
    value, lists = await split_lists(body, ids_max, long_list)
    objects = [_as_object(one) for one in value] if isinstance(value, list) else [_as_object(value)]
    if lists is None:
        return objects, None
    if len(lists) != len(objects) or any(fields.pop(long_list.name, None) != [] for fields in objects):
        raise _not_once(long_list.name, len(lists), len(objects))
    return objects, lists


async def split_lists(body: bytes, ids_max: int, long_list: LongList[Entries]) -> tuple[Any, list[Entries] | None]:
    """A JSON text with empty lists in place of its long lists, and these, in order; `None`: the body is small and
    unchanged.

    Raises:
        InvalidRequest: As of `split_token_ids`.
    """
    if len(body) <= long_list.plain_bytes_max:
        return _parsed(body), None
    places: list[tuple[int, int]] = []
    rest, rest_bytes, at = [], 0, 0
    while (found := long_list.find(body, at)) is not None:
        stop = body.find(b"]", found.end())
        if stop < 0:
            raise InvalidRequest("the body is not JSON", field="body", expected="JSON", seen="a list without its end")
        places.append((found.end(), stop))
        rest.append(body[at : found.end()])
        rest_bytes += len(rest[-1])
        if rest_bytes > _PLAIN_BYTES_MAX:  # now: a body may have hundreds of thousands of empty lists
            raise _too_much_besides(long_list.name)
        at = stop
    if not places and len(body) <= _PLAIN_BYTES_MAX:
        return _parsed(body), None
    if not places:
        raise InvalidRequest(
            f"a body of more than 64 KiB must be JSON with lists of {long_list.name}",
            field="body",
            expected=f'"{long_list.name}": [...]',
            seen=body[:_SEEN_BYTES_MAX].decode(errors="replace"),
        )
    rest.append(body[at:])
    others = b"".join(rest)
    if len(others) > _PLAIN_BYTES_MAX:
        raise _too_much_besides(long_list.name)
    value = _parsed(others)
    is_list, room = isinstance(value, list), ids_max
    lists: list[Entries] = []
    for number, (start, stop) in enumerate(places):
        field = f"body.{number}.{long_list.name}" if is_list else f"body.{long_list.name}"
        text = body[start:stop].strip(_SPACES)
        room -= _num_entries(text)
        if room < 0:
            raise InvalidRequest(
                f"at most {ids_max} {long_list.words}", field=field, expected=f"at most {ids_max}", seen="more"
            )
        lists.append(await long_list.parse(text, field) if text else long_list.plain(()))
    return value, lists


async def in_pieces(
    text: bytes, field: str, make: Callable[[], Pieces], read: Callable[[bytes, str, int], Pieces]
) -> Pieces:
    """The entries of a list's text, read in pieces of whole entries and the commas between them.

    Args:
        make: Returns an empty list.
        read: Takes a piece, the field, and the number of entries before it.
    """
    entries, start = make(), 0
    while start <= len(text):
        comma = text.find(b",", start + _PIECE_BYTES)
        end = len(text) if comma < 0 else comma
        entries.extend(read(text[start:end], field, len(entries)))
        start = end + 1
        await asyncio.sleep(0)
    return entries


def read_ids(piece: bytes, field: str, num_before: int) -> array[int]:
    """The token ids of a piece.

    Raises:
        InvalidRequest: One is none.
    """
    numbers = _piece_of_numbers(piece)
    if numbers is None:
        raise _wrong_id(piece, field, num_before)
    return array("I", numbers.tobytes())


async def _parse_ids(text: bytes, field: str) -> array[int]:
    return await in_pieces(text, field, lambda: array("I"), read_ids)


TOKEN_IDS = LongList("token_ids", "token ids", _parse_ids, lambda ids: array("I", ids))


class PromptText:
    """The token ids of a prompt as they are written in a body: a piece is parsed only where its hashes are not known.

    Args:
        text: Of the list, without its brackets.
        field: For errors.
    """

    def __init__(self, text: bytes, field: str) -> None:
        self._text = text
        self._field = field
        self._num_tokens = _num_entries(text)

    def __len__(self) -> int:
        return self._num_tokens

    async def boundaries(self, cache_salt: str | None, step_tokens: int, recall: Recall) -> list[Boundary]:
        """The boundaries of a plain prompt at multiples of `step_tokens`, which is one of 16.

        Args:
            recall: Keeps the hashes of whole pieces, for the next prompt that begins with them.

        Raises:
            InvalidRequest: An entry is no token id.
        """
        chain, boundaries = PlainChain(cache_salt, step_tokens), list[Boundary]()
        start = num_before = 0
        while num_before < len(self):
            end, num_tokens = self._cut(start, len(self) - num_before)
            piece, read = self._text[start:end], partial(read_ids, field=self._field, num_before=num_before)
            if end < len(self._text):
                boundaries += chain.extend_with(piece, num_tokens, read, recall)
            else:
                boundaries += chain.extend(read(piece))
            start, num_before = end + 1, num_before + num_tokens
            await asyncio.sleep(0)
        return boundaries

    def _cut(self, start: int, num_left: int) -> tuple[int, int]:
        """Where the piece that begins at `start` ends, and how many tokens it has: a multiple of 16 unless it is the
        last one. Where pieces end depends on what is before alone.
        """
        text, num_tokens = self._text, 0
        for stop in range(start + _PIECE_BYTES, len(text), _PIECE_BYTES):  # more than once if there are many spaces
            num_tokens += _num_commas(text[stop - _PIECE_BYTES : stop])
            if num_tokens >= LINK_TOKENS:
                end = stop
                for _ in range(num_tokens % LINK_TOKENS + 1):
                    end = text.rindex(b",", start, end)
                return end, num_tokens // LINK_TOKENS * LINK_TOKENS
        return len(text), num_left


def _num_entries(text: bytes) -> int:
    return _num_commas(text) + 1 if text else 0


def _num_commas(text: bytes) -> int:
    """Much quicker than `bytes.count`, which searches for each one by itself."""
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == ord(",")))


async def _as_text(text: bytes, field: str) -> PromptText:
    return PromptText(text, field)


def _text_of(ids: Sequence[int]) -> PromptText:
    return PromptText(",".join(map(str, ids)).encode(), "body.token_ids")


PROMPT_TEXT = LongList("token_ids", "token ids", _as_text, _text_of, plain_bytes_max=0)
"""`TOKEN_IDS` for those who need the hashes alone."""


def _piece_of_numbers(piece: bytes) -> npt.NDArray[np.uint32] | None:
    """The numbers of a piece of a JSON list, three times as fast as by a parser of JSON; `None`: one is no token id.

    Gathering the digits with NumPy, place by place or eight at a time, is not faster than its own parser.
    """
    if piece.translate(None, _IN_LISTS):
        return None
    text = np.frombuffer(b" " + piece, dtype=np.uint8)
    is_digit = text >= ord("0")
    is_first = is_digit[1:] > is_digit[:-1]
    # what NumPy takes and JSON does not: spaces alone as a zero, and a zero in front of other digits
    num_entries = np.count_nonzero(text == ord(",")) + 1
    if np.count_nonzero(is_first) != num_entries:
        return None
    if (is_first[:-1] & (text[1:-1] == ord("0")) & is_digit[2:]).any():
        return None
    try:
        numbers = np.fromstring(piece, dtype=np.int64, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    if len(numbers) != num_entries:  # NumPy before 2.3 returns what is before an error
        return None
    if numbers.max() > _TOKEN_ID_MAX:  # NumPy reads larger numbers than 64 bits hold as the largest of them
        return None
    return numbers.astype(np.uint32)


def _wrong_id(piece: bytes, field: str, num_before: int) -> InvalidRequest:
    """What is wrong with a piece of a list: the first of its entries that is no token id."""
    for index, entry in enumerate(piece.split(b",")):
        is_number = _WHOLE_NUMBER.fullmatch(entry) is not None
        text = entry.strip()
        if is_number and len(text) <= _DIGITS_MAX and int(text) <= _TOKEN_ID_MAX:
            continue
        return InvalidRequest(
            "a token id must fit in 32 bits" if is_number else "token_ids must be a list of whole numbers",
            field=f"{field}.{num_before + index}",
            expected=f"at most {_TOKEN_ID_MAX}" if is_number else "a whole number",
            seen=text[:_SEEN_BYTES_MAX].decode(errors="replace") or "nothing",
        )
    return InvalidRequest("token_ids must be a list of whole numbers", field=field)


def _plain_ids(ids: object) -> array[int] | None:
    """Token ids of a small body that need no further check, which takes milliseconds; `None`: they need one."""
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        return None
    try:
        return array("I", ids)
    except OverflowError:
        return None


def _parsed(body: bytes) -> Any:
    """The value of a JSON text in UTF-8. Python's parser would take UTF-16 too, in which a list that is found in the
    bytes may be a part of a text.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        return json.loads(body.decode(), object_pairs_hook=_with_each_field_once)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON", field="body", expected="JSON", seen=not_json(error)) from error


def _with_each_field_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose fields have one value: of two a parser takes the last, and a reader of the body maybe the first.

    Raises:
        InvalidRequest: A name is given twice, however it is written.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(name for name, num in Counter(name for name, _ in pairs).items() if num > 1)
        raise InvalidRequest(
            "a field must be given once", field=f"body.{twice}"[:_FIELD_CHARS_MAX], expected="once", seen="twice"
        )
    return fields


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(
            "the body must be a JSON object", field="body", expected="a JSON object", seen=json.dumps(value)[:100]
        )
    return value


def _too_much_besides(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body has too much besides its lists of {name}",
        field="body",
        expected=f"at most {_PLAIN_BYTES_MAX} bytes",
        seen="more",
    )


def _not_once(name: str, num_lists: int, num_objects: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name} must be given once, and in no other field",
        field=f"body.{name}",
        expected=f"one list of {name} in each prompt",
        seen=f"{num_lists} in {num_objects}",
    )
