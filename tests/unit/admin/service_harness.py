"""A service with its administration interface, tenants with prompts in it, and clients: all real, in one process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvstore.api import Ack
from kvstore.compose import open_served_store
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.port import Administered, AdminPort, admin_port
from kvstore.service.authentication import CredentialsFile
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.wire.address import parse_address

__all__ = ["TOKENS", "ServiceHarness", "ended", "open_service", "prompt_of", "soon", "write_credentials"]

TOKENS = {
    "operator": ("*", "read, admin"),
    "watcher": ("*", "read"),
    "red": ("red", "read, admin"),
    "red reader": ("red", "read"),
    "blue": ("blue", "read, admin"),
    "blue engine": ("blue", "save"),
}
"""By name: tenant and scopes. The token of a name is `<name> token`."""


def soon() -> Deadline:
    return Deadline.after(60.0)


def write_credentials(path: Path, tokens: Mapping[str, tuple[str, str]] = TOKENS) -> Path:
    text = ""
    for name, (tenant, scopes) in tokens.items():
        digest = hashlib.sha256(f"{name} token".encode()).hexdigest()
        listed = ", ".join(f'"{scope}"' for scope in scopes.split(", "))
        text += f'[[credential]]\ntenant = "{tenant}"\ntoken_sha256 = "{digest}"\nscopes = [{listed}]\n'
    path.write_text(text)
    path.chmod(0o600)
    return path


@dataclass
class ServiceHarness:
    """What a test works with.

    Attributes:
        store: On the test's own loop, which is the data loop.
        server: The data port.
        port: The administration's.
        url: Of it.
        credentials: The file.
    """

    store: TieredStore | EncryptedStore
    server: Server
    port: AdminPort
    url: str
    credentials: Path | None

    def client(self, name: str | None = None, *, address: str = "127.0.0.1") -> httpx.AsyncClient:
        """With the token of that name, from an address of the loopback."""
        headers = {"Authorization": f"Bearer {name} token"} if name is not None else {}
        transport = httpx.AsyncHTTPTransport(verify=False, local_address=address)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120.0, transport=transport)

    @property
    def tiered(self) -> TieredStore:
        """The store itself, where keys stand before it."""
        return self.store.inner if isinstance(self.store, EncryptedStore) else self.store

    async def save(self, prompt: Prompt) -> Prompt:
        """All records of a prompt, at every tier."""
        await self.store.open_namespace(prompt.description, deadline=soon())
        await self.store.lookup(prompt.query(), deadline=soon())  # as an engine does: parents are learnt
        for record in prompt.records():
            await self.store.save(record, ack=Ack.COLD, deadline=soon())
        await self.settle()
        return prompt

    async def settle(self) -> None:
        """Wait until the tiers have, and the catalog knows of, whatever was saved."""
        assert await self.store.drain(soon()) == 0
        assert self.tiered._recorder is not None
        assert await self.tiered._recorder.drain(soon()) == 0


@asynccontextmanager
async def open_service(folder: Path, *, with_tokens: bool = True, **flags: object) -> AsyncIterator[ServiceHarness]:
    """A service over memory and a directory, or whatever the flags say, that listens on free ports."""
    path = write_credentials(folder / "credentials.toml") if with_tokens else None
    own = {"memory_bytes": "32MiB", "disk_bytes": "256MiB", "cold": f"file://{folder / 'records'}"}
    settings = load_settings({**own, "admin_listen": "127.0.0.1:0", "listen": f"unix:{folder / 'socket'}", **flags})
    credentials = CredentialsFile(path) if path is not None else None
    async with open_served_store(settings) as store:
        server = Server(store, credentials=credentials, tls=settings.tls())
        try:
            await server.listen([parse_address(str(settings.listen))])
            async with admin_port(Administered(settings, credentials, store, server)) as port:
                assert port is not None
                yield ServiceHarness(store, server, port, port.url, path)
        finally:
            await server.aclose()


def prompt_of(name: str, tenant: str = "red") -> Prompt:
    """A prompt of some pages and a tail."""
    return Prompt(ATTENTION, name, 64 * 5 + 16, tenant=tenant)


async def ended(client: httpx.AsyncClient, started: httpx.Response) -> dict[str, Any]:
    """A job when it has ended."""
    assert started.status_code == 202, started.text
    job: dict[str, Any] = started.json()
    while job["state"] == "running":
        await asyncio.sleep(0.01)
        job = (await client.get(f"/v1/jobs/{job['job']}")).json()
    return job
