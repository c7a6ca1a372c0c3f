"""How routers know pages, as messages carry it: many pages in a `page_names`, or one in an `outcome`, which services of
earlier releases take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from kvstore.errors import InvalidRequest
from kvstore.model.keys import PREFIX_BYTES, Boundary, PrefixHash
from kvstore.model.layout import MAX_GROUPS, MAX_PREFIX_TOKENS
from kvstore.model.page_blocks import GROUPS_MAX, HASHES_MAX, TOKENS_MAX, BlockGroup, PageBlocks
from kvstore.wire import messages
from kvstore.wire.convert import TEXT_MAX, check_length, is_whole, parse_namespace, plain_text

Typed = TypeVar("Typed", str, bytes)
_HASH_BYTES_MAX = 64
_GROUP_NUMBER_MAX = (1 << 31) - 1
_PAGE = [int, bytes, bytes, bytes, bytes]
"""Types of a page's values in a `page_names`."""

_shared_fields = attrgetter("namespace", "group", "model", "hash_bytes", "block_tokens", "groups", "lora_name")
"""What pages that are named together have in common."""


def names_messages(pages: Iterable[PageBlocks]) -> Iterator[messages.PageNames]:
    """The names of pages, as few messages; pages that share a message stay in their order."""
    alike: dict[object, list[PageBlocks]] = {}
    for page in pages:
        alike.setdefault(_shared_fields(page), []).append(page)
    for of_kind in alike.values():
        together: list[PageBlocks] = []
        num_blocks = 0
        for page in of_kind:
            num_blocks += page.num_blocks
            is_full = len(together) == messages.PAGE_NAMES_MAX or _excess(num_blocks, page.block_tokens, page.groups)
            if together and is_full:
                yield _names_message(together)
                together, num_blocks = [], page.num_blocks
            together.append(page)
        yield _names_message(together)


def _names_message(pages: Sequence[PageBlocks]) -> messages.PageNames:
    first = pages[0]
    return messages.PageNames(
        namespace=first.namespace,
        group=first.group,
        model=first.model[:TEXT_MAX],
        hash_bytes=first.hash_bytes,
        block_tokens=first.block_tokens,
        groups=_groups_field(first),
        pages=[[*page.boundary, page.hashes, page.parent, page.tokens] for page in pages],
        lora_name=first.lora_name[:TEXT_MAX],
    )


def parse_names(message: messages.PageNames) -> list[PageBlocks]:
    """The names of pages from a message; texts as in `convert.parse_outcome`.

    Raises:
        InvalidRequest: A value has the wrong type or length or is out of range, or there is too much for one message.
    """
    if not 1 <= len(message.pages) <= messages.PAGE_NAMES_MAX:
        expected = f"1 to {messages.PAGE_NAMES_MAX}"
        raise InvalidRequest(
            "expected a list of pages", field="page_names.pages", expected=expected, seen=len(message.pages)
        )
    shared = _parse_shared(messages.encode(message), "page_names")  # its fields by name
    shared["namespace"] = parse_namespace(message.namespace, "page_names.namespace")
    if message.group >= MAX_GROUPS:
        expected = f"less than {MAX_GROUPS}"
        raise InvalidRequest("a page is of one group", field="page_names.group", expected=expected, seen=message.group)
    shared["group"] = message.group
    pages = []
    for at, said in enumerate(message.pages):
        where = f"page_names.pages[{at}]"
        if not isinstance(said, list) or list(map(type, said)) != _PAGE:
            raise InvalidRequest(
                "expected the names of a page",
                field=where,
                expected="a whole number and four times bytes",
                seen=_seen(said),
            )
        tokens, prefix, hashes, parent, token_ids = said
        if not 0 < tokens <= MAX_PREFIX_TOKENS:
            expected = f"1 to {MAX_PREFIX_TOKENS}"
            raise InvalidRequest("a page ends at a boundary", field=f"{where}.stop", expected=expected, seen=tokens)
        check_length(f"{where}.prefix", prefix, PREFIX_BYTES)
        pages.append(_page(shared, Boundary(tokens, PrefixHash(prefix)), hashes, parent, token_ids, where=where))
    _check_size(pages, "page_names.pages")
    return pages


def blocks_message(blocks: PageBlocks) -> messages.Outcome:
    """The names of one page as a message."""
    return messages.Outcome(
        request="",
        namespace=blocks.namespace,
        prompt_tokens=0,
        cap_tokens=0,
        local_tokens=0,
        resume_tokens=0,
        stop_tokens=blocks.boundary.tokens,
        stop_prefix=blocks.boundary.prefix,
        groups=(1 << blocks.group).to_bytes(blocks.group // 8 + 1, "little"),
        blocks={
            "model": blocks.model[:TEXT_MAX],
            "hash_bytes": blocks.hash_bytes,
            "hashes": blocks.hashes,
            "parent": blocks.parent,
            "block_tokens": blocks.block_tokens,
            "groups": _groups_field(blocks),
            "tokens": blocks.tokens,
            "lora_name": blocks.lora_name[:TEXT_MAX],
        },
    )


def parse_blocks(message: messages.Outcome) -> PageBlocks:
    """The names of one page from a message; texts as in `convert.parse_outcome`.

    Raises:
        InvalidRequest: A field is missing, has the wrong type or length, or is out of range.
    """
    said, where = message.blocks, "outcome.blocks"
    check_length("outcome.stop_prefix", message.stop_prefix, PREFIX_BYTES)
    bits = int.from_bytes(message.groups[: MAX_GROUPS // 8], "little")
    if bits.bit_count() != 1:
        raise InvalidRequest("a page is of one group", field="outcome.groups", expected=1, seen=bits.bit_count())
    shared = _parse_shared(said, where)
    shared["namespace"] = parse_namespace(message.namespace, "outcome.namespace")
    shared["group"] = bits.bit_length() - 1
    hashes, parent, tokens = (_typed(said, name, bytes, where) for name in ("hashes", "parent", "tokens"))
    boundary = Boundary(message.stop_tokens, PrefixHash(message.stop_prefix))
    page = _page(shared, boundary, hashes, parent, tokens, where=where)
    _check_size([page], where)
    return page


def _page(
    shared: Mapping[str, Any], boundary: Boundary, hashes: bytes, parent: bytes, tokens: bytes, *, where: str
) -> PageBlocks:
    """A page whose lengths fit each other.

    Args:
        shared: The fields of all pages of the message.
        where: The field that names the page, for errors.
    """
    page = PageBlocks(boundary=boundary, hashes=hashes, parent=parent, tokens=tokens, **shared)
    width, num_blocks = page.hash_bytes, page.num_blocks
    if not num_blocks or len(hashes) != num_blocks * width:
        raise _wrong_length(f"{where}.hashes", f"{max(1, num_blocks) * width}", hashes)
    if parent and len(parent) != width:
        raise _wrong_length(f"{where}.parent", f"0 or {width}", parent)
    if tokens and len(tokens) != 4 * num_blocks * page.block_tokens:
        raise _wrong_length(f"{where}.tokens", f"0 or {4 * num_blocks * page.block_tokens}", tokens)
    return page


def _wrong_length(where: str, expected: str, data: bytes) -> InvalidRequest:
    return InvalidRequest("a field has the wrong length", field=where, expected=expected, seen=len(data))


def _excess(num_blocks: int, block_tokens: int, groups: Sequence[BlockGroup]) -> tuple[str, int, int] | None:
    """What one message has too much of: its name, the most that are taken, and how many there are."""
    num_hashes = num_blocks * len(groups)
    if num_hashes > HASHES_MAX:
        return "hashes", HASHES_MAX, num_hashes
    if num_hashes * block_tokens > TOKENS_MAX:
        return "tokens", TOKENS_MAX, num_hashes * block_tokens
    return None


def _check_size(pages: Sequence[PageBlocks], where: str) -> None:
    """Refuse more pages of one kind than one message may have."""
    num_blocks = sum(page.num_blocks for page in pages)
    if (excess := _excess(num_blocks, pages[0].block_tokens, pages[0].groups)) is not None:
        name, most, seen = excess
        raise InvalidRequest(
            "too many blocks or tokens, counted for each group",
            field=f"{where}.{name}",
            expected=f"at most {most}",
            seen=seen,
        )


def _groups_field(blocks: PageBlocks) -> list[Any]:
    return [[group.index, group.kind, group.window_tokens or 0] for group in blocks.groups]


def _parse_shared(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What both messages say alike of all their pages."""
    return {
        "model": plain_text(_typed(said, "model", str, where)),
        "hash_bytes": _number(said, "hash_bytes", _HASH_BYTES_MAX, where),
        "block_tokens": _number(said, "block_tokens", MAX_PREFIX_TOKENS, where),
        "groups": _block_groups(said.get("groups"), where),
        "lora_name": plain_text(_typed(said, "lora_name", str, where)),
    }


def _number(said: Mapping[str, Any], name: str, most: int, where: str) -> int:
    value = said.get(name)
    if is_whole(value, 1, most):
        return value
    raise InvalidRequest("expected a whole number", field=f"{where}.{name}", expected=f"1 to {most}", seen=_seen(value))


def _typed(said: Mapping[str, Any], name: str, kind: type[Typed], where: str) -> Typed:
    value = said.get(name)
    if isinstance(value, kind):
        return value
    expected = "text" if kind is str else kind.__name__
    raise InvalidRequest(
        "a field has the wrong type", field=f"{where}.{name}", expected=expected, seen=type(value).__name__
    )


def _block_groups(said: object, where: str) -> tuple[BlockGroup, ...]:
    """The engine's groups that have a page's blocks: index, kind and window of each."""
    if not isinstance(said, list) or not 1 <= len(said) <= GROUPS_MAX:
        seen = len(said) if isinstance(said, list) else type(said).__name__
        raise InvalidRequest(
            "expected a list of groups", field=f"{where}.groups", expected=f"1 to {GROUPS_MAX}", seen=seen
        )
    groups: dict[int, BlockGroup] = {}
    for at, one in enumerate(said):
        is_group = isinstance(one, list) and len(one) == 3 and isinstance(one[1], str)
        if not is_group or not all(is_whole(number, 0, _GROUP_NUMBER_MAX) for number in (one[0], one[2])):
            raise InvalidRequest(
                "expected index, kind and window of a group",
                field=f"{where}.groups[{at}]",
                expected=f"a text between whole numbers of at most {_GROUP_NUMBER_MAX}",
                seen=_seen(one),
            )
        if one[0] in groups:
            raise InvalidRequest("a group is named twice", field=f"{where}.groups[{at}]", seen=one[0])
        groups[one[0]] = BlockGroup(one[0], plain_text(one[1], 64), one[2] or None)
    return tuple(groups.values())


def _seen(value: object) -> str:
    """What a peer has sent, for an error."""
    return plain_text(str(value)[:64]) if isinstance(value, int | float | str) else type(value).__name__
