"""The Redis protocol parser: any cut of the stream gives the same replies, and nonsense is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.redis.resp import ErrorReply, ProtocolError, Reply, ReplyParser, encode_command, joined

STREAM = (
    b"+OK\r\n-ERR no such thing\r\n:-42\r\n$5\r\nhe\r\no\r\n$-1\r\n$0\r\n\r\n"
    b"*3\r\n$1\r\na\r\n*2\r\n:1\r\n$-1\r\n+x\r\n*0\r\n*-1\r\n$40000\r\n" + b"z" * 40000 + b"\r\n:7\r\n"
)
REPLIES: list[Reply] = [
    "OK", ErrorReply("ERR no such thing"), -42, b"he\r\no", None, b"",
    [b"a", [1, None], "x"], [], None, b"z" * 40000, 7,
]  # fmt: skip


class Peer:
    """A parser that is fed by hand."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.sinks: list[memoryview] = []
        self.parser = ReplyParser(self._sink, self.replies.append)

    def _sink(self, num_bytes: int) -> memoryview:
        self.sinks.append(memoryview(bytearray(num_bytes)))
        return self.sinks[-1]

    def feed(self, data: bytes, cuts: Sequence[int] = ()) -> None:
        """Hand over `data`, in pieces that end at `cuts` and wherever the parser's buffer ends."""
        ends = sorted({cut for cut in cuts if 0 < cut < len(data)} | {len(data)})
        at = 0
        for end in ends:
            while at < end:
                buffer = self.parser.buffer()
                assert len(buffer) > 0
                num_bytes = min(len(buffer), end - at)
                buffer[:num_bytes] = data[at : at + num_bytes]
                self.parser.received(num_bytes)
                at += num_bytes

    def plain(self) -> list[Reply]:
        return [bytes(reply) if isinstance(reply, memoryview) else reply for reply in self.replies]


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_cut_gives_the_same_replies(cuts: list[int]) -> None:
    """However the network cuts the stream, the replies are the same."""
    peer = Peer()
    peer.feed(STREAM, cuts)
    assert peer.plain() == REPLIES


def test_byte_by_byte() -> None:
    """The worst cut: one byte at a time."""
    peer = Peer()
    peer.feed(STREAM, range(len(STREAM)))
    assert peer.plain() == REPLIES


def test_large_reply_is_received_into_its_target() -> None:
    """After the first piece the parser's buffer is the target itself: nothing is copied."""
    peer = Peer()
    peer.feed(b"$100000\r\n" + b"a" * 10)
    buffer = peer.parser.buffer()
    assert buffer.obj is peer.sinks[0].obj
    assert len(buffer) == 100_000 - 10


def test_dropped_target_is_not_written_to() -> None:
    """From `drop_target` on the rest of the reply goes to scrap, and the replies behind it are right."""
    peer = Peer()
    peer.feed(b"$100000\r\n" + b"a" * 10)
    peer.parser.drop_target()
    peer.feed(b"b" * (100_000 - 10) + b"\r\n:5\r\n")
    assert peer.replies == [None, 5]
    assert bytes(peer.sinks[0]) == b"a" * 10 + bytes(100_000 - 10)


@given(st.lists(st.integers(0, 1_300_000), max_size=8))
def test_pieces_are_told_in_their_order(cuts: list[int]) -> None:
    """`on_piece` is called with each byte of a bulk string once, also with those that arrived with its length."""
    body = bytes(range(256)) * 5000
    pieces: list[bytes] = []
    replies: list[Reply] = []
    heads: list[bytes] = []

    def sink(num_bytes: int) -> memoryview:
        heads.append(bytes(parser.head()))
        parser.on_piece = lambda piece: pieces.append(bytes(piece))
        return memoryview(bytearray(num_bytes))

    parser = ReplyParser(sink, replies.append)
    peer = Peer()
    peer.parser = parser
    peer.feed(b"$%d\r\n" % len(body) + body + b"\r\n:1\r\n", cuts)
    assert b"".join(pieces) == body == bytes(replies[0])  # type: ignore[arg-type]
    assert body.startswith(heads[0]) and max(map(len, pieces)) <= 512 * 1024


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 200 OK\r\n", b"$-2\r\n", b"$99999999999\r\n", b"$abc\r\n", b":\r\n", b"*2000000\r\n",
        b"$3\r\nabcde\r\n:1\r\n", b"*1\r\n" * 20, b"+" + b"x" * 9000,
    ],
)  # fmt: skip
def test_nonsense_is_refused(stream: bytes) -> None:
    """What is not RESP2, or is too large to be honest, is an error and no endless wait."""
    with pytest.raises(ProtocolError):
        Peer().feed(stream)


@given(
    st.lists(st.lists(st.one_of(st.binary(max_size=30), st.integers(), st.text(max_size=9)), min_size=1), max_size=9)
)
def test_commands_are_arrays_of_their_arguments(commands: list[list[bytes | int | str]]) -> None:
    """A command, read back as a reply, is the array of its arguments; a pipeline is one after the other."""
    peer = Peer()
    peer.feed(b"".join(bytes(part) for part in joined([encode_command(*command) for command in commands])))
    expected = [
        [argument if isinstance(argument, bytes) else str(argument).encode() for argument in command]
        for command in commands
    ]
    assert peer.replies == expected


def test_large_arguments_are_not_copied() -> None:
    """A page travels as the very buffer it stands in, between small parts."""
    page = memoryview(bytes(100_000))
    parts = joined([encode_command("SET", "a", page, "NX"), encode_command("GET", "a")])
    assert [type(part) for part in parts] == [bytes, memoryview, bytes]
    assert parts[1] is page
