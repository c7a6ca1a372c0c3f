"""Bodies with prompts, whose token ids or block hashes are parsed in pieces.

A parser that reads those of a long prompt at once holds Python's lock, and with it the data loop, for too long.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, MutableSequence, Sized
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
_WHOLE_NUMBER = re.compile(rb"[ \t\r\n]*(0|[1-9][0-9]*)(?:\.0+)?[ \t\r\n]*")
"""JSON has no integers: 5.0 is one."""
_SPACES = b" \t\r\n"
"""Those of JSON."""
_NOT_IN_LISTS = b"+-\v\f"
"""What NumPy takes in and around numbers, and JSON does not, or not in front of a token id."""
_LAST = b",0"
"""NumPy before 2.3 ends at what it cannot read, with a warning that is not shown: so one more number must come last."""
_TOKEN_ID_MAX = (1 << 32) - 1
_PIECE_BYTES = 64 << 10
_PLAIN_BYTES_MAX = 64 << 10
"""A body has at most this much beside its long lists: that is parsed at once."""

_FIELD_CHARS_MAX = 100
_SEEN_BYTES_MAX = 50
_DIGITS_MAX = 10
"""Of a token id."""

Model = TypeVar("Model", bound=BaseModel)
Entries = TypeVar("Entries", bound=Sized)
Pieces = TypeVar("Pieces", bound=MutableSequence[Any])


@dataclass(frozen=True)
class LongList(Generic[Entries]):
    """A field whose list may be long.

    Attributes:
        name: Of the field.
        words: What the entries are called.
        most: How many entries the lists of one body may have together.
        parse: Takes the list's text without its brackets, and the field. May raise `InvalidRequest` if an entry is
            wrong.
    """

    name: str
    words: str
    most: int
    parse: Callable[[bytes, str], Coroutine[Any, Any, Entries]]

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


async def parse_prompt(body: bytes, model: type[Model]) -> tuple[Model, PromptText]:
    """The body of a request about one prompt without its token ids, and these.

    Raises:
        InvalidRequest, RequestValidationError: As of `read_prompts`.
    """
    ((prompt, text),), _ = await read_prompts(body, model, TOKEN_IDS)
    return prompt, text


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


async def read_prompts(
    body: bytes, model: type[Model], long_list: LongList[Entries], *, prompts_max: int = 0
) -> tuple[list[tuple[Model, Entries]], bool]:
    """The prompts of a body, each without its long list and with it, and whether the body is a list.

    Args:
        model: Has a field of the long list's name. It is empty, or not given, in what is returned.
        prompts_max: How many prompts the body may have, as a list; 0: it is one.

    Raises:
        InvalidRequest: It is no JSON, or has too much in it, or a long list is not where it should be.
        RequestValidationError: A field is wrong.
    """
    value, lists = await _split_lists(body, long_list)
    is_list, name = prompts_max > 0 and isinstance(value, list), long_list.name
    objects = [_as_object(one) for one in (value if is_list else [value])]
    if is_list and len(objects) > prompts_max:
        expected = f"at most {prompts_max} prompts"
        raise InvalidRequest(expected, field="body", expected=expected, seen=len(objects))
    has_list = [fields.get(name) == [] for fields in objects]
    if sum(has_list) != len(lists):  # one is given twice, or in another field
        raise _not_once(name, len(lists), len(objects))
    prompts: list[tuple[Model, Entries]] = []
    for index, fields in enumerate(objects):
        prompt = validated(model, fields, *((index,) if is_list else ()))
        if getattr(prompt, name):  # its name is not written as it is
            raise _not_once(name, len(lists), len(objects))
        prompts.append((prompt, lists.pop(0) if has_list[index] else await long_list.parse(b"", "")))
    return prompts, is_list


async def _split_lists(body: bytes, long_list: LongList[Entries]) -> tuple[Any, list[Entries]]:
    """A JSON text with empty lists in place of its long lists, and these, in order.

    Raises:
        InvalidRequest: As of `read_prompts`.
    """
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
    if not places and len(body) > _PLAIN_BYTES_MAX:
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
    is_list, room = isinstance(value, list), long_list.most
    lists: list[Entries] = []
    for number, (start, stop) in enumerate(places):
        field = f"body.{number}.{long_list.name}" if is_list else f"body.{long_list.name}"
        text = body[start:stop].strip(_SPACES)
        room -= _num_entries(text)
        if room < 0:
            expected = f"at most {long_list.most}"
            raise InvalidRequest(f"{expected} {long_list.words}", field=field, expected=expected, seen="more")
        lists.append(await long_list.parse(text, field))
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
    while text and start <= len(text):
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
    return array("I", numbers.tobytes()) if numbers is not None else _one_by_one(piece, field, num_before)


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

    async def ids(self) -> array[int]:
        """The token ids.

        Raises:
            InvalidRequest: An entry is none.
        """
        return await in_pieces(self._text, self._field, lambda: array("I"), read_ids)

    async def boundaries(
        self, cache_salt: str | None, step_tokens: int = LINK_TOKENS, recall: Recall | None = None
    ) -> list[Boundary]:
        """The boundaries of a plain prompt at multiples of `step_tokens`, which is one of 16.

        Args:
            recall: Keeps the hashes of whole pieces, for the next prompt that begins with them; `None`: nothing does.

        Raises:
            InvalidRequest: An entry is no token id.
        """
        chain, boundaries = PlainChain(cache_salt, step_tokens), list[Boundary]()
        start = num_before = 0
        while num_before < len(self):
            end, num_tokens = self._cut(start, len(self) - num_before)
            piece, read = self._text[start:end], partial(read_ids, field=self._field, num_before=num_before)
            if recall is not None and end < len(self._text):
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


TOKEN_IDS = LongList("token_ids", "token ids", TOKENS_MAX, _as_text)


def _piece_of_numbers(piece: bytes) -> npt.NDArray[np.uint32] | None:
    """The numbers of a piece of a JSON list, three times as fast as by a parser of JSON; `None`: one is not written
    in digits alone, or is no token id.

    Gathering the digits with NumPy, place by place or eight at a time, is not faster than its own parser.
    """
    if any(byte in piece for byte in _NOT_IN_LISTS):
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
        numbers = np.fromstring(piece + _LAST, dtype=np.uint64, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    if len(numbers) != num_entries + 1:
        return None
    if numbers.max() > _TOKEN_ID_MAX:  # NumPy reads larger numbers than 64 bits hold as the largest of them
        return None
    return numbers[:-1].astype(np.uint32)


def _one_by_one(piece: bytes, field: str, num_before: int) -> array[int]:
    """The token ids of a piece that is not read in one go, which names the first that is none."""
    ids = array("I")
    for index, entry in enumerate(piece.split(b",")):
        found = _WHOLE_NUMBER.fullmatch(entry)
        if found is not None and len(found[1]) <= _DIGITS_MAX and int(found[1]) <= _TOKEN_ID_MAX:
            ids.append(int(found[1]))
            continue
        raise InvalidRequest(
            "a token id must fit in 32 bits" if found is not None else "token_ids must be a list of whole numbers",
            field=f"{field}.{num_before + index}",
            expected=f"at most {_TOKEN_ID_MAX}" if found is not None else "a whole number",
            seen=entry.strip()[:_SEEN_BYTES_MAX].decode(errors="replace") or "nothing",
        )
    return ids


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
