"""The bytes of the Redis protocol (RESP2), without I/O.

Large replies are received straight into a buffer that the caller provides, so nothing is copied after `recv_into`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union

Argument = bytes | str | int | memoryview
Command = Sequence[Argument]

_SCRATCH_BYTES = 16 * 1024
_LINE_BYTES_MAX = _SCRATCH_BYTES // 2
_BULK_BYTES_MAX = 512 << 20
_ITEMS_MAX = 1 << 20
_DEPTH_MAX = 8
_INLINE_BYTES = 8 * 1024
_INTEGER_END = 1 << 63
_PIECE_BYTES = 512 * 1024
"""Bytes of a bulk string received at a time if it is summed: they are then still in the core's own cache."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that the server at `address` replied, for example `OOM command not allowed ...`."""

    message: str
    address: str = ""

    @property
    def code(self) -> str:
        """Its first word."""
        return self.message.partition(" ")[0]


Reply = Union[None, int, str, bytes, memoryview, ErrorReply, "list[Reply]"]
"""A bulk string is `bytes`, or a `memoryview` of the caller's buffer; a simple string is `str`."""


class ProtocolError(Exception):
    """The peer does not use RESP2; the connection is unusable. Does not leave this package."""


def encode_command(*arguments: Argument) -> list[bytes | memoryview]:
    """The command as parts to write in order; a large argument is a part of its own, not copied."""
    parts: list[bytes | memoryview] = []
    small = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        if isinstance(argument, bytes):
            text = argument
        elif not isinstance(argument, memoryview):
            text = str(argument).encode()
        elif len(argument) <= _INLINE_BYTES:
            text = bytes(argument)
        else:
            small.append(b"$%d\r\n" % len(argument))
            parts += [b"".join(small), argument]
            small = [b"\r\n"]
            continue
        small.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return [*parts, b"".join(small)]


class ReplyParser:
    """Parses replies.

    The caller receives into `buffer()` and at once passes the number of bytes to `received`. So after `drop_target` no
    byte is written into the dropped buffer.

    Args:
        sink_for: Called with the size of each bulk string that is a reply of its own. Returns its buffer, or `None` to
            drop it.
        on_reply: Called with each reply; a dropped one is `None`.

    Attributes:
        on_piece: Called with each piece, in order, of one bulk string; `sink_for` sets it for the string that it was
            called for.
    """

    def __init__(self, sink_for: Callable[[int], memoryview | None], on_reply: Callable[[Reply], None]) -> None:
        self._sink_for = sink_for
        self._on_reply = on_reply
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._scrap = memoryview(bytearray(64 * 1024))
        self._start = 0  # scratch[start:end] is received and not yet parsed
        self._end = 0
        self._target: memoryview | None = None  # of the bulk string that is being received
        self._filled = 0
        self._body_left = 0
        self.on_piece: Callable[[memoryview], None] | None = None
        self._newline_due = False
        self._stack: list[tuple[int, list[Reply]]] = []  # arrays that are being received: items in all, items so far

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._body_left == 0:
            return self._scratch_view[self._end :]
        if self._target is None:
            return self._scrap[: self._body_left]
        if self.on_piece is not None:
            return self._target[self._filled : self._filled + _PIECE_BYTES]
        return self._target[self._filled :]

    def head(self) -> memoryview:
        """The received part of the bulk string that `sink_for` is called for; may be empty."""
        return self._scratch_view[self._start : min(self._end, self._start + self._body_left)]

    def received(self, num_bytes: int) -> None:
        """Parse bytes that were received into `buffer()`.

        Raises:
            ProtocolError: They are not RESP2.
        """
        if self._body_left:
            start = self._filled
            self._filled += num_bytes
            self._body_left -= num_bytes
            if self.on_piece is not None and self._target is not None:
                self.on_piece(self._target[start : self._filled])
            if self._body_left == 0:
                self._end_bulk()
            return
        self._end += num_bytes
        while self._step():
            pass
        rest = self._end - self._start
        if self._start:
            self._scratch[:rest] = self._scratch[self._start : self._end]
            self._start, self._end = 0, rest

    def drop_target(self) -> None:
        """Drop the rest of the bulk string that is being received, if any."""
        self._target = None

    def _step(self) -> bool:
        """Parse one line, and the received part of the body after it. False: more bytes are needed."""
        if self._newline_due:
            if self._end - self._start < 2:
                return False
            if self._scratch[self._start : self._start + 2] != b"\r\n":
                raise ProtocolError("a bulk string does not end with a new line")
            self._start += 2
            self._newline_due = False
        line_end = self._scratch.find(b"\r\n", self._start, self._end)
        if line_end < 0:
            if self._end - self._start > _LINE_BYTES_MAX:
                raise ProtocolError("a line is too long")
            return False
        line = bytes(self._scratch_view[self._start : line_end])
        self._start = line_end + 2
        kind, text = line[:1], line[1:]
        if kind == b"$":
            return self._begin_bulk(_number(text, _BULK_BYTES_MAX))
        if kind == b"*":
            self._begin_array(_number(text, _ITEMS_MAX))
        elif kind == b":":
            self._value(_number(text, None))
        elif kind == b"+":
            self._value(text.decode(errors="replace"))
        elif kind == b"-":
            self._value(ErrorReply(text.decode(errors="replace")))
        else:
            raise ProtocolError(f"unknown kind of reply {kind!r}")
        return True

    def _begin_array(self, num_items: int) -> None:
        if num_items <= 0:
            self._value(None if num_items < 0 else [])
        elif len(self._stack) >= _DEPTH_MAX:
            raise ProtocolError("arrays are nested too deep")
        else:
            self._stack.append((num_items, []))

    def _begin_bulk(self, num_bytes: int) -> bool:
        if num_bytes < 0:
            self._value(None)
            return True
        self._body_left = num_bytes
        self._target = memoryview(bytearray(num_bytes)) if self._stack else self._sink_for(num_bytes)
        here = min(num_bytes, self._end - self._start)
        if self._target is not None:
            self._target[:here] = self._scratch_view[self._start : self._start + here]
            if here and self.on_piece is not None:
                self.on_piece(self._target[:here])
        self._start += here
        self._filled = here
        self._body_left = num_bytes - here
        if self._body_left:
            return False
        self._end_bulk()
        return True

    def _end_bulk(self) -> None:
        target, self._target, self.on_piece = self._target, None, None
        self._newline_due = True
        self._value(bytes(target) if self._stack and target is not None else target)

    def _value(self, value: Reply) -> None:
        while self._stack:
            num_items, items = self._stack[-1]
            items.append(value)
            if len(items) < num_items:
                return
            self._stack.pop()
            value = items
        self._on_reply(value)


def _number(text: bytes, maximum: int | None) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise ProtocolError(f"expected a number, seen {text[:40]!r}") from error
    if maximum is not None and not -1 <= number <= maximum:
        raise ProtocolError(f"a length is out of range, seen {text[:40]!r}")
    if not -_INTEGER_END <= number < _INTEGER_END:
        raise ProtocolError(f"an integer has more than 64 bits, seen {text[:40]!r}")
    return number


def joined(commands: Sequence[Sequence[bytes | memoryview]]) -> list[bytes | memoryview]:
    """The parts of several commands, with neighbouring small parts joined, so that a pipeline takes few writes."""
    parts: list[bytes | memoryview] = []
    small: list[bytes] = []
    for command in commands:
        for part in command:
            if isinstance(part, bytes):
                small.append(part)
            else:
                parts += [b"".join(small), part]
                small = []
    if small:
        parts.append(b"".join(small))
    return parts
