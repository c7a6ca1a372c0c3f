"""Who may send which request: tokens and scopes, or without tokens the processes of the service's own user."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from kvstore.runtime.watched_file import Watched
from kvstore.service.admin.port import is_loopback
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Credentials, FailureLimit, Grant, Scope

HEALTH_PATHS = frozenset({"/livez", "/readyz"})
"""For the supervisor of the process: they need no token and reveal nothing of what is stored."""


def is_open(path: str) -> bool:
    """Whether a path needs no token: health, and the files of the dashboard."""
    return path in HEALTH_PATHS or path == "/" or path.startswith("/dashboard/")


def check_tenant(grant: Grant, tenant_id: str | None) -> None:
    """Refuse a token of another tenant than the named one, whether or not that exists.

    Raises:
        Refused: 403.
    """
    if tenant_id is not None and not grant.sees(tenant_id):
        raise Refused(403, "the token is another tenant's", field="body.tenant_id")


PEER = "peer"
"""Key in `scope["state"]` of a dict that all requests of a connection share: `is_own_user`, once it was looked up."""

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="kvstore"'}
_TOKEN_CHARS_MAX = 4096


class Access:
    """Finds the grant of a request before anything else of it is read.

    Without credentials there are no tokens: the port listens on a loopback address, and processes of the service's own
    user and of root may do everything.
    """

    def __init__(self, credentials: Watched[Credentials] | None) -> None:
        self._credentials = credentials
        self._failures = FailureLimit()

    def admit(self, scope: AsgiScope) -> Grant:
        """The grant of a request.

        Raises:
            Refused: 401 without a valid token, 429 after too many wrong ones. Without credentials: 403 for processes of
                other users and for web pages.
        """
        if self._credentials is None:
            return _local_grant(scope)
        address = scope["client"][0] if scope.get("client") else ""
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        token = token.strip(" ")
        if kind.lower() != "bearer" or not token:
            raise Refused(401, "a token is needed", field="authorization", expected="Bearer TOKEN", headers=_CHALLENGE)
        grant = self._credentials.value.grant_of(token) if len(token) <= _TOKEN_CHARS_MAX else None
        if grant is not None:  # also while the address waits: see `FailureLimit`
            return grant
        if wait_s := self._failures.wait_s(address):
            raise Refused(429, "too many wrong tokens from this address", headers={"Retry-After": str(wait_s)})
        self._failures.failed(address)
        raise Refused(401, "the token is not valid", field="authorization", headers=_CHALLENGE)


def _local_grant(scope: AsgiScope) -> Grant:
    """Check the user of the peer's process, and the headers that a browser sends when a web page makes a request."""
    headers, client, server = Headers(scope=scope), scope.get("client"), scope.get("server")
    hint = "set credentials_file to admit others"
    of_connection = scope.get("state", {}).get(PEER, {})  # the kernel's tables are long, and a connection's ends stay
    if not of_connection.get("is_own_user") and client and server:
        of_connection["is_own_user"] = is_own_user(tuple(client), tuple(server))
    if not of_connection.get("is_own_user"):
        raise Refused(403, f"without tokens only processes of the service's own user are served: {hint}")
    host = headers.get("host", "")
    if not _names_loopback(f"//{host}"):  # another site's name can resolve to this address in a browser
        raise Refused(403, f"without tokens the host must be a loopback address: {hint}", field="host", seen=host)
    origin = headers.get("origin")
    if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
        raise Refused(403, f"without tokens pages of other sites are refused: {hint}", field="origin", seen=origin)
    return Grant(None, frozenset(Scope), "the service's own user")


def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


_ESTABLISHED = "01"
_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ROOT = 0


def is_own_user(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    """Whether the process that connected from `peer` to `own`, both on the loopback, belongs to our user or to root.

    Such a process gains nothing here: it can already end this process, read its files and use its Unix socket. False
    also where the kernel does not tell.
    """
    for table in _TCP_TABLES:
        try:
            with table.open() as lines:
                user = user_in_table(lines, peer, own)
        except OSError:
            continue
        if user is not None:
            return user in (_ROOT, os.geteuid())
    return False


def user_in_table(lines: Iterable[str], peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """The user of the peer's end in a connection table of the kernel; `None`: the table does not have it.

    Only an established connection with an inode counts: the kernel shows a closed one as owned by root.
    """
    local, remote = _spellings(*peer), _spellings(*own)
    for line in lines:
        fields = line.split(maxsplit=10)
        if len(fields) > 9 and fields[1] in local and fields[2] in remote:
            return int(fields[7]) if fields[3] == _ESTABLISHED and fields[9] != "0" else None
    return None


def _spellings(host: str, port: int) -> set[str]:
    """How the tables write an address: 32-bit words in the machine's byte order; IPv4 also as mapped to IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    forms = [address.packed]
    if isinstance(address, ipaddress.IPv4Address):
        forms.append(bytes(10) + b"\xff\xff" + address.packed)
    return {"".join(f"{word:08X}" for word in struct.unpack(f"={len(f) // 4}I", f)) + f":{port:04X}" for f in forms}


_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A token of `credentials_file`. Without that file no token is needed: processes of the service's own "
    "user are served on the loopback.",
)


class _Needs:
    """A dependency that returns the grant of a request if it has the scope that the route needs, and is an operator's
    if the route concerns all tenants.
    """

    def __init__(self, scope: Scope, *, is_operators: bool = False) -> None:
        self._scope = scope
        self._is_operators = is_operators

    async def __call__(
        self, request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)] = None
    ) -> Grant:
        grant = request.state.grant
        assert isinstance(grant, Grant)
        if self._scope not in grant.scopes:
            needed = self._scope.value
            raise Refused(403, f"the token lacks the scope {needed}", field="authorization", expected=needed)
        if self._is_operators and grant.tenant is not None:
            raise Refused(403, "this concerns all tenants: it needs an operator's token", field="authorization")
        return grant


Reader = Annotated[Grant, Depends(_Needs(Scope.READ))]
Saver = Annotated[Grant, Depends(_Needs(Scope.SAVE))]
Administrator = Annotated[Grant, Depends(_Needs(Scope.ADMIN))]
Operator = Annotated[Grant, Depends(_Needs(Scope.READ, is_operators=True))]
OperatorAdministrator = Annotated[Grant, Depends(_Needs(Scope.ADMIN, is_operators=True))]
