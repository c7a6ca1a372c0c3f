"""The client of a store service: `connect` for an event loop, `BlockingStore` for plain threads. See README.md."""

from __future__ import annotations

from kvstore.client.blocking import BlockingStore
from kvstore.client.connection import ClientOptions
from kvstore.client.embedded import EmbeddedOptions
from kvstore.client.page_arguments import PageKey
from kvstore.client.pages import PageDoor, describe_pages
from kvstore.client.plans import Plan, PlanClient
from kvstore.client.remote import RemoteStore, connect
from kvstore.runtime.tracing import trace_parent
from kvstore.wire.address import Address, TcpAddress, UnixAddress, parse_address
from kvstore.wire.tls import ClientTls

__all__ = [
    "Address",
    "BlockingStore",
    "ClientOptions",
    "ClientTls",
    "EmbeddedOptions",
    "PageDoor",
    "PageKey",
    "Plan",
    "PlanClient",
    "RemoteStore",
    "TcpAddress",
    "UnixAddress",
    "connect",
    "describe_pages",
    "parse_address",
    "trace_parent",
]
