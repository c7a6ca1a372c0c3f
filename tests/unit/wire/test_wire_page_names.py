"""Names of pages: each comes back as it was sent, alone or with others, and errors name the wrong field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.page_blocks import HASHES_MAX, TOKENS_MAX, BlockGroup, PageBlocks
from kvstore.wire import messages
from kvstore.wire.frames import pack_head, unpack_head
from kvstore.wire.messages import PAGE_NAMES_MAX, decode, encode
from kvstore.wire.page_names import blocks_message, names_messages, parse_blocks, parse_names

NAMESPACE = NamespaceId(bytes(range(16)))

BLOCKS = PageBlocks(
    namespace=NAMESPACE,
    boundary=Boundary(64, PrefixHash(bytes(32))),
    group=9,
    model="org/model",
    hash_bytes=8,
    hashes=bytes(range(32)),
    parent=bytes(8),
    block_tokens=16,
    groups=(BlockGroup(0, "full_attention"), BlockGroup(3, "sliding_window", 128)),
    tokens=bytes(4 * 64),
    lora_name="adapter",
)


@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS._replace(parent=b"", tokens=b"", lora_name="", group=0)])
def test_names_of_blocks_come_back(blocks: PageBlocks) -> None:
    """Over real msgpack, as part of an outcome."""
    head = msgpack.unpackb(msgpack.packb(encode(blocks_message(blocks))))
    message = decode(head)
    assert isinstance(message, messages.Outcome)
    assert parse_blocks(message) == blocks


@pytest.mark.parametrize(
    "change",
    [
        {"hashes": bytes(31)},
        {"hashes": b""},
        {"hashes": bytes(8 * 5000), "tokens": b""},
        {"hash_bytes": 0},
        {"hash_bytes": 1 << 40},
        {"hash_bytes": True},
        {"parent": bytes(7)},
        {"tokens": bytes(4)},
        {"tokens": "text"},
        {"block_tokens": -16},
        {"model": b"bytes"},
        {"lora_name": None},
        {"groups": 3},
        {"groups": [[0, "full_attention"]]},
        {"groups": [[-1, "full_attention", 0]]},
        {"groups": [["0", "full_attention", 0]]},
        {"groups": [[True, "full_attention", 0]]},
        {"groups": [[0, "full_attention", True]]},
        {"groups": [[0, "full_attention", 0], [0, "sliding_window", 64]]},
        {"groups": [[index, "full_attention", 0] for index in range(17)]},
        {"groups": []},
        {"hashes": bytes(8 * 700), "block_tokens": 255, "tokens": b""},
    ],
)
def test_names_of_blocks_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    message = blocks_message(BLOCKS)
    with pytest.raises(InvalidRequest, match="outcome"):
        parse_blocks(replace(message, blocks={**message.blocks, **change}))
    for missing in change:
        with pytest.raises(InvalidRequest):
            parse_blocks(replace(message, blocks={k: v for k, v in message.blocks.items() if k != missing}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hashes": bytes(31)}, "field=outcome.blocks.hashes expected=24 seen=31"),
        ({"parent": bytes(7)}, "field=outcome.blocks.parent expected=0 or 8 seen=7"),
        ({"tokens": bytes(4)}, "field=outcome.blocks.tokens expected=0 or 256 seen=4"),
        ({"hash_bytes": 65}, "field=outcome.blocks.hash_bytes expected=1 to 64 seen=65"),
        ({"block_tokens": True}, "field=outcome.blocks.block_tokens expected=1 to 16777216 seen=True"),
        ({"groups": []}, "field=outcome.blocks.groups expected=1 to 16 seen=0"),
        ({"groups": [[0, "a", 0], "b"]}, "field=outcome.blocks.groups.1. expected=.* seen=b"),
    ],
)
def test_names_of_blocks_are_refused_with_what_was_seen(change: dict[str, Any], expected: str) -> None:
    message = blocks_message(BLOCKS)
    with pytest.raises(InvalidRequest, match=expected):
        parse_blocks(replace(message, blocks={**message.blocks, **change}))


@pytest.mark.parametrize("change", [{"groups": b"\3"}, {"groups": b""}, {"stop_prefix": b""}, {"namespace": b"x"}])
def test_names_of_blocks_of_no_page_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="outcome"):
        parse_blocks(replace(blocks_message(BLOCKS), **change))


def test_names_of_blocks_cannot_forge_a_line_of_a_log() -> None:
    message = blocks_message(BLOCKS._replace(model="a\nb" + "x" * 300))
    assert parse_blocks(message).model.startswith("a\\nb")
    assert len(parse_blocks(message).model) <= 256


def page(number: int, **change: Any) -> PageBlocks:
    """Another page of the same kind."""
    return BLOCKS._replace(boundary=Boundary(64, PrefixHash(number.to_bytes(32, "big"))), **change)


def sent(pages: list[PageBlocks]) -> list[list[PageBlocks]]:
    """What a service reads of each message, as it reads what a client sends."""
    heads = [pack_head(encode(message)) for message in names_messages(pages)]
    received = [decode(unpack_head(head[16:], is_of_client=True)) for head in heads]
    return [parse_names(message) for message in received if isinstance(message, messages.PageNames)]


def test_names_of_many_pages_come_back() -> None:
    """In one message: a page at the prompt's start, a shorter one, and one without tokens among others."""
    pages = [page(0, parent=b""), page(1), page(2, hashes=bytes(8), tokens=bytes(64)), page(3, tokens=b"")]
    assert sent(pages) == [pages]
    assert sent([BLOCKS]) == [[BLOCKS]]
    assert sent([]) == []


def test_pages_of_several_kinds_share_messages_with_their_own() -> None:
    """None is lost, and those of one message are in their order."""
    kinds: list[dict[str, Any]] = [
        {},
        {"group": 3},
        {"model": "another"},
        {"lora_name": ""},
        {"namespace": NamespaceId(bytes(16))},
        {"groups": (BlockGroup(0, "full_attention"),)},
        {"hash_bytes": 4, "parent": bytes(4), "tokens": b""},
        {"block_tokens": 32, "tokens": b""},
    ]
    pages = [page(number, **kinds[number * 3 % len(kinds)]) for number in range(40)]
    received = sent(pages)
    assert len(received) == len(kinds)
    assert sorted((one for part in received for one in part), key=lambda one: one.boundary.prefix) == pages
    assert all([pages.index(one) for one in part] == sorted(pages.index(one) for one in part) for part in received)


@pytest.mark.parametrize(
    ("num_blocks", "block_tokens", "num_groups", "of_message"),
    [
        (1, 1, 1, PAGE_NAMES_MAX),
        (128, 8, 1, 64),
        (1024, 1, 2, 4),
        (HASHES_MAX, 1, 1, 1),
        (8, 1024, 4, 4),
        (1, TOKENS_MAX, 1, 1),
        (16, 16, 10, 51),
    ],
)
def test_too_many_pages_for_a_message_are_divided(
    num_blocks: int, block_tokens: int, num_groups: int, of_message: int
) -> None:
    """Each message has what a service takes, however large its hashes and with all tokens."""
    groups = tuple(BlockGroup(index, "full_attention") for index in range(num_groups))
    shape: dict[str, Any] = {"block_tokens": block_tokens, "groups": groups, "hash_bytes": 64, "parent": b""}
    data = {"hashes": bytes(64 * num_blocks), "tokens": bytes(4 * num_blocks * block_tokens)}
    pages = [page(number, **shape, **data) for number in range(2 * of_message + 1)]
    assert not pages[0].is_too_large
    received = sent(pages)
    assert [len(part) for part in received] == [of_message, of_message, 1]
    assert [one for part in received for one in part] == pages


def names(**change: Any) -> messages.PageNames:
    """A message of three pages."""
    (message,) = names_messages([page(number) for number in range(3)])
    return replace(message, **change)


def with_page(at: int, value: object) -> list[Any]:
    """The second page with another value."""
    pages = [list(one) for one in names().pages]
    pages[1][at] = value
    return pages


SECOND = r"page_names.pages\[1\]"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"namespace": b"x"}, "field=page_names.namespace expected=16 seen=1"),
        ({"group": 1 << 20}, "field=page_names.group expected=less than .* seen=1048576"),
        ({"hash_bytes": 0}, "field=page_names.hash_bytes expected=1 to 64 seen=0"),
        ({"hash_bytes": 65}, "field=page_names.hash_bytes expected=1 to 64 seen=65"),
        ({"block_tokens": 0}, "field=page_names.block_tokens expected=1 to 16777216 seen=0"),
        ({"groups": []}, "field=page_names.groups expected=1 to 16 seen=0"),
        ({"groups": [[0, "a", 0], [0, "b", 0]]}, r"field=page_names.groups\[1\] seen=0"),
        ({"groups": [[0, "a", True]]}, r"field=page_names.groups\[0\] expected=.* seen=list"),
        ({"pages": []}, "field=page_names.pages expected=1 to 64 seen=0"),
        ({"pages": names().pages * 22}, "field=page_names.pages expected=1 to 64 seen=66"),
        ({"pages": [7]}, r"field=page_names.pages\[0\] expected=.* seen=7"),
        ({"pages": [names().pages[0][:4]]}, r"field=page_names.pages\[0\] expected=.* seen=list"),
        ({"pages": with_page(0, True)}, f"field={SECOND} expected=.* seen=list"),
        ({"pages": with_page(0, 64.0)}, f"field={SECOND} expected=.* seen=list"),
        ({"pages": with_page(0, 0)}, f"field={SECOND}.stop expected=1 to 16777216 seen=0"),
        ({"pages": with_page(0, -1)}, f"field={SECOND}.stop expected=1 to 16777216 seen=-1"),
        ({"pages": with_page(0, 1 << 40)}, f"field={SECOND}.stop expected=1 to 16777216 seen=1099511627776"),
        ({"pages": with_page(1, bytes(31))}, f"field={SECOND}.prefix expected=32 seen=31"),
        ({"pages": with_page(1, "text")}, f"field={SECOND} expected=.* seen=list"),
        ({"pages": with_page(2, b"")}, f"field={SECOND}.hashes expected=8 seen=0"),
        ({"pages": with_page(2, bytes(31))}, f"field={SECOND}.hashes expected=24 seen=31"),
        ({"pages": with_page(3, bytes(7))}, f"field={SECOND}.parent expected=0 or 8 seen=7"),
        ({"pages": with_page(4, bytes(4))}, f"field={SECOND}.tokens expected=0 or 256 seen=4"),
        ({"pages": with_page(4, None)}, f"field={SECOND} expected=.* seen=list"),
    ],
)
def test_names_of_pages_are_refused_with_what_was_seen(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        parse_names(names(**change))


@pytest.mark.parametrize(
    ("num_blocks", "block_tokens", "expected"),
    [
        (HASHES_MAX // 4, 1, None),
        (HASHES_MAX // 4 + 1, 1, "field=page_names.pages.hashes expected=at most 8192 seen=8196"),
        (32, TOKENS_MAX // 128, None),
        (32, TOKENS_MAX // 128 + 1, "field=page_names.pages.tokens expected=at most 131072 seen=131200"),
    ],
)
def test_all_pages_of_a_message_have_no_more_than_one_page_may(
    num_blocks: int, block_tokens: int, expected: str | None
) -> None:
    """Two pages, each small enough alone, of two groups."""
    values = [64, bytes(32), bytes(8 * num_blocks), b"", b""]
    message = names(block_tokens=block_tokens, pages=[values, values])
    if expected is None:
        assert len(parse_names(message)) == 2
    else:
        with pytest.raises(InvalidRequest, match=expected):
            parse_names(message)


def test_names_of_many_pages_cannot_forge_a_line_of_a_log() -> None:
    (message,) = names_messages([page(0, model="a\nb" + "x" * 300, lora_name="c\rd" + "x" * 300)])
    (found,) = parse_names(message)
    assert found.model.startswith("a\\nb") and len(found.model) <= 256
    assert found.lora_name.startswith("c\\rd") and len(found.lora_name) <= 256
