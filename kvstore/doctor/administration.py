"""The administration interface: whether it answers where the settings say, and its certificate is trusted."""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import ssl

from kvstore.doctor.finding import Finding, ok, skipped, warning
from kvstore.errors import InvalidRequest
from kvstore.runtime.deadline import Deadline
from kvstore.wire.address import TcpAddress
from kvstore.wire.tls import ClientTls

__all__ = ["CERTIFICATE_FIX", "administration_finding", "judge_administration"]

CERTIFICATE_FIX = (
    "set tls_ca_file (KVSTORE_TLS_CA_FILE) to the authority of its certificate, and use a host name that the "
    "certificate contains; if the service requires a client certificate, set tls_certificate_file"
)
_NAME = "service.admin"
_SECONDS_MIN = 0.1


async def administration_finding(address: TcpAddress | None, tls: ClientTls, deadline: Deadline) -> Finding:
    """Ask it for `/livez`. A service works without it, so a problem is a warning.

    Args:
        address: Where it listens; `None`: nowhere, or the settings here do not say.
        tls: Trusted authorities and our certificate for a `tls://` address.
        deadline: When to stop waiting for the answer.
    """
    if address is None:
        return skipped(_NAME, "admin_listen is off, or not known here")
    seconds = max(_SECONDS_MIN, deadline.remaining_s)
    try:
        status = await asyncio.to_thread(_ask, address, tls, seconds)
    except (OSError, http.client.HTTPException, InvalidRequest) as error:
        return judge_administration(address, str(error) or type(error).__name__)
    return judge_administration(address, status)


def judge_administration(address: TcpAddress, seen: int | str) -> Finding:
    """Judge the answer of `/livez`: its status, or the reason why there is none."""
    url = f"http{'s' if address.tls else ''}://{str(address).partition('://')[2]}"
    expected = f"it answers at {url}"
    if seen == http.HTTPStatus.OK:
        return ok(_NAME, f"answers at {url}", expected)
    if isinstance(seen, int):
        return warning(_NAME, f"another program answers at {url}: {seen}", expected, "give admin_listen a free port")
    if "certificate" in seen or "tls_" in seen:
        return warning(_NAME, seen, expected, CERTIFICATE_FIX)
    if address.tls and "SSL" in seen:
        fix = "restart the service: it listens there without TLS, or another program listens there"
        return warning(_NAME, seen, expected, fix)
    if not address.tls and "TLS" in seen:
        return warning(_NAME, seen, expected, "set admin_listen to tls://host:port here too, or restart the service")
    fix = "see the service's log for `no administration interface`: a port in use, or pip install 'kvstore-vllm[admin]'"
    return warning(_NAME, seen, expected, fix)


def _ask(address: TcpAddress, tls: ClientTls, seconds: float) -> int:
    """The status of `/livez`, which needs no token."""
    host, is_any = _reachable(address.host)
    if address.tls:
        context = tls.context()
        if is_any:  # its certificate has the name that others use, not the loopback address that is used here
            context.check_hostname = False
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, address.port, timeout=seconds, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, address.port, timeout=seconds)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status
    except ssl.SSLCertVerificationError as error:
        raise OSError(f"its certificate is not trusted: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise OSError(f"SSL: {error.reason or error}") from error
    except (ConnectionResetError, http.client.RemoteDisconnected) as error:
        hint = ": it may require a client certificate" if address.tls else ": it may speak TLS"
        raise OSError(f"it closed the connection before it answered{hint}") from error
    finally:
        connection.close()


def _reachable(host: str) -> tuple[str, bool]:
    """The host to connect to for a listening address, and whether that address means all interfaces."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host, False
    if not address.is_unspecified:
        return host, False
    return ("::1" if address.version == 6 else "127.0.0.1"), True
