"""Converts values of `kvstore.api` to and from messages.

Fields that have the same name in a value and its message are copied. Only the others are converted here, such as
boundaries and keys, which become a few byte strings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeGuard

import numpy as np

from kvstore.api import LeaseId, Lookup, Offer, Outcome, PrefixQuery, Staged
from kvstore.errors import InvalidRequest
from kvstore.model.instance import EngineInstance
from kvstore.model.keys import (
    LINK_TOKENS,
    NAMESPACE_BYTES,
    PREFIX_BYTES,
    Boundary,
    NamespaceId,
    PrefixHash,
    RecordKey,
    boundaries_at,
)
from kvstore.model.layout import MAX_GROUPS, MAX_PREFIX_TOKENS, Layout
from kvstore.model.outcome import CONTENT_BYTES
from kvstore.model.prompt_hint import EndedPrompt, read_wishes
from kvstore.wire import messages

TEXT_MAX = 256
_DETAILS_MAX = 16
_MODELS_MAX = 16
_TOKENS_MAX = (1 << 32) - 1
_AGE_MS_MAX = 3_600_000
_GROUPS_BYTES_MAX = MAX_GROUPS // 8
ENDED_MAX = 4096
"""Boundaries of a prompt in `prompt_ended`: pages of 64 tokens of a prompt of 262,144."""


def ended_message(prompt: EndedPrompt) -> messages.PromptEnded:
    """A prompt that has ended as a message."""
    return messages.PromptEnded(
        request=prompt.request[:TEXT_MAX],
        namespace=prompt.namespace,
        tokens=_pack("I", [boundary.tokens for boundary in prompt.boundaries], "tokens"),
        prefixes=b"".join(boundary.prefix for boundary in prompt.boundaries),
        step_tokens=prompt.step_tokens,
        prompt_tokens=prompt.prompt_tokens,
        wishes=prompt.wishes.said,
    )


def parse_ended(message: messages.PromptEnded) -> EndedPrompt:
    """A prompt that has ended, from a message; texts as in `parse_outcome`.

    Raises:
        InvalidRequest: The lengths of the fields do not match, the boundaries do not ascend, or a wish is out of range.
    """
    if len(message.tokens) > 4 * ENDED_MAX:  # it is parsed at once
        seen = len(message.tokens) // 4
        raise InvalidRequest(f"at most {ENDED_MAX} boundaries", field="prompt_ended.tokens", seen=seen)
    tokens = _unpack("I", message.tokens, "prompt_ended.tokens")
    check_length("prompt_ended.prefixes", message.prefixes, len(tokens) * PREFIX_BYTES)
    namespace = parse_namespace(message.namespace, "prompt_ended.namespace")
    boundaries = tuple(boundaries_at(tokens, message.prefixes))
    PrefixQuery(namespace, boundaries, 0, 0, message.step_tokens)  # checks the boundaries
    wishes, complaints = read_wishes(message.wishes)
    if complaints:
        name, text = complaints[0]
        raise InvalidRequest(text, field=f"prompt_ended.wishes.{name}")
    return EndedPrompt(
        request=plain_text(message.request),
        namespace=namespace,
        boundaries=boundaries,
        step_tokens=message.step_tokens,
        prompt_tokens=min(message.prompt_tokens, MAX_PREFIX_TOKENS),
        wishes=replace(wishes, session=plain_text(wishes.session)),
    )


def query_fields(query: PrefixQuery) -> dict[str, Any]:
    """The fields of `messages.Lookup` and `messages.Stage` for a query.

    Raises:
        InvalidRequest: A boundary does not fit 32 bits.
    """
    return _same_fields(query, messages.Lookup) | {
        "tokens": _pack("I", [boundary.tokens for boundary in query.boundaries], "tokens"),
        "prefixes": b"".join(boundary.prefix for boundary in query.boundaries),
    }


def parse_query(message: messages.Lookup) -> PrefixQuery:
    """The query in a lookup or stage message.

    Raises:
        InvalidRequest: The lengths of the fields do not match, or the query is not valid.
    """
    tokens = _unpack("I", message.tokens, f"{message.type}.tokens")
    check_length(f"{message.type}.prefixes", message.prefixes, len(tokens) * PREFIX_BYTES)
    changed = {
        "namespace": parse_namespace(message.namespace, f"{message.type}.namespace"),
        "boundaries": tuple(boundaries_at(tokens, message.prefixes)),
    }
    return PrefixQuery(**_same_fields(message, PrefixQuery) | changed)


def lookup_reply(request_id: int, lookup: Lookup) -> messages.LookedUp:
    """A lookup's outcome as a message."""
    width = max(1, (max((mask.bit_length() for mask in lookup.groups_present), default=0) + 7) // 8)
    masks = b"".join(mask.to_bytes(width, "little") for mask in lookup.groups_present)
    offers = {str(offer.resume_tokens): dict(offer.tier_bytes) for offer in lookup.offers}
    silent = ",".join(lookup.silent)
    return messages.LookedUp(request_id, lookup.resume_tokens, width, masks, offers, silent)


def parse_lookup(message: messages.LookedUp, num_boundaries: int) -> Lookup:
    """A lookup's outcome from a message.

    Raises:
        InvalidRequest: There is not one mask per boundary, or an offer is malformed.
    """
    width, masks = message.mask_bytes, message.masks
    check_length("looked_up.masks", masks, num_boundaries * width)
    present = (int.from_bytes(masks[at : at + width], "little") for at in range(0, len(masks), max(1, width)))
    silent = tuple(name for name in message.silent.split(",") if name)
    return Lookup(message.resume_tokens, tuple(present), _offers(message.offers), silent)


def _offers(offers: Mapping[str, Any]) -> tuple[Offer, ...]:
    parsed = []
    for point, tier_bytes in offers.items():
        if not (point.isascii() and point.isdecimal() and isinstance(tier_bytes, Mapping)):
            raise InvalidRequest("a field has the wrong type", field="looked_up.offers", expected="bytes by tier")
        sizes = {name: size for name, size in tier_bytes.items() if isinstance(name, str) and isinstance(size, int)}
        if len(sizes) != len(tier_bytes) or any(size < 0 for size in sizes.values()):
            raise InvalidRequest("a field has the wrong type", field="looked_up.offers", expected="whole numbers")
        parsed.append(Offer(int(point), sizes))
    return tuple(sorted(parsed, key=lambda offer: offer.resume_tokens))


def staged_reply(
    request_id: int, staged: Staged, query: PrefixQuery | None = None, layout: Layout | None = None
) -> messages.Staged:
    """A stage's outcome as a message. All keys are of one namespace, the query's.

    Args:
        query: The request, of a client that reads packed answers; `None`: of one that does not.
        layout: The namespace's, likewise.
    """
    chosen = _pack_chosen(staged, query, layout) if query is not None and layout is not None else b""
    keys, spans = ((), ()) if chosen else (staged.keys, staged.spans)
    changed = {
        **_keys_fields(keys),
        "lease": staged.lease or b"",
        "namespace": staged.keys[0].namespace if staged.keys else bytes(NAMESPACE_BYTES),
        "spans": _pack("I", [token for span in spans for token in span], "spans"),
        "sources": dict(staged.sources),
        "chosen": chosen,
    }
    return messages.Staged(request_id, **_same_fields(staged, messages.Staged) | changed)


def parse_staged(message: messages.Staged, query: PrefixQuery | None = None, layout: Layout | None = None) -> Staged:
    """A stage's outcome from a message.

    Args:
        query: The request, if packed answers are read.
        layout: The namespace's, likewise.

    Raises:
        InvalidRequest: The lengths of the fields do not match.
    """
    if message.chosen:
        if query is None or layout is None:
            raise InvalidRequest("a packed answer was not requested", field="staged.chosen")
        keys, spans = _unpack_chosen(message.chosen, query, layout)
    else:
        keys, spans = _unpack_keys(message)
    if not all(isinstance(count, int) for count in message.sources.values()):
        raise InvalidRequest("a field has the wrong type", field="staged.sources", expected="whole numbers")
    changed = {"lease": LeaseId(message.lease) if message.lease else None, "keys": keys, "spans": spans}
    return Staged(**_same_fields(message, Staged) | changed)


Spans = tuple[tuple[int, int], ...]


def _unpack_keys(message: messages.Staged) -> tuple[tuple[RecordKey, ...], Spans]:
    keys = _parse_keys(message)
    tokens = _unpack("I", message.spans, "staged.spans")
    check_length("staged.spans", message.spans, len(keys) * 8)
    return keys, tuple(zip(tokens[::2], tokens[1::2], strict=True))


def _keys_fields(keys: Sequence[RecordKey]) -> dict[str, Any]:
    """The fields of many keys of one namespace, without that, as `messages.Staged` and `messages.Locate` carry them."""
    return {
        "prefixes": b"".join(key.prefix for key in keys),
        "parts": _pack("H", [part for key in keys for part in (key.group, key.slice)], "parts"),
    }


def _parse_keys(message: messages.Staged | messages.Locate) -> tuple[RecordKey, ...]:
    parts = _unpack("H", message.parts, f"{message.type}.parts")
    num_keys = len(parts) // 2
    check_length(f"{message.type}.parts", message.parts, num_keys * 4)
    prefixes = _prefixes(message.prefixes, num_keys, f"{message.type}.prefixes")
    namespace = parse_namespace(message.namespace, f"{message.type}.namespace")
    return tuple(
        RecordKey(namespace, prefix, group, slice_)
        for prefix, group, slice_ in zip(prefixes, parts[::2], parts[1::2], strict=True)
    )


def locate_fields(keys: Sequence[RecordKey]) -> dict[str, Any]:
    """The fields of at least one key, as `messages.Locate` carries them.

    Raises:
        InvalidRequest: They are not of one namespace, or a group or slice does not fit 16 bits.
    """
    namespace = keys[0].namespace
    if any(key.namespace != namespace for key in keys):
        raise InvalidRequest("records that are loaded together are of one namespace", expected=namespace.hex())
    return {"namespace": namespace, **_keys_fields(keys)}


def parse_locate(message: messages.Locate) -> tuple[RecordKey, ...]:
    """The keys in a message.

    Raises:
        InvalidRequest: They are too many, or the lengths of the fields do not match.
    """
    if len(message.parts) > messages.LOCATE_MAX * 4:
        raise InvalidRequest(
            "too many records in one locate", expected=f"at most {messages.LOCATE_MAX}", seen=len(message.parts) // 4
        )
    return _parse_keys(message)


def _pack_chosen(staged: Staged, query: PrefixQuery, layout: Layout) -> bytes:
    """The staged records as bits; nothing where they are not what the bits would say."""
    index_of = {boundary.prefix: index for index, boundary in enumerate(query.boundaries)}
    bits = np.zeros((len(layout.groups), len(query.boundaries)), dtype=np.bool_)
    for key in staged.keys:
        bits[key.group, index_of[key.prefix]] = True
    chosen = np.packbits(bits, axis=1, bitorder="little").tobytes()
    return chosen if _unpack_chosen(chosen, query, layout) == (staged.keys, staged.spans) else b""


def _unpack_chosen(chosen: bytes, query: PrefixQuery, layout: Layout) -> tuple[tuple[RecordKey, ...], Spans]:
    width = (len(query.boundaries) + 7) // 8
    check_length("staged.chosen", chosen, width * len(layout.groups))
    rows = np.frombuffer(chosen, dtype=np.uint8).reshape(len(layout.groups), width)
    bits = np.unpackbits(rows, axis=1, count=len(query.boundaries), bitorder="little")
    keys: list[RecordKey] = []
    spans: list[tuple[int, int]] = []
    for index, group in np.argwhere(bits.T).tolist():  # by boundary, then by group
        boundary, of_group = query.boundaries[index], layout.groups[group]
        _, span = of_group.record_at(boundary.tokens, layout.page_tokens)
        for slice_ in range(of_group.num_slices):
            keys.append(RecordKey(query.namespace, boundary.prefix, group, slice_))
            spans.append((span.start, span.stop))
    return tuple(keys), tuple(spans)


def plain_text(text: str, most: int = TEXT_MAX) -> str:
    """The first `most` characters of an engine's text, with unprintable characters escaped.

    Engines take such texts from their own clients. Control characters, line separators and characters that change the
    direction of text could forge a line of a log.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)[:most]


def instance_fields(instance: EngineInstance) -> dict[str, Any]:
    """The `engine` of `messages.OpenNamespace`: fields by name, cut to what a service accepts."""
    return {
        "name": plain_text(instance.name),
        "models": [plain_text(model) for model in instance.models[:_MODELS_MAX]],
        "step_tokens": instance.step_tokens,
        "whole_prompts": instance.whole_prompts,
        "address": plain_text(instance.address),
        "dp_rank": instance.dp_rank,
        "names_blocks": instance.names_blocks,
    }


def parse_instance(engine: Mapping[str, Any]) -> EngineInstance | None:
    """The engine that opens a namespace; `None`: its description cannot be used. That is for routers only, and must not
    cost the engine its namespace. Fields of later releases are ignored.
    """
    name, address, models = engine.get("name"), engine.get("address", ""), engine.get("models")
    step_tokens, dp_rank = engine.get("step_tokens"), engine.get("dp_rank", 0)
    whole_prompts, names_blocks = engine.get("whole_prompts", False), engine.get("names_blocks", False)
    if not (
        isinstance(name, str)
        and isinstance(address, str)
        and isinstance(models, list | tuple)
        and all(isinstance(model, str) for model in models)
        and is_whole(step_tokens, LINK_TOKENS, MAX_PREFIX_TOKENS)
        and step_tokens % LINK_TOKENS == 0
        and is_whole(dp_rank, 0, _TOKENS_MAX)
        and isinstance(whole_prompts, bool)
        and isinstance(names_blocks, bool)
    ):
        return None
    return EngineInstance(
        plain_text(name),
        tuple(plain_text(model) for model in models[:_MODELS_MAX]),
        step_tokens=step_tokens,
        whole_prompts=whole_prompts,
        address=plain_text(address),
        dp_rank=dp_rank,
        names_blocks=names_blocks,
    )


def is_whole(value: object, least: int, most: int) -> TypeGuard[int]:
    """Whether a peer's value is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def outcome_message(outcome: Outcome) -> messages.Outcome:
    """A request's outcome as a message, cut to what a service keeps: it ends the connection of one that is larger."""
    stop = outcome.stop
    detail = {
        name[:TEXT_MAX]: value[:TEXT_MAX] if isinstance(value, str) else value
        for name, value in list(outcome.detail.items())[:_DETAILS_MAX]
    }
    changed = {
        "request": outcome.request[:TEXT_MAX],
        "namespace": outcome.namespace or b"",
        "reason": outcome.reason[:TEXT_MAX],
        "detail": detail,
        "stop_tokens": stop.tokens if stop is not None else 0,
        "stop_prefix": stop.prefix if stop is not None else b"",
        "groups": outcome.groups.to_bytes((outcome.groups.bit_length() + 7) // 8, "little"),
        "first": outcome.first or b"",
    }
    return messages.Outcome(**_same_fields(outcome, messages.Outcome) | changed)


def parse_outcome(message: messages.Outcome) -> Outcome:
    """A request's outcome from a message. Long texts are cut and escaped (`plain_text`); values that are not plain, and
    names that are no text, are left out: people read it, and programs read it as JSON.

    Raises:
        InvalidRequest: A hash has the wrong length, or a number is larger than any prompt.
    """
    for where, data, expected in (
        ("stop_prefix", message.stop_prefix, PREFIX_BYTES),
        ("first", message.first, PREFIX_BYTES),
        ("content", message.content, CONTENT_BYTES),
    ):
        if data:
            check_length(f"outcome.{where}", data, expected)
    stop = Boundary(message.stop_tokens, PrefixHash(message.stop_prefix)) if message.stop_prefix else None
    for where in ("prompt_tokens", "cap_tokens", "local_tokens", "resume_tokens", "stop_tokens"):
        if (tokens := getattr(message, where)) > _TOKENS_MAX:
            raise InvalidRequest("a number does not fit its width", field=f"outcome.{where}", seen=tokens)
    detail = {
        plain_text(name): plain_text(value) if isinstance(value, str) else value
        for name, value in list(message.detail.items())[:_DETAILS_MAX]
        if isinstance(name, str)
        and (isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)))
    }
    changed = {
        "request": plain_text(message.request),
        "namespace": parse_namespace(message.namespace, "outcome.namespace") if message.namespace else None,
        "reason": plain_text(message.reason),
        "detail": detail,
        "stop": stop,
        "groups": int.from_bytes(message.groups[:_GROUPS_BYTES_MAX], "little"),
        "first": PrefixHash(message.first) if message.first else None,
        "age_ms": min(message.age_ms, _AGE_MS_MAX),
    }
    return Outcome(**_same_fields(message, Outcome) | changed)


def key_fields(key: RecordKey) -> dict[str, Any]:
    """The fields of a key, as `messages.Load` and `messages.Discard` carry them."""
    return key._asdict()


def parse_key(message: messages.Load | messages.Discard) -> RecordKey:
    """The key in a message.

    Raises:
        InvalidRequest: A part has the wrong length or range.
    """
    check_length(f"{message.type}.prefix", message.prefix, PREFIX_BYTES)
    if message.group > 0xFFFF or message.slice > 0xFFFF:
        raise InvalidRequest("group and slice have 16 bits", group=message.group, slice=message.slice)
    namespace = parse_namespace(message.namespace, f"{message.type}.namespace")
    return RecordKey(namespace, PrefixHash(message.prefix), message.group, message.slice)


def parse_namespace(namespace: bytes, where: str) -> NamespaceId:
    """A namespace id of the right length.

    Raises:
        InvalidRequest: It is not 16 bytes.
    """
    check_length(where, namespace, NAMESPACE_BYTES)
    return NamespaceId(namespace)


def _same_fields(value: Any, target: Any) -> dict[str, Any]:
    """The fields of `value` that the class `target` has too, by name."""
    source: Any = type(value)
    return {name: getattr(value, name) for name in _same_names(source, target)}


@cache
def _same_names(source: Any, target: Any) -> tuple[str, ...]:
    known = {field.name for field in fields(target)}
    return tuple(field.name for field in fields(source) if field.name in known)


def _pack(code: str, numbers: list[int], where: str) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}{code}", *numbers)
    except struct.error as error:
        raise InvalidRequest("a number does not fit its width", field=where, error=error) from error


def _unpack(code: str, data: bytes, where: str) -> tuple[int, ...]:
    width = struct.calcsize(f"<{code}")
    if len(data) % width:
        raise InvalidRequest("a field has the wrong length", field=where, expected=f"n x {width}", seen=len(data))
    return struct.unpack(f"<{len(data) // width}{code}", data)


def _prefixes(data: bytes, count: int, where: str) -> list[PrefixHash]:
    check_length(where, data, count * PREFIX_BYTES)
    return [PrefixHash(data[at : at + PREFIX_BYTES]) for at in range(0, len(data), PREFIX_BYTES)]


def check_length(where: str, data: bytes, expected: int) -> None:
    """Refuse bytes of another length.

    Raises:
        InvalidRequest: They have one; names the field `where`.
    """
    if len(data) != expected:
        raise InvalidRequest("a field has the wrong length", field=where, expected=expected, seen=len(data))
