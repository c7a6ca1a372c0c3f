"""Trusts an endpoint only if its certificate is signed by an authority and contains the endpoint's host name.

aiobotocore 2.25 does not check the host name: botocore leaves that to urllib3, which aiobotocore does not use. Behind a
proxy it checks no certificate at all. So a server with any certificate of a trusted authority could pose as S3.
`require_host_names` corrects this for every connection that the library opens in this process: those of our client,
and those of the clients that the library makes to fetch credentials. aiobotocore 3.10 checks by itself.
"""

from __future__ import annotations

import inspect
import ssl
from importlib.metadata import version
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import TCPConnector
from botocore.httpsession import get_cert_path

from kvstore.errors import InvalidRequest


def endpoint_tls(verify: bool | str) -> ssl.SSLContext:
    """The TLS context that checks an endpoint.

    Args:
        verify: A file of authorities. True: those that come with botocore.

    Raises:
        OSError: The file cannot be read; `ssl.SSLError` is one too.
    """
    return ssl.create_default_context(cafile=get_cert_path(verify or True))


def require_host_names() -> None:
    """Make each connection that aiobotocore opens from now on check the certificate and its host name. Idempotent.

    Raises:
        InvalidRequest: The installed release opens its connections in another way than 2.25.
    """
    opens = getattr(AIOHTTPSession, "_create_connector", None)
    if opens is _create_connector:
        return
    if opens is None or inspect.iscoroutinefunction(opens) or [*inspect.signature(opens).parameters] != _PARAMETERS:
        raise InvalidRequest(
            "this release of aiobotocore may not check the host name of S3: install aioboto3 15.5",
            expected="aiobotocore 2.25",
            seen=version("aiobotocore"),
        )
    AIOHTTPSession._create_connector = _create_connector


def _create_connector(self: Any, proxy_url: str | None) -> TCPConnector:
    """As the library's, but with a context that checks host names, also behind a proxy."""
    tls = endpoint_tls(self._verify)
    if self._cert_file:
        tls.load_cert_chain(self._cert_file, self._key_file)
    return TCPConnector(limit=self._max_pool_connections, ssl=tls, **self._connector_args)


_PARAMETERS = [*inspect.signature(_create_connector).parameters]
