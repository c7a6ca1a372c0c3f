"""What every request passes first: who asks, how large it is, and a line in the audit log when it changes something."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.service.admin.access import OPEN_PATHS, Access
from kvstore.service.admin.problems import Refused, answer

__all__ = ["BODY_BYTES_MAX", "Gate"]

BODY_BYTES_MAX = 4 << 20
"""The token ids of a prompt of some hundred thousand tokens."""

_audit = logging.getLogger("kvstore.audit")

_LOOKS = ("GET", "HEAD", "OPTIONS")
_ASKS = ("/v1/lookup",)
"""Sent as POST because a prompt is too long for an address; changes nothing."""


class Gate:
    """Refuses before a body is read or a parameter parsed.

    Args:
        app: What is behind.
        access: Who may come in.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        state = scope.setdefault("state", {})
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                if scope["path"] not in OPEN_PATHS:
                    state["grant"] = self._access.admit(scope)
                receive = _limited(scope, receive)
            except Refused as refused:
                await answer(refused)(scope, receive, watched)
                return
            await self._app(scope, receive, watched)
        finally:
            if scope["method"] not in _LOOKS and scope["path"] not in _ASKS:
                _tell(scope, state, status)


def _limited(scope: Scope, receive: Receive) -> Receive:
    """`receive`, which refuses more than the limit, whatever the sender said it would be."""
    refused = Refused(413, "the body is too large", field="body", expected=f"at most {BODY_BYTES_MAX} bytes")
    told = dict(scope["headers"]).get(b"content-length", b"0")
    if not told.isdigit() or int(told) > BODY_BYTES_MAX:
        raise refused
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > BODY_BYTES_MAX:
            raise HTTPException(413, refused.problem.detail)  # the one kind that the framework passes on from here
        return message

    return counted


def _tell(scope: Scope, state: dict[str, Any], status: int) -> None:
    grant = state.get("grant")
    _audit.info(
        "method=%s path=%s query=%r status=%d who=%r peer=%s%s",
        scope["method"],
        scope.get("raw_path", b"").decode("latin-1")[:300],
        scope["query_string"].decode("latin-1")[:300],
        status,
        grant.name if grant is not None else None,
        scope["client"][0] if scope.get("client") else None,
        "".join(f" {name}={value}" for name, value in state.get("audit", {}).items()),
    )
