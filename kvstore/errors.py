"""Errors named by what the caller does next; no other exception crosses a public border of `kvstore`.

Normal outcomes (a miss, a full tier, a record that already exists) are values, not errors.
Messages are lower case, say what was expected and what was seen, and end with `key=value` details. The next step, if a
message has one, is behind its first `: `. Before a caller adds its own, it looks with `next_step`: an error has one.
"""

from __future__ import annotations

import re

__all__ = [
    "Closed",
    "CorruptRecord",
    "InternalError",
    "InvalidRequest",
    "KVStoreError",
    "Unavailable",
    "UnsupportedFormat",
]

_DETAIL = re.compile(r" ([a-z_]+)=(?=\S)")
_WORDS = {"error": ": ", "reason": ": ", "seen": ", got "}


def next_step(text: str) -> tuple[str, str]:
    """The text of an error in two parts: what happened, with its details in words, and the next step, or nothing.

    Of `cannot connect: check the address url=tcp://a:1` these are `cannot connect, url tcp://a:1` and `check the
    address`.
    """
    message = without_details(text)
    cause, _, step = message.partition(": ")
    return in_words(cause + text[len(message) :]), step


def without_details(text: str) -> str:
    """The message of an error alone: without addresses, paths and foreign texts, except at a deadline."""
    detail = _DETAIL.search(text)
    return text[: detail.start()] if detail is not None else text


def in_words(text: str) -> str:
    """Replace details of errors, as in `no file path=/x error=denied`, by words: `no file, path /x: denied`."""
    return _DETAIL.sub(lambda detail: _WORDS.get(detail[1], f", {detail[1].replace('_', ' ')} "), text)


class KVStoreError(Exception):
    """Base of all errors that this package raises on purpose.

    Args:
        message: What was expected and what was seen, in lower case.
        details: Rendered as ` key=value` behind the message; never secrets.
    """

    def __init__(self, message: str, **details: object) -> None:
        self.message = message
        self.details = details
        super().__init__(message + "".join(f" {name}={value}" for name, value in details.items()))

    def sentence(self) -> str:
        """The error for people: its field in front, the other details in words in brackets behind it."""
        details = dict(self.details)
        field = str(details.pop("field", ""))
        text = self.message if not field or field in self.message else f"{field}: {self.message}"
        rest = in_words("".join(f" {name}={value}" for name, value in details.items())).lstrip(",: ")
        return f"{in_words(text)} ({rest})" if rest else in_words(text)


class Unavailable(KVStoreError):
    """The backend refused, timed out or is not reachable: retry later, or go on without it."""


class InvalidRequest(KVStoreError):
    """The call itself is wrong: fix the argument, setting or message that the text names."""


class CorruptRecord(KVStoreError):
    """Bytes that do not match their seal: drop them, tell the owner (`discard`), never use them."""


class UnsupportedFormat(KVStoreError):
    """A format or protocol version this release does not know: upgrade, or migrate the data."""


class Closed(KVStoreError):
    """The object was closed before or during the call; make a new one."""


class InternalError(KVStoreError):
    """A broken invariant of our own: a bug to report."""
