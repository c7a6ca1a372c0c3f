"""A service with its administration interface, and clients with tokens: all real, in one process."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvstore.api import Ack, PrefixQuery
from kvstore.catalog.base import Catalog
from kvstore.compose import open_served_store
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import seal
from kvstore.model.keys import Boundary, RecordKey
from kvstore.service.admin.port import Administered, AdminPort, admin_port
from kvstore.service.authentication import watch_credentials
from kvstore.service.server import Server
from kvstore.settings import load_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.wire.address import parse_address

__all__ = ["TOKENS", "ServiceHarness", "ended", "open_service", "prompt_of", "write_credentials"]

TOKENS = {
    "operator": ("*", "read, admin"),
    "watcher": ("*", "read"),
    "red": ("red", "read, save, admin"),
    "red reader": ("red", "read"),
    "blue": ("blue", "read, save, admin"),
    "blue engine": ("blue", "save"),
}
"""By name: tenant and scopes. The token of a name is `<name> token`."""


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
    """A running service with its administration.

    Attributes:
        service: Its store is on the test's own loop, which is the data loop.
        port: The administration's.
        url: Of the administration, also after its end.
        credentials: The file.
    """

    service: Administered
    port: AdminPort
    url: str
    credentials: Path | None

    @property
    def store(self) -> TieredStore | EncryptedStore:
        return self.service.store

    @property
    def server(self) -> Server:
        """The data port."""
        return self.service.server

    @property
    def catalog(self) -> Catalog:
        """The catalog that the store writes."""
        return self._recorder.catalog

    @property
    def _recorder(self) -> Recorder:
        tiered = self.store.inner if isinstance(self.store, EncryptedStore) else self.store
        assert tiered.recorder is not None
        return tiered.recorder

    def client(self, name: str | None = None, *, address: str = "127.0.0.1") -> httpx.AsyncClient:
        """With the token of that name, from an address of the loopback."""
        headers = {"Authorization": f"Bearer {name} token"} if name is not None else {}
        transport = httpx.AsyncHTTPTransport(verify=False, local_address=address)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120.0, transport=transport)

    async def save(self, prompt: Prompt) -> Prompt:
        """All records of a prompt, at every tier."""
        await self.store.open_namespace(prompt.description, deadline=soon())
        await self.store.lookup(prompt.query(), deadline=soon())  # as an engine does: the catalog learns parents
        for record in prompt.records():
            await self.store.save(record, ack=Ack.COLD, deadline=soon())
        await self.settle()
        return prompt

    async def save_pages(
        self, prompt: Prompt, boundaries: Sequence[Boundary], *, skip: int = 0, without: RecordKey | None = None
    ) -> list[Boundary]:
        """Records at the ends of pages, in the namespace of a prompt, under the hashes of real token ids.

        Args:
            prompt: Its namespace; `Prompt` itself invents hashes.
            boundaries: Of the token ids.
            skip: Pages at the start that are not saved.
            without: A record that is not saved.
        """
        namespace, last = prompt.namespace, boundaries[-1].tokens
        query = PrefixQuery(namespace, tuple(boundaries), local_tokens=0, cap_tokens=last, step_tokens=16)
        await self.store.open_namespace(prompt.description, deadline=soon())
        await self.store.lookup(query, deadline=soon())
        pages = [boundary for boundary in boundaries if boundary.tokens % 64 == 0]
        for boundary in pages[skip:]:
            for group, layout in enumerate(prompt.layout.groups):
                kind, span = layout.record_at(boundary.tokens, 64)
                for slice_ in range(layout.num_slices):
                    key = RecordKey(namespace, boundary.prefix, group, slice_)
                    if key != without:
                        header = HeaderV1.unsealed(
                            key, kind, span, codec_chain=0, decoded_bytes=100, created_ms=1_700_000_000_000
                        )
                        record = seal(header, bytearray(HEADER_BYTES + 100))
                        await self.store.save(record, ack=Ack.COLD, deadline=soon())
        await self.settle()
        return pages

    async def settle(self) -> None:
        """Wait until the tiers and the catalog have everything that was saved."""
        assert await self.store.drain(soon()) == 0
        assert await self._recorder.drain(soon()) == 0


@asynccontextmanager
async def open_service(folder: Path, *, with_tokens: bool = True, **flags: object) -> AsyncIterator[ServiceHarness]:
    """A service over memory and a directory, or whatever the flags say, that listens on free ports."""
    path = write_credentials(folder / "credentials.toml") if with_tokens else None
    own = {"memory_bytes": "32MiB", "disk_bytes": "256MiB", "cold": f"file://{folder / 'records'}"}
    settings = load_settings({**own, "admin_listen": "127.0.0.1:0", "listen": f"unix:{folder / 'socket'}", **flags})
    credentials = watch_credentials(path) if path is not None else None
    async with open_served_store(settings) as store:
        server = Server(store, credentials=credentials, tls=settings.tls())
        try:
            await server.listen([parse_address(str(settings.listen))])
            service = Administered(settings, credentials, store, server)
            async with admin_port(service) as port:
                assert port is not None
                yield ServiceHarness(service, port, port.url, path)
        finally:
            await server.aclose()


def prompt_of(name: str, tenant: str = "red") -> Prompt:
    """A prompt of some pages and a tail."""
    return Prompt(ATTENTION, name, 64 * 5 + 16, tenant=tenant)


async def ended(client: httpx.AsyncClient, started: httpx.Response) -> dict[str, Any]:
    """A job when it has ended."""
    assert started.status_code == 202, started.text
    route = f"/v1/jobs/{started.json()['job']}"
    answer = await until(lambda: client.get(route), holds=lambda answer: answer.json()["state"] != "running")
    job: dict[str, Any] = answer.json()
    return job
