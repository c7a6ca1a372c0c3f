"""The administration of an encrypted store: a prompt's token ids find its records, whichever key they are under."""

from __future__ import annotations

from pathlib import Path

import httpx

from kvstore.api import Ack
from kvstore.compose import open_served_store
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import Boundary, PlainChain, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.port import Administered, admin_port
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import tenant_key, write_keys
from kvstore.testing.prompts import ATTENTION, Prompt

PROMPT = Prompt(ATTENTION, "tokens", 64)
TOKENS = list(range(500, 500 + 64 * 3))


def soon() -> Deadline:
    return Deadline.after(60.0)


def sealed(boundary: Boundary, slice_: int) -> Record:
    kind, span = ATTENTION.groups[0].record_at(boundary.tokens, 64)
    key = RecordKey(PROMPT.namespace, boundary.prefix, 0, slice_)
    return seal(HeaderV1(key, kind, span, 0, 100, 0, bytes(16), created_ms=1), bytearray(HEADER_BYTES + 100))


async def test_a_lookup_finds_records_under_their_keyed_names(tmp_path: Path) -> None:
    """Two pages under an earlier key, one under the current: the prompt resumes at its end, and boundaries are told by
    the names that other routes know them by.
    """
    path = write_keys(tmp_path / "keys.toml", [("", 1, 1)])
    own = {"memory_bytes": "32MiB", "disk_bytes": "256MiB", "cold": f"file://{tmp_path / 'records'}"}
    listen = {"admin_listen": "127.0.0.1:0", "listen": f"unix:{tmp_path / 'socket'}", "encryption_keys": str(path)}
    settings = load_settings({**own, **listen})
    ends = [boundary for boundary in PlainChain().extend(TOKENS) if boundary.tokens % 64 == 0]
    async with open_served_store(settings) as store:
        assert isinstance(store, EncryptedStore)
        await store.open_namespace(PROMPT.description, deadline=soon())
        for number, boundary in enumerate(ends):
            if number == 2:
                write_keys(path, [("", 2, 2), ("", 1, 1)])
                assert not store._keys.poll() and store._keys.poll()
            for slice_ in range(2):
                await store.save(sealed(boundary, slice_), ack=Ack.COLD, deadline=soon())
        recorder = store.inner._recorder
        assert recorder is not None and await recorder.drain(soon()) == 0
        server = Server(store)
        async with admin_port(Administered(settings, None, store, server)) as port:
            assert port is not None
            async with httpx.AsyncClient(base_url=f"http://{port.address}", timeout=60.0) as client:
                body = {"namespace": PROMPT.namespace.hex(), "token_ids": TOKENS}
                found = (await client.post("/v1/lookup", json=body)).json()
                names = [tenant_key(1 + (number == 2)).name_of(end.prefix).hex() for number, end in enumerate(ends)]
                assert found["resume_tokens"] == 192
                assert [one["prefix"] for one in found["boundaries"]] == names
                assert found["boundaries"][0]["tiers"] == ["memory", "filesystem"]
                shown = await client.get(f"/v1/prefixes/{PROMPT.namespace.hex()}/{names[2]}")
                assert shown.json()["tokens"] == 192
                metrics = (await client.get("/metrics")).text
        assert "kvstore_encrypted_records_total 6" in metrics
        await server.aclose()
