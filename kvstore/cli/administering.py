"""Shared by the verbs that ask the administration interface: its address, the token, the errors."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer

from kvstore.cli.options import AsJson, Config, TokenFile, token_of
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.settings import TOKEN_VARIABLE, Settings, load_settings
from kvstore.wire.tls import ClientTls

__all__ = [
    "AdminClient",
    "AdminUrl",
    "AsJson",
    "Config",
    "NamespaceArgument",
    "Timeout",
    "TokenFile",
    "Yes",
    "administered",
    "administered_by",
]

AdminUrl: TypeAlias = Annotated[
    str,
    typer.Option(help="http://host:port of the administration; else as admin_listen says ($KVSTORE_ADMIN_LISTEN)."),
]
Timeout: TypeAlias = Annotated[float, typer.Option("--timeout", min=0.1, max=600, help="Seconds for each answer.")]
NamespaceArgument: TypeAlias = Annotated[str, typer.Argument(help="Its id, or a start of it.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", help="Do it; without, only show what would be done.")]

_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
_ANSWER_BYTES_MAX = 64 << 20


class AdminClient:
    """Asks one service's administration interface.

    Args:
        url: `http://host:port` or `https://host:port`.
        token: Sent with each request, unless empty.
        timeout_s: For each answer.
        tls: For an `https` address.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout_s = timeout_s
        # no proxy: those of the environment are meant for outside addresses
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=tls))

    def get(self, *path: str, **query: object) -> Any:
        """The answer of a route. Parts of the path are escaped; a query parameter that is `None` is left out.

        Raises:
            InvalidRequest: The call is wrong; the message names the field.
            Unavailable: Nothing answers, or the call is refused; the message names the next step.
        """
        return self.call("GET", *path, query=query)

    def call(
        self, method: str, *path: str, query: Mapping[str, object] | None = None, body: object | None = None
    ) -> Any:
        """Like `get`, with any method; a body is sent as JSON."""
        return json.loads(self._ask(method, "/v1/" + "/".join(map(_escaped, path)), query, body) or b"null")

    def text(self, path: str) -> str:
        """The answer of a route that is not JSON."""
        return self._ask("GET", path, None, None).decode(errors="replace")

    def _ask(self, method: str, path: str, query: Mapping[str, object] | None, body: object | None) -> bytes:
        given = {name: _spelled(value) for name, value in (query or {}).items() if value is not None}
        url = f"{self.url}{path}{'?' + urlencode(given) if given else ''}"
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        try:
            with self._opener.open(Request(url, data, headers, method=method), timeout=self._timeout_s) as answer:
                found: bytes = answer.read(_ANSWER_BYTES_MAX)
                return found
        except HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(_ANSWER_BYTES_MAX)) from None
        except (URLError, TimeoutError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if "WRONG_VERSION_NUMBER" in str(reason):
                raise Unavailable(f"what answers at {self.url} does not use TLS: write http:// instead") from error
            raise Unavailable(
                f"no administration interface answers at {self.url}: is `kvstore serve` running there, with this "
                "admin_listen? name another one with --admin-url or KVSTORE_ADMIN_LISTEN",
                reason=reason,
            ) from error


def _escaped(part: str) -> str:
    return quote(part, safe="")


def _spelled(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _refusal(status: int, content: bytes) -> InvalidRequest | Unavailable:
    """An HTTP error as one of ours, with the next step."""
    try:
        problem = json.loads(content)
        detail, field = str(problem["detail"]), problem.get("field")
    except (ValueError, KeyError, TypeError):
        return Unavailable(
            "this is not an administration interface of kvstore: name another --admin-url", status=status
        )
    if status == 401:
        return Unavailable(
            f"{detail}: name a file with a token of this service in --token-file or KVSTORE_TOKEN_FILE, or put the "
            f"token into {TOKEN_VARIABLE}"
        )
    if status == 403:
        return Unavailable(f"{detail}: use another token, see docs/admin.md")
    if status in (413, 422):
        told = {name: problem[name] for name in ("expected", "seen") if problem.get(name) is not None}
        return InvalidRequest(f"{field}: {detail}" if field else detail, **told)
    if status in (429, 503):
        return Unavailable(f"{detail}: try again in a moment")
    seen = {"seen": problem["seen"]} if problem.get("seen") is not None else {}
    return Unavailable(f"{detail}{': see the log of the service' if status == 500 else ''}", **seen)


@contextmanager
def administered(
    url: str, token_file: Path | None, timeout_s: float, config: Path | None = None
) -> Iterator[AdminClient]:
    """The interface at a url, or else at the `admin_listen` of the settings.

    Raises:
        InvalidRequest: The url or the token file is wrong, or the settings turn the interface off.
    """
    settings = load_settings({}, config=config)
    yield administered_by(settings, token_of(settings, token_file), timeout_s, url=url)


def administered_by(settings: Settings, token: str, timeout_s: float, *, url: str = "") -> AdminClient:
    """The interface at a url, or else at the `admin_listen` of these settings.

    Raises:
        InvalidRequest: The url is wrong, or the settings turn the interface off.
    """
    url = _checked(url) if url else _url_of(settings)
    tls = None
    if url.startswith("https:"):
        tls = ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file).context()
    return AdminClient(url, token, timeout_s=timeout_s, tls=tls)


def _checked(url: str) -> str:
    url = url.replace("tls://", "https://", 1).replace("tcp://", "http://", 1)  # as admin_listen spells it
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or parts.username is not None:
        raise InvalidRequest("expected http://host:port or https://host:port", field="admin-url", seen=repr(url))
    return f"{parts.scheme}://{parts.netloc}"


def _url_of(settings: Settings) -> str:
    address = settings.admin_listen
    if address is None:
        raise InvalidRequest("admin_listen is off: turn it on where the service runs, or name an --admin-url")
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{'https' if address.tls else 'http'}://{_ANY.get(address.host, host)}:{address.port}"
