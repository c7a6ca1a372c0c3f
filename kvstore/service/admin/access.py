"""Who may ask for what: tokens and scopes, or without tokens this user's own processes on the loopback."""

from __future__ import annotations

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from kvstore.service.admin.dashboard_files import is_dashboard
from kvstore.service.admin.local_user import is_own_user
from kvstore.service.admin.problems import Refused
from kvstore.service.authentication import Credentials, FailureLimit, Grant, Scope

__all__ = ["OPEN_PATHS", "Access", "Administrator", "Operator", "OperatorAdministrator", "Reader", "is_open"]

OPEN_PATHS = frozenset({"/livez", "/readyz"})
"""Asked without a token, by whoever supervises the process; they tell nothing of what is stored."""


def is_open(path: str) -> bool:
    """Whether a path is answered to anybody: health, and the files of the dashboard."""
    return path in OPEN_PATHS or is_dashboard(path)


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="kvstore"'}
_TOKEN_CHARS_MAX = 4096


class Access:
    """Finds out who asks, before anything else of a request is looked at.

    Args:
        credentials: Whose token is good for what. `None`: there are no tokens; then the address is a loopback one, and
            processes of the service's own user, or root's, may do all.
        failures: How often one address may be wrong.
    """

    def __init__(self, credentials: Credentials | None, failures: FailureLimit | None = None) -> None:
        self._credentials = credentials
        self._failures = failures or FailureLimit()
        self._proven: set[str] = set()

    def admit(self, scope: AsgiScope) -> Grant:
        """What whoever sent a request may do.

        Raises:
            Refused: 401 without a token that is somebody's, 429 after too many wrong ones, 403 for other users'
                processes and for web pages.
        """
        if self._credentials is None:
            return _local_grant(scope)
        address = _host(scope.get("client"))
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        token = token.strip(" ")
        if kind.lower() != "bearer" or not token:
            raise Refused(401, "a token is needed", field="authorization", expected="Bearer TOKEN", headers=_CHALLENGE)
        grant = self._credentials.grant_of(token) if len(token) <= _TOKEN_CHARS_MAX else None
        wait_s = self._failures.wait_s(address)
        # a right guess is answered like a wrong one while the address waits; who was here before does not wait
        if wait_s and (grant is None or grant.name not in self._proven):
            raise Refused(429, "too many wrong tokens from this address", headers={"Retry-After": str(wait_s)})
        if grant is None:
            self._failures.failed(address)
            raise Refused(401, "the token is nobody's", field="authorization", headers=_CHALLENGE)
        self._proven.add(grant.name)
        return grant


def _local_grant(scope: AsgiScope) -> Grant:
    """Without tokens: the kernel tells whose process asks, and the headers whether a web page made it ask."""
    headers, client, server = Headers(scope=scope), scope.get("client"), scope.get("server")
    hint = "name a credentials_file to let others in"
    if not client or not server or not is_own_user(tuple(client), tuple(server)):
        raise Refused(403, f"without tokens only processes of the service's own user are served: {hint}")
    host = headers.get("host", "")
    if not _names_loopback(f"//{host}"):  # a name that leads here for a browser, and is another site's
        raise Refused(403, f"without tokens the host is a loopback address: {hint}", field="host", seen=host)
    origin = headers.get("origin")
    if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
        raise Refused(403, f"without tokens pages of other sites are refused: {hint}", field="origin", seen=origin)
    return Grant(None, frozenset(Scope), "the service's own user")


def _names_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(client: tuple[str, int] | None) -> str:
    return client[0] if client else ""


_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A token of `credentials_file`. Without that file there are none, and processes of the service's own "
    "user are served on the loopback.",
)


class _Needs:
    """A dependency: the grant of whoever asks, if it is good for a scope.

    Args:
        scope: What the route needs.
        is_operators: The route is about all tenants together.
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
            raise Refused(403, "this is about all tenants: it needs an operator's token", field="authorization")
        return grant


Reader = Annotated[Grant, Depends(_Needs(Scope.READ))]
Administrator = Annotated[Grant, Depends(_Needs(Scope.ADMIN))]
Operator = Annotated[Grant, Depends(_Needs(Scope.READ, is_operators=True))]
OperatorAdministrator = Annotated[Grant, Depends(_Needs(Scope.ADMIN, is_operators=True))]
