"""What a caller gives to a `PageDoor`, checked before anything is done: an error names its field, what was expected and
what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import MAX_RECORD_BYTES
from kvstore.model.kinds import Keyed
from kvstore.model.layout import MAX_GROUP_SLICES, MAX_PREFIX_TOKENS, Layout
from kvstore.model.namespace import NamespaceDescription
from kvstore.runtime.wrong_values import shown

PageKey = str | bytes
"""Names a page; any length."""

_SECONDS_MAX = 366 * 86_400
"""Clocks and timers cannot add times without an end."""
_ELEMENT_BYTES_MAX = 64
_INT_MAX = (1 << 63) - 1
"""Messages hold no larger numbers."""
_SHOWN_MAX = 60
"""Characters of a text that an error shows."""
_SLICE_BYTES_MAX = MAX_RECORD_BYTES - HEADER_BYTES
_KEYS_MAX = 100_000
"""A query of more does not fit a message."""


def check_fields(fields: Mapping[str, Any], page_tokens: int, num_slices: int, chained: bool) -> None:
    """Check the arguments of `describe_pages`; what the fields hold is checked where they are encoded.

    Raises:
        InvalidRequest: One of them is wrong.
    """
    if not isinstance(fields, Mapping):
        raise wrong("fields", "a description is made of named fields", "a mapping", fields)
    for name in fields:
        if not isinstance(name, str):
            raise wrong("fields", "fields have names", "text", name)
    if "layout" in fields:  # it would be lost, and two namespaces would become one
        raise wrong(
            "fields.layout", "the door writes the layout: choose another name", "no such field", fields["layout"]
        )
    check_whole("page_tokens", page_tokens, 1, MAX_PREFIX_TOKENS)
    check_whole("num_slices", num_slices, 1, MAX_GROUP_SLICES)
    if not isinstance(chained, bool):
        raise wrong("chained", "pages are chained or not", "True or False", chained)


def layout_of(description: NamespaceDescription) -> Layout:
    """The layout of a namespace of pages.

    Raises:
        InvalidRequest: It is no description, or one of another kind of namespace.
    """
    if not isinstance(description, NamespaceDescription):
        raise wrong("description", "a door needs a namespace", "what describe_pages returns", description)
    layout = description.layout()
    kinds = [group.kind.name for group in layout.groups]
    if len(kinds) != 1 or not isinstance(layout.groups[0].kind, Keyed):
        raise InvalidRequest(
            "the namespace is not one of pages",
            field="description",
            expected="what describe_pages returns",
            seen=f"groups of the kinds {', '.join(kinds)}",
        )
    return layout


def checked_slices(slices: Sequence[int], num_slices: int) -> tuple[int, ...]:
    """The slices of a page that a caller holds.

    Raises:
        InvalidRequest: They are no indexes, not those of the namespace, or one is there twice: its bytes would be read
            for those of the other one.
    """
    if not _is_list(slices):
        raise wrong("slices", "a caller holds slices of a page", f"a list of indexes below {num_slices}", slices)
    if not slices:
        raise wrong("slices", "a caller holds slices of a page", "at least 1", 0)
    for at, index in enumerate(slices):
        if type(index) is not int or not 0 <= index < num_slices:
            expected = f"a whole number from 0 to {num_slices - 1}"
            raise wrong(f"slices[{at}]", "the namespace has no such slices", expected, index)
        if index in slices[:at]:
            raise wrong(f"slices[{at}]", "a slice is there twice", "each slice once", index)
    return tuple(slices)


def check_element_bytes(element_bytes: int | None) -> None:
    """Check the width of a page's elements.

    Raises:
        InvalidRequest: It is none.
    """
    if element_bytes is not None:
        check_whole("element_bytes", element_bytes, 1, _ELEMENT_BYTES_MAX)


def check_timeout(timeout_s: float, *, may_be_over: bool = False) -> None:
    """Check a time to wait.

    Args:
        timeout_s: The time.
        may_be_over: It may be zero or less: what is left of a time that is over.

    Raises:
        InvalidRequest: It is no number, not finite, or too long.
    """
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # written so that it refuses nan, which no comparison is true for
    if not is_number or not (timeout_s <= _SECONDS_MAX and (may_be_over or timeout_s > 0)) or timeout_s < -_SECONDS_MAX:
        expected = f"{'at most' if may_be_over else 'a number above 0, at most'} {_SECONDS_MAX}"
        raise wrong("timeout_s", "this is no time in seconds to wait", expected, timeout_s)


def check_keys(keys: Sequence[PageKey], page_tokens: int, after: PageKey | None = None) -> None:
    """Check that keys are keys, and not too many for one call.

    Raises:
        InvalidRequest: They are not.
    """
    if not _is_list(keys):
        raise wrong("keys", "expected the keys of pages", "a list of text or bytes", keys)
    most = min(_KEYS_MAX, MAX_PREFIX_TOKENS // page_tokens) - (after is not None)
    if len(keys) > most:
        raise wrong("keys", "these are too many pages for one call", f"at most {most} keys", len(keys))
    for at, key in enumerate(keys):
        if not isinstance(key, str | bytes):
            raise wrong(f"keys[{at}]", "this is no key of a page", "text or bytes", key)
    if after is not None and not isinstance(after, str | bytes):
        raise wrong("after", "this is no key of a page", "text or bytes", after)


def check_report(
    request: str,
    keys: Sequence[PageKey],
    num_found: int,
    page_tokens: int,
    *,
    reason: str,
    held: int,
    detail: Mapping[str, object] | None,
) -> None:
    """Check the arguments of a report.

    Raises:
        InvalidRequest: One of them is wrong.
    """
    check_keys(keys, page_tokens)
    check_whole("num_found", num_found, 0, len(keys))
    check_whole("held", held, 0, MAX_PREFIX_TOKENS // page_tokens - len(keys))
    for field, text in (("request", request), ("reason", reason)):
        if not isinstance(text, str):
            raise wrong(field, "this is no name", "text", text)
    if detail is not None and not isinstance(detail, Mapping):
        raise wrong("detail", "details have names", "a mapping", detail)
    for name, value in (detail or {}).items():
        is_plain = (
            value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= _INT_MAX)
        )
        if not isinstance(name, str) or not is_plain:
            raise wrong(f"detail[{shown(name)}]", "this is no plain detail", "text, a number or a boolean", value)


def checked_pages(
    keys: Sequence[PageKey], pages: Sequence[Any], num_slices: int, *, writable: bool
) -> list[list[memoryview]]:
    """The pages as views of the bytes of the caller's memory: contiguous, and writable if need be.

    Raises:
        InvalidRequest: A page is missing, or something in it is not such memory.
    """
    if not _is_list(pages):
        raise wrong("pages", "expected a page for each key", "a list of pages", pages)
    if len(keys) != len(pages):
        raise wrong("pages", "each key needs its page", f"{len(keys)} pages", len(pages))
    return [_checked_page(f"pages[{at}]", page, num_slices, writable) for at, page in enumerate(pages)]


def _checked_page(field: str, page: Any, num_slices: int, writable: bool) -> list[memoryview]:
    if not _is_list(page):
        raise wrong(field, "a page is a list of buffers", "a list of buffers", page)
    if not page or len(page) % num_slices:
        expected = f"a multiple of {num_slices}, not 0" if num_slices > 1 else "at least 1"
        raise wrong(field, "each slice of a page needs as many buffers as the others", expected, len(page))
    views = []
    for at, piece in enumerate(page):
        try:
            view = memoryview(piece)
        except (TypeError, ValueError, BufferError) as error:  # it is none, or was released
            expected = "bytes, an array or another buffer that is not released"
            raise wrong(f"{field}[{at}]", "this is no memory", expected, piece) from error
        if not view.c_contiguous:
            raise InvalidRequest(
                "a buffer has gaps, or another order",
                field=f"{field}[{at}]",
                expected="contiguous memory",
                seen=f"strides {view.strides}",
            )
        if writable and view.readonly:
            raise InvalidRequest(
                "a page is read into this buffer",
                field=f"{field}[{at}]",
                expected="writable memory",
                seen="read-only memory",
            )
        if view.format.lstrip("@=<>!") == "O":  # addresses of objects, which mean nothing once they were read
            raise wrong(f"{field}[{at}]", "this memory holds objects of Python", "numbers or bytes", piece)
        views.append(_bytes_of(view))
    step = len(views) // num_slices
    for start in range(0, len(views), step):
        if (seen := sum(view.nbytes for view in views[start : start + step])) > _SLICE_BYTES_MAX:
            raise wrong(field, "no record is that large", f"at most {_SLICE_BYTES_MAX} bytes of a slice", seen)
    return views


def _bytes_of(view: memoryview) -> memoryview:
    data: Any = np.frombuffer(view, np.uint8) if view.nbytes else bytearray()
    return memoryview(data)  # a view of some elements, like those of a structure, cannot be cast itself


def check_whole(field: str, value: int, least: int, most: int) -> None:
    """Check a whole number.

    Raises:
        InvalidRequest: It is none (a bool is none), or out of range.
    """
    if type(value) is not int or not least <= value <= most:
        raise wrong(field, "this number is not possible here", f"a whole number from {least} to {most}", value)


def wrong(field: str, problem: str, expected: str, seen: object) -> InvalidRequest:
    """The error for a wrong argument. What was seen is shown in short: it may be anything."""
    if isinstance(seen, str | bytes):
        seen = shown(seen[:_SHOWN_MAX])
    elif seen is None or isinstance(seen, int | float):
        seen = shown(seen)
    else:
        seen = f"a value of type {type(seen).__name__}"
    return InvalidRequest(problem, field=field, expected=expected, seen=seen)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
