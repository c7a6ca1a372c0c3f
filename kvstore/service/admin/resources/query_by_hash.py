"""`/v1/query_by_hash`: as `/v1/query`, for routers that know a prompt by the hashes of engines' cache events alone.

The hashes give boundaries, as far as engines have named their pages to this service. What is stored at these boundaries
is then read as for `/v1/query`, of all groups that a resume needs.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS, NamespaceId
from kvstore.model.page_blocks import NUMBER_BYTES
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import Reader
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.prompt import TOKENS_MAX, LongList, body_of, in_pieces, read_json
from kvstore.service.admin.resources.matches import (
    QUESTIONS_MAX,
    TEXT_MAX,
    Asked,
    Matches,
    answer_questions,
    engines_asked,
    matches_of,
    reaches_of,
)
from kvstore.service.authentication import Grant
from kvstore.store.presence import Reach

router = APIRouter(tags=["query"])

HASHES_MAX = TOKENS_MAX // LINK_TOKENS
"""In a body."""
_HASH_BYTES_MAX = 64
_HEX = re.compile("(?:[0-9a-fA-F]{2})+")
_IN_LISTS = b'0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/=_-", \t\r\n'
_EXPECTED = f"a whole number of 64 bits, or 1 to {_HASH_BYTES_MAX} bytes as hex or base64"
_SEEN_CHARS_MAX = 50


def _to_bytes(value: object) -> bytes:
    """A hash as `PageBlocks` has it.

    Raises:
        ValueError: It is none.
    """
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return (value % (1 << 64)).to_bytes(NUMBER_BYTES, "big")  # negative: a router keeps it as a signed number
    if isinstance(value, bytes):
        return value
    try:
        if not isinstance(value, str) or len(value) > 2 * _HASH_BYTES_MAX:
            raise ValueError(_EXPECTED)
        if _HEX.fullmatch(value):
            data = bytes.fromhex(value)
        else:
            altchars = b"-_" if "-" in value or "_" in value else None
            data = b64decode(value + "=" * (-len(value) % 4), altchars=altchars, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected {_EXPECTED}") from error
    if not 0 < len(data) <= _HASH_BYTES_MAX:
        raise ValueError(f"expected {_EXPECTED}")
    return data


def _read_hashes(piece: bytes, field: str, num_before: int) -> list[bytes]:
    try:
        values = [] if piece.translate(None, _IN_LISTS) else json.loads(b"[%s]" % piece)
    except (ValueError, RecursionError):
        values = []
    if not values:  # a piece has at least one entry
        seen = piece[:_SEEN_CHARS_MAX].decode(errors="replace")
        raise InvalidRequest("block_hashes must be a list of hashes", field=field, expected=_EXPECTED, seen=seen)
    hashes: list[bytes] = []
    for value in values:
        try:
            hashes.append(_to_bytes(value))
        except ValueError as error:
            place, seen = f"{field}.{num_before + len(hashes)}", json.dumps(value)[:_SEEN_CHARS_MAX]
            raise InvalidRequest("this is no hash of a block", field=place, expected=_EXPECTED, seen=seen) from error
    return hashes


async def _parse_hashes(text: bytes, field: str) -> list[bytes]:
    return await in_pieces(text, field, list[bytes], _read_hashes)


_BLOCK_HASHES = LongList("block_hashes", "hashes of blocks", HASHES_MAX, _parse_hashes)

BlockHash = Annotated[
    bytes,
    BeforeValidator(_to_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
                {"type": "string", "minLength": 1, "maxLength": 2 * _HASH_BYTES_MAX},
            ]
        }
    ),
]


class HashQuestion(Asked):
    """A prompt's blocks, and for whom they are asked."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"model": "qwen", "block_hashes": [13283447162918472001, 902741853320174955]}},
    )

    block_hashes: list[BlockHash] = Field(
        max_length=HASHES_MAX,
        description="of the prompt's blocks, from its first one on, as engines' cache events name them: numbers, or "
        "bytes as hex or base64. They depend on salt and adapter too",
    )
    lora_name: str | None = Field(
        default=None, max_length=TEXT_MAX, description="not needed: the hashes depend on the adapter"
    )


@router.post("/query_by_hash", responses=refusals(409, 408, 413), openapi_extra=body_of(HashQuestion, QUESTIONS_MAX))
async def query_by_hash(context: Context, grant: Reader, request: Request) -> Matches | list[Matches]:
    """As `POST /v1/query`, of a prompt that is known by the hashes of its blocks. A page counts once an engine of its
    tenant has named it to this service (`name_blocks`), and while it is stored with all groups that a resume needs.
    The prompt may go on behind the last block: nothing is kept back for its last token. Engines that name no blocks are
    left out unless others have named some in their namespace.
    """
    body = await read_json(request)
    if not context.service.store.takes_blocks:
        raise Refused(
            409,
            "this service does not know pages by their blocks' hashes",
            field="events_endpoint",
            expected="an address, and `name_blocks` on the engines",
        )
    answer = partial(_answer, context, grant)
    return await answer_questions(context, grant, body, HashQuestion, _BLOCK_HASHES, answer=answer)


async def _answer(
    context: AdminContext, grant: Grant, question: HashQuestion, hashes: Sequence[bytes], deadline: Deadline
) -> Matches:
    asked = engines_asked(context, grant, question, lambda engine: engine.instance.step_tokens)
    targets = {target for _, target in asked}
    naming = {engine.namespace for engine, _ in asked if engine.instance.names_blocks}
    store = context.service.store

    def work_of(
        namespace: NamespaceId, steps: Sequence[int]
    ) -> Callable[[Deadline], Coroutine[Any, Any, list[Reach] | None]]:
        async def work(soon: Deadline) -> list[Reach] | None:
            if namespace not in naming and not store.knows_blocks(namespace):
                return None
            return await store.reaches_by_blocks(namespace, hashes, steps, deadline=soon)

        return work

    reaches, unknown = await reaches_of(context, targets, work_of, deadline)
    if asked and unknown == {namespace for namespace, _ in targets}:
        raise Refused(
            409,
            "no engine of this model names its pages' blocks",
            field="name_blocks",
            expected='"name_blocks": "hashes" in the `kv_connector_extra_config` of the engines',
        )
    return matches_of(asked, reaches, question)
