"""The administration interface, for the verbs that use it: flags, requests, errors, and jobs that a verb waits for."""

from __future__ import annotations

import inspect
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from http.client import HTTPException, RemoteDisconnected
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer

from kvstore.cli.options import AsJson, Config, TokenFile, tls_of, token_of
from kvstore.cli.printing import bytes_text, progress_bar
from kvstore.doctor.unreachable import CERTIFICATE_FIX
from kvstore.errors import InvalidRequest, Unavailable, next_step
from kvstore.settings import TOKEN_VARIABLE, Settings, load_settings
from kvstore.wire.address import parse_admin_url

Report = TypeVar("Report")

AdminUrl: TypeAlias = Annotated[
    str,
    typer.Option(help="Administration interface, http://host:port. Default: admin_listen ($KVSTORE_ADMIN_LISTEN)."),
]
Timeout: TypeAlias = Annotated[float, typer.Option("--timeout", min=0.1, max=600, help="Seconds for each answer.")]
NamespaceArgument: TypeAlias = Annotated[str, typer.Argument(help="The id of a namespace, or its first digits.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", help="Do it. Without this flag: show what would be done.")]

ONLY_OWN = "a tenant's token shows only what is that tenant's, an operator's token shows all"
"""Added to the text that a list is empty."""

INCOMPLETE = "The catalog may lack records that are stored: a service adds them, and so does `kvstore reindex`"
"""Printed after a list of namespaces, where it applies."""

ALIVE_S = 5.0
"""A service that gives no answer at all for so long is taken for frozen."""

_ANSWER_BYTES_MAX, _ALIVE_BYTES_MAX = 64 << 20, 1024
_POLL_S_MIN, _POLL_S_MAX = 0.02, 0.5
_DURATION = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LISTED_MAX = 1000
_FROZEN = "it is frozen or very busy; check its process and its log, and do not start a second one beside it"
_EMBEDDED_HAS_NONE = "a service of `embedded:` has none"


class AdminClient:
    """Sends requests to the administration interface of one service.

    Args:
        url: `http://host:port` or `https://host:port`.
        token: Sent with each request, unless empty.
        timeout_s: For each answer.
        found: How the address was found, like `given as --admin-url`.
        tls: For an `https` address.

    Attributes:
        note: A line to print on standard error with the first answer.
    """

    def __init__(
        self, url: str, token: str, *, timeout_s: float, found: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self.url = url
        self.found = found
        self.note = ""
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout_s = timeout_s
        self._is_alive = False
        # no proxy: those of the environment are for other networks
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
        route = "/v1/" + "/".join(quote(part, safe="") for part in path)
        return json.loads(self._send(method, route, query, body) or b"null")

    def text(self, path: str) -> str:
        """The answer of a route that is not JSON."""
        return self._send("GET", path, None, None).decode(errors="replace")

    def _send(self, method: str, path: str, query: Mapping[str, object] | None, body: object | None) -> bytes:
        given = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in (query or {}).items()
            if value is not None
        }
        url = f"{self.url}{path}{'?' + urlencode(given) if given else ''}"
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        try:
            self._check_alive()
            with self._opener.open(Request(url, data, headers, method=method), timeout=self._timeout_s) as answer:
                found: bytes = answer.read(_ANSWER_BYTES_MAX)
                if self.note:
                    typer.echo(self.note, err=True)
                    self.note = ""
                return found
        except HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(_ANSWER_BYTES_MAX)) from None
        except (URLError, TimeoutError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            reason = getattr(reason, "strerror", None) or reason
            if "WRONG_VERSION_NUMBER" in str(reason):
                raise Unavailable(f"{self.url} does not use TLS: write http:// instead of https://") from error
            where = f"{self.url}, {self.found}" if self.found else self.url
            if "CERTIFICATE_VERIFY_FAILED" in str(reason):
                raise Unavailable(
                    f"the certificate of {where} is not believed ({reason}): {CERTIFICATE_FIX}"
                ) from error
            if isinstance(reason, TimeoutError) or "timed out" in str(reason):
                step = "it is very busy, wait longer with --timeout" if self._is_alive else _FROZEN
                raise Unavailable(f"the service at {where} does not answer in time: {step}") from error
            step = "check that `kvstore serve` runs there with this admin_listen"
            if isinstance(error, RemoteDisconnected):  # so does a TLS port
                step += ", write https:// if that is at tls://"
            else:
                step += f", and its log for why it has none ({_EMBEDDED_HAS_NONE})"
            raise Unavailable(
                f"no administration interface answers at {where} ({reason}): {step}, "
                "or name another address with --admin-url or KVSTORE_ADMIN_LISTEN"
            ) from error

    def _check_alive(self) -> None:
        """Once, wait a short time for any answer: a frozen service is known then, however long an answer may take. So
        is another program that answers everything.
        """
        if self._is_alive:
            return
        try:
            with self._opener.open(f"{self.url}/livez", timeout=min(self._timeout_s, ALIVE_S)) as answer:
                if b'"alive"' not in answer.read(_ALIVE_BYTES_MAX):
                    raise _of_another_program(answer.status)
        except HTTPError as error:  # its event loop is busy, or it is another program: the request itself shows that
            error.close()
        self._is_alive = True


TYPED = {
    "namespace": ("NAMESPACE", "`kvstore ls` lists namespaces"),
    "prefix": ("PREFIX", "`kvstore ls NAMESPACE` lists boundaries"),
    "weights_id": ("WEIGHTS_ID", "`kvstore weights list` lists them"),
    "job": ("JOB", "`kvstore jobs` lists them"),
    "tenant": ("TENANT", "`kvstore quota` lists quotas"),
    "level": ("TIER", ""),
    "cursor": ("--cursor", "use the one that the previous page ended with, or none"),
    "limit": ("--limit", ""),
    "order": ("--order", ""),
    "maximum_bytes": ("--maximum", ""),
    "guaranteed_bytes": ("--guaranteed", ""),
    "expires_in_s": ("--for", ""),
    "token_ids": ("--token-ids", ""),
    "cache_salt": ("--salt-file", ""),
    "unused_s": ("--unused", ""),
    "bytes_per_s": ("--rate", ""),
}
"""Fields of the interface: how each is typed on the command line, and where right values are found."""


def _duration_text(seconds: int) -> str:
    """What `parse_duration` reads."""
    return next(f"{seconds // one}{unit}" for unit, one in reversed(_DURATION.items()) if seconds % one == 0)


_UNITS: Mapping[str, Callable[[int], str]] = {
    **dict.fromkeys(("maximum_bytes", "guaranteed_bytes", "bytes_per_s"), bytes_text),
    **dict.fromkeys(("expires_in_s", "unused_s"), _duration_text),
}
"""Fields of the interface that are numbers there, and are typed with a unit."""

_STEPS = {
    401: "name a file with a token of this service in --token-file or KVSTORE_TOKEN_FILE, or put the token into "
    f"{TOKEN_VARIABLE}",
    403: "use another token, see docs/admin.md",
    429: "try again in a moment",
    503: "run `kvstore doctor`, which says what does not answer",
}
"""The next step by the status, where the answer names none."""


def _of_another_program(status: int) -> Unavailable:
    return Unavailable(
        f"this is not an administration interface of kvstore (it answered HTTP {status}): name another --admin-url"
    )


def _refusal(status: int, content: bytes) -> InvalidRequest | Unavailable:
    """An HTTP error as one of ours: the field as it is typed here, and one next step."""
    try:
        problem = json.loads(content)
        detail, field = str(problem["detail"]), str(problem.get("field") or "")
    except (ValueError, KeyError, TypeError):
        return _of_another_program(status)
    place, _, rest = field.partition(".")
    name, _, item = (rest if place in ("body", "path", "query") else field).partition(".")
    typed, step = TYPED.get(name, ("" if name == "authorization" else name, ""))
    cause, own_step = next_step(detail)
    step = own_step or _STEPS.get(status, step)
    if typed:
        cause = f"{typed}{f', entry {int(item) + 1}' if item.isdecimal() else ''}: {cause}"
    expected, seen = str(problem.get("expected") or ""), problem.get("seen")
    if expected and expected not in detail:
        cause += f", expected {expected}"
    if seen is not None:
        cause += f", got {seen or 'nothing'}"
    if name in _UNITS:  # as they were typed
        cause = re.sub(r"\b\d+\b", lambda number: _UNITS[name](int(number[0])), cause)
    text = f"{cause}: {step}" if step else cause
    return InvalidRequest(text) if status in (413, 422) else Unavailable(text)


def admin_client(settings: Settings, token: str, timeout_s: float, *, url: str = "") -> AdminClient:
    """A client for the port at `url`; if that is empty, for `admin_listen` of these settings.

    Raises:
        InvalidRequest: The url is wrong, or the settings turn the port off.
    """
    given = "as --admin-url" if url else settings.given("admin_listen")
    url = _checked(url) if url else _url_of(settings)
    tls = tls_of(settings).context() if url.startswith("https:") else None
    found = f"given {given}" if given else "the default of admin_listen"
    return AdminClient(url, token, found=found, timeout_s=timeout_s, tls=tls)


def _checked(url: str) -> str:
    spelled = url.replace("tls://", "https://", 1).replace("tcp://", "http://", 1)  # as admin_listen spells it
    try:
        return parse_admin_url(spelled if "://" in spelled else f"http://{spelled}").geturl()
    except InvalidRequest as error:
        raise InvalidRequest(f"--admin-url: {error.message}", seen=repr(url)) from error


def _url_of(settings: Settings) -> str:
    address = settings.admin_listen
    if address is None:
        raise InvalidRequest(
            f"admin_listen is off: turn it on where the service runs ({_EMBEDDED_HAS_NONE}), or name an --admin-url"
        )
    return address.reachable.http_url


def admin_verb(default_timeout_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb of a function whose first two parameters are an `AdminClient` and whether to print JSON.

    The verb has the function's other parameters and the flags --admin-url, --token-file, --config, --timeout and
    --json. It raises `InvalidRequest` for a wrong url, token file or settings file.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def verb(
            *,
            admin_url: AdminUrl = "",
            token_file: TokenFile = None,
            config: Config = None,
            timeout_s: Timeout = default_timeout_s,
            json_: AsJson = False,
            **own: Any,
        ) -> None:
            settings = load_settings({}, config=config)
            token = token_of(settings, token_file)
            client = admin_client(settings, token, timeout_s, url=admin_url)
            if not json_ and not admin_url and not settings.given("admin_listen"):
                client.note = f"service: {client.url}, {client.found}; name another with --admin-url"
            function(client, json_, **own)

        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[2:]
        flags = list(inspect.signature(verb, eval_str=True).parameters.values())[:-1]
        parameters = [*(parameter.replace(annotation=hints[parameter.name]) for parameter in own), *flags]
        keyword = inspect.Parameter.KEYWORD_ONLY
        verb.__signature__ = inspect.Signature([one.replace(kind=keyword) for one in parameters])  # type: ignore[attr-defined]
        verb.__annotations__ = {}  # typer prefers these to the signature's
        verb.__name__, verb.__doc__ = function.__name__, function.__doc__
        return verb

    return decorate


def report_of(kind: Callable[..., Report], values: Mapping[str, Any]) -> Report:
    """A job's report as `kind`, a dataclass; what a service of another release tells beside its fields is left out."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in known if name in values})


def run_job(
    client: AdminClient, route: str, *, query: Mapping[str, object], body: object | None = None, quiet: bool
) -> Mapping[str, Any]:
    """Start a job of the service, show its progress, and return it when it is done.

    Args:
        client: The service.
        route: The route that starts the job, like `tiers/cold/verify`.
        query: Query of that call.
        body: Body of that call.
        quiet: Show no bar.

    Raises:
        Unavailable: The job failed, or another client cancelled it.
        KeyboardInterrupt: Ctrl-C; the job was cancelled, and its progress is printed.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"))
    bars = progress_bar(*columns, TimeElapsedColumn(), quiet=quiet)
    job: Mapping[str, Any] | None = None
    try:
        job = started = client.call("POST", *route.split("/"), query=query, body=body)
        with bars:
            bar = bars.add_task(str(started["kind"]), total=None, unit=started["progress"]["unit"])
            pause_s = _POLL_S_MIN
            while job["state"] == "running":
                time.sleep(pause_s)
                pause_s = min(_POLL_S_MAX, 1.5 * pause_s)
                job = client.get("jobs", job["job"])
                progress = job["progress"]
                bars.update(bar, completed=progress["done"], total=progress["total"], unit=progress["unit"])
    except KeyboardInterrupt:
        if job is None:
            typer.echo("interrupted before the service answered; `kvstore jobs` shows whether the job runs", err=True)
            raise
        ended = client.call("DELETE", "jobs", job["job"])
        progress = ended["progress"]
        state = "cancelled" if ended["state"] == "cancelled" else f"had already ended ({ended['state']})"
        typer.echo(f"job {job['job']} {state}, after {progress['done']:,} {progress['unit']}", err=True)
        raise
    except Unavailable as error:
        if job is None:
            raise
        later = f"`kvstore jobs {job['job']}` shows later how far the job is, or how to start it again"
        raise Unavailable(f"{error.message}; {later}", **error.details) from error
    if job["state"] != "done":
        why, step = next_step(str(job["error"] or "another client cancelled it"))
        again = f"{step}, then run the command again" if step else "run the command again to continue"
        raise Unavailable(f"job {job['job']} {job['state']} ({why}): {again}")
    return job


def parse_duration(text: str, flag: str) -> int:
    """Seconds, from text like `90s`, `12h`, `7d` that was given with a flag.

    Raises:
        InvalidRequest: It is not a duration.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,8})\s*([smhdw])\s*", text)
    if match is None:
        raise InvalidRequest(f"{flag}: expected a time with its unit, like 90s, 15m, 12h, 7d or 2w, got {text!r}")
    return int(match[1]) * _DURATION[match[2]]


def whole_namespace(client: AdminClient, text: str, typed: str = "NAMESPACE") -> str:
    """The id of a namespace, from its id or its first digits.

    Args:
        typed: What it was given as.

    Raises:
        InvalidRequest: No namespace, or more than one, matches.
    """
    if re.fullmatch("[0-9a-f]{32}", text):
        return text
    if not re.fullmatch("[0-9a-f]{1,31}", text):
        raise InvalidRequest(
            f"{typed}: expected 32 hex digits in lower case, or the first of them, got {text!r}: `kvstore ls` lists "
            "namespaces"
        )
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = client.get("namespaces", limit=_LISTED_MAX, cursor=cursor)
        found += [one["namespace"] for one in page["namespaces"] if one["namespace"].startswith(text)]
        cursor = page["next_cursor"]
    if not found:
        raise InvalidRequest(f"{typed}: no namespace starts with {text!r}: see `kvstore ls`")
    if len(found) > 1:
        raise InvalidRequest(
            f"{typed}: {len(found)} namespaces start with {text!r}: give more digits, see `kvstore ls`"
        )
    return found[0]


def whole_prefix(text: str) -> str:
    """A boundary's prefix hash, as given.

    Raises:
        InvalidRequest: It does not have 64 hex digits.
    """
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise InvalidRequest(
            f"PREFIX: expected 64 hex digits in lower case, got {text!r}: `kvstore ls NAMESPACE` lists boundaries"
        )
    return text
