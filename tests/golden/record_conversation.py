"""Records what a client and a service of one release say to each other, frame by frame, over a real TCP connection.

Run it from a checkout of the release, once; later releases must be able to take either part:

    git worktree add ../release COMMIT
    PYTHONPATH=../release python tests/golden/record_conversation.py tests/golden/wire-v1-COMMIT.jsonl

Each line of the file is a frame: the number of its connection, who sent it, and its bytes. Frames are cut by
docs/formats/wire-v1.md, not by the release's code.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import sys
from pathlib import Path

from kvstore.api import LeaseId, Outcome
from kvstore.client import ClientOptions, connect
from kvstore.client.connection import Connection
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.service.server import Server
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import TcpAddress, parse_address

TOKEN = "golden token"
PROMPT = Prompt(ATTENTION, "golden", 128, payload_bytes=200)
_PREFIX = struct.Struct("<4sIQ")


def soon() -> Deadline:
    return Deadline.after(30.0)


class Recorder:
    """Passes bytes on in both directions and keeps the frames.

    Attributes:
        lines: What was said, in order.
    """

    def __init__(self, port: int) -> None:
        self.lines: list[dict[str, object]] = []
        self._port = port
        self._num = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._num = self._num, self._num + 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(number, "client", reader, up_writer))
            group.create_task(self._pass_on(number, "service", up_reader, writer))

    async def _pass_on(
        self, number: int, sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                prefix = await reader.readexactly(_PREFIX.size)
                _, head_bytes, payload_bytes = _PREFIX.unpack(prefix)
                frame = prefix + await reader.readexactly(head_bytes + payload_bytes)
                self.lines.append(
                    {"connection": number, "from": sender, "frame": base64.b64encode(frame).decode("ascii")}
                )
                writer.write(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def talk(url: str) -> None:
    """Every kind of request that a client makes, with an answer of each kind."""
    store = connect(url, token=TOKEN, options=ClientOptions(num_data_connections=1, name="golden"))
    await store.wait_ready(deadline=soon())
    await store.open_namespace(PROMPT.description, deadline=soon())
    records = PROMPT.records()
    await store.lookup(PROMPT.query(), deadline=soon())  # nothing is there
    await store.stage(PROMPT.query(), deadline=soon())
    for record in records:
        await store.save(record, deadline=soon())
    await store.save(records[0], deadline=soon())  # it is there already
    await store.lookup(PROMPT.query(), deadline=soon())
    staged = await store.stage(PROMPT.query(), deadline=soon())
    assert staged.lease is not None
    assert await store.renew(staged.lease, deadline=soon())
    for key in staged.keys:
        await store.load(staged.lease, key, deadline=soon())
    with contextlib.suppress(Unavailable):
        await store.load(LeaseId(bytes(16)), records[0].key, deadline=soon())
    detail = {"tier": "redis", "seconds": 1.5}
    store.report(Outcome("golden-1", PROMPT.namespace, 130, 128, 0, 64, "stage_timeout", detail, tenant=""))
    await store.explain("golden-1", deadline=soon())
    await store.explain("", deadline=soon())
    await store.release(staged.lease)
    await store.discard(records[-1].key, "golden", deadline=soon())
    await store.lookup(PROMPT.query(), deadline=soon())  # a page less
    await store.status(deadline=soon())
    await store.aclose()


async def refused(address: TcpAddress) -> None:
    """A wrong token."""
    try:
        await Connection.connect(address, ClientOptions(token="wrong"), "control")
    except InvalidRequest:
        return
    raise AssertionError("a wrong token was taken")


async def main(path: Path) -> None:
    store = TieredStore(MemoryTier(8 << 20))
    server = Server(store, token=TOKEN)
    await server.listen([parse_address("tcp://127.0.0.1:0")])
    (address,) = server.addresses
    assert isinstance(address, TcpAddress)
    recorder = Recorder(address.port)
    between = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    port = between.sockets[0].getsockname()[1]
    await talk(f"tcp://127.0.0.1:{port}")
    await refused(TcpAddress("127.0.0.1", port))
    await asyncio.sleep(0.2)  # what was said last
    between.close()
    await server.aclose()
    await store.aclose()
    path.write_text("".join(json.dumps(line) + "\n" for line in recorder.lines))
    print(f"{len(recorder.lines)} frames of {recorder._num} connections")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
