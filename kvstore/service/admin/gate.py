"""The first step of every request: access, limits, and a line in the audit log when it changes something."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.runtime.events import EventKind, Events
from kvstore.runtime.tracing import RequestContext, request_context
from kvstore.service.admin.access import HEALTH_PATHS, Access, is_open
from kvstore.service.admin.problems import Refused, answer
from kvstore.service.authentication import Grant

BODY_BYTES_MAX = 4 << 20
"""Room for the token ids of a prompt of some hundred thousand tokens."""
_BODY_S, _BODY_BEGINS_S = 15.0, 5.0
"""A body must have arrived, and have begun, after this time."""
_REQUESTS_MAX, _REQUESTS_OF_ADDRESS_MAX, _REQUESTS_OF_TENANT_MAX = 128, 64, 32
_HEALTH_REQUESTS_MAX = 256
"""Limits of requests that run at a time: of each kind of `_places`, of an address of one, and of a tenant. Health
requests have a limit of their own, so that a supervisor always gets through."""

_audit = logging.getLogger("kvstore.audit")

_REQUEST_ID = b"x-request-id"
_REQUEST_ID_FORM = re.compile("[A-Za-z0-9._:-]{1,64}")
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_READ_PATHS = ("/v1/lookup", "/v1/plan", "/v1/query", "/v1/query_by_hash")
"""Sent as POST because a prompt is too long for an address; they change nothing."""
_HINT_PATHS = ("/v1/hints", "/v1/prefetch")
"""Sent with every turn of a conversation, and they change no record: neither logged nor reported."""
_NAMESPACE = re.compile("/([0-9a-f]{32})(?:/|$)")
_EVENT_TEXTS = {
    "DELETE /v1/prefixes/": "a prefix was deleted",
    "DELETE /v1/namespaces/": "a namespace was deleted, except pinned boundaries",
    "POST /v1/pins": "a prefix was pinned",
    "DELETE /v1/pins/": "a pin was removed",
    "POST /v1/deletions": "a deletion of many prefixes was started",
    "POST /v1/gc": "a garbage collection was started",
    "POST /v1/reindex": "a reindex of the catalog was started",
    "PUT /v1/quotas/": "a quota was set",
    "DELETE /v1/quotas/": "a quota was withdrawn",
    "POST /v1/weights/retired": "weights were retired",
    "DELETE /v1/weights/retired": "a retirement of weights was undone",
    "DELETE /v1/jobs/": "a job was cancelled",
}
_TIER_EVENT_TEXTS = {
    "pause": "the write-back to the {} tier was paused",
    "resume": "the write-back to the {} tier was resumed",
    "drain": "a drain of the write-back to the {} tier was started",
    "verify": "a verification of the {} tier was started",
}
_EVENT_TEXTS |= {
    f"POST /v1/tiers/{level}/{verb}": text.format(level)
    for level in ("hot", "cold")
    for verb, text in _TIER_EVENT_TEXTS.items()
}
"""Texts of the events that changes of a tier make. The event of any other change has its method and path as text."""


class Gate:
    """Middleware that refuses a request before its body is read or a parameter is parsed, and reports each change."""

    def __init__(self, app: ASGIApp, access: Access, events: Events) -> None:
        self._app = app
        self._access = access
        self._events = events
        self._running: Counter[tuple[str, ...]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        state = scope.setdefault("state", {})
        status = 0  # of the response, once it has begun
        request_id = _request_id(scope)
        request_context.set(RequestContext(request=request_id))

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, request_id.encode())]
            await send(message)

        places: dict[tuple[str, ...], int] = {}
        try:
            try:
                grant = None
                if not is_open(scope["path"]):
                    grant = state["grant"] = self._access.admit(scope)
                    request_context.set(RequestContext(request=request_id, tenant=grant.tenant or ""))
                wanted = _places(scope, grant)
                if any(self._running[place] >= most for place, most in wanted.items()):
                    text = "too many requests run at a time: retry later"
                    raise Refused(503, text, headers={"Retry-After": "1"})
                places = wanted
                self._running.update(places.keys())
                receive = _limited(scope, receive)
            except Refused as refused:
                await answer(refused)(scope, receive, watched)
                return
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # by the server, which ends and has waited for this request
            if not status:
                await answer(Refused(503, "the service is stopping", headers={"Retry-After": "1"}))(
                    scope, receive, watched
                )
        finally:
            self._running.subtract(places.keys())
            for place in places:
                if not self._running[place]:
                    del self._running[place]
            if scope["method"] not in _READ_METHODS and scope["path"] not in _READ_PATHS + _HINT_PATHS:
                _log_change(scope, state, status or 500)
                self._report_change(scope, state, status or 500)

    def _report_change(self, scope: Scope, state: dict[str, Any], status: int) -> None:
        """Emit an event if the request changed something: a route sets `request.state.changed` to False if not."""
        audit, grant = state.get("audit", {}), state.get("grant")
        if status >= 400 or grant is None or audit.get("dry_run") or not state.get("changed", True):
            return
        done = f"{scope['method']} {scope['path']}"
        text = next((text for start, text in _EVENT_TEXTS.items() if done.startswith(start)), done)
        named = _NAMESPACE.search(scope["path"])
        namespace = named[1] if named is not None else str(audit.get("namespace", ""))
        detail = {name: value for name, value in audit.items() if isinstance(value, int | str) and name != "namespace"}
        detail |= {"who": grant.name, "what": done}
        self._events.add(EventKind.ADMIN, text, namespace=namespace, tenant=grant.tenant, detail=detail)


def _places(scope: Scope, grant: Grant | None) -> dict[tuple[str, ...], int]:
    """The places that a request takes, each with how many there are. Each kind has its own, so that a tenant keeps out
    no operator, and a peer without a token no tenant."""
    if scope["path"] in HEALTH_PATHS:
        return {("health",): _HEALTH_REQUESTS_MAX}
    if grant is not None and grant.tenant is not None:  # not by address: tenants may share one
        return {("tenants",): _REQUESTS_MAX, ("tenants", grant.tenant): _REQUESTS_OF_TENANT_MAX}
    kind = "operators" if grant is not None else "no token"
    address = scope["client"][0] if scope.get("client") else ""
    return {(kind,): _REQUESTS_MAX, (kind, address): _REQUESTS_OF_ADDRESS_MAX}


def _request_id(scope: Scope) -> str:
    """The peer's request id if it is safe in a log line, else a new one. Responses repeat it."""
    given: str = dict(scope["headers"]).get(_REQUEST_ID, b"").decode("latin-1")
    # not from a seeded generator: the ids of several services must differ
    return given if _REQUEST_ID_FORM.fullmatch(given) else secrets.token_hex(8)


def _limited(scope: Scope, receive: Receive) -> Receive:
    """`receive`, which refuses a body that is too large, even if its declared length is not, or arrives too slowly."""
    refused = Refused(413, "the body is too large", field="body", expected=f"at most {BODY_BYTES_MAX} bytes")
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > BODY_BYTES_MAX:
        raise refused
    if scope["method"] in _READ_METHODS:  # no route reads their bodies
        return receive
    num_bytes, is_whole = 0, False
    started_s = asyncio.get_running_loop().time()

    async def counted() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:  # the caller now waits for the peer to disconnect
            return await receive()
        within_s = _BODY_S if num_bytes else min(_BODY_S, _BODY_BEGINS_S)
        try:
            async with asyncio.timeout_at(started_s + within_s):
                message = await receive()
        except TimeoutError as error:
            what = "arrive" if num_bytes else "begin"
            raise HTTPException(408, f"the body did not {what} within {within_s:.0f} s") from error
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "the peer has ended before its body had arrived")
        is_whole = not message.get("more_body", False)
        num_bytes += len(message.get("body", b""))
        if num_bytes > BODY_BYTES_MAX:
            raise HTTPException(413, refused.problem.detail)  # the one exception that the framework lets through here
        return message

    return counted


def _log_change(scope: Scope, state: dict[str, Any], status: int) -> None:
    grant = state.get("grant")
    _audit.info(
        "method=%s path=%s query=%r status=%d who=%r peer=%s%s%s",
        scope["method"],
        scope.get("raw_path", b"").decode("latin-1")[:300],
        scope["query_string"].decode("latin-1")[:300],
        status,
        grant.name if grant is not None else None,
        scope["client"][0] if scope.get("client") else None,
        "".join(f" {name}={value}" for name, value in state.get("audit", {}).items()),
        "" if state.get("changed", True) else " changed=False",
    )
