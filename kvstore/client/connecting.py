"""From a `url` to a store."""

from __future__ import annotations

import os
from dataclasses import replace

from kvstore.client.embedded import EmbeddedOptions, EmbeddedService
from kvstore.client.options import ClientOptions
from kvstore.client.remote import RemoteStore
from kvstore.wire.address import Address, TcpAddress, parse_address

__all__ = ["EMBEDDED", "EmbeddedOptions", "connect"]

EMBEDDED = "embedded:"


def connect(
    url: str,
    *,
    token: str | None = None,
    options: ClientOptions | None = None,
    embedded: EmbeddedOptions | None = None,
) -> RemoteStore:
    """A store at `url`. Neither blocks nor fails when there is no service; the store's calls do, until there is one.

    Args:
        url: `unix:/path`, `tcp://host:port`, `tls://host:port`, or `embedded:` for a private service that is started
            when needed.
        token: The content of the service's `token_file`, if it has one.
        options: Times and counts.
        embedded: Directory and sizes of the private service.

    Raises:
        InvalidRequest: `url` is none of these, or a file of `options.tls` cannot be used.
    """
    options = options or ClientOptions()
    options = replace(options, token=token or options.token, name=options.name or f"pid {os.getpid()}")
    if url == EMBEDDED:
        return RemoteStore(EmbeddedService(embedded or EmbeddedOptions()).ensure, url, options)
    address = parse_address(url)
    if isinstance(address, TcpAddress) and address.tls:
        options.tls.context()  # so that unusable files are reported now, not at every attempt to connect

    async def locate() -> Address:
        return address

    return RemoteStore(locate, url, options)
