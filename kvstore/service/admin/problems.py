"""Errors as `application/problem+json` (RFC 9457): which field is wrong, what was expected, what was seen."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from kvstore.errors import Closed, InvalidRequest, KVStoreError, Unavailable
from kvstore.runtime.wrong_values import expectation

PROBLEM_JSON = "application/problem+json"

_log = logging.getLogger(__name__)
_SEEN_CHARS_MAX = 100


class Problem(BaseModel):
    """Why a request was refused."""

    type: str = Field(default="about:blank", description="`about:blank`: the status says it all")
    title: str = Field(description="the status in words", examples=["Unprocessable Content"])
    status: int = Field(description="the status of the response", examples=[422])
    detail: str = Field(description="what is wrong", examples=["expected at most 1000"])
    field: str | None = Field(default=None, description="the parameter or field", examples=["query.limit"])
    expected: str | None = Field(default=None, description="what would be right", examples=["at most 1000"])
    seen: str | None = Field(default=None, description="what was sent, cut at 100 characters", examples=["5000"])


class Refused(Exception):
    """A request that is not carried out; the arguments are the fields of a `Problem`.

    Args:
        detail: In lower case.
        seen: What was sent; never a token.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        field: str | None = None,
        expected: str | None = None,
        seen: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(
            title=_phrase(status),
            status=status,
            detail=_sendable(detail),
            field=field and _sendable(field),
            expected=expected,
            seen=None if seen is None else _sendable(str(seen)[:_SEEN_CHARS_MAX]),
        )
        self.headers = dict(headers or {})


def _sendable(text: str) -> str:
    """Without lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def answer(refused: Refused) -> Response:
    """The response to a refused request."""
    content = refused.problem.model_dump_json(exclude_none=True)
    return Response(content, refused.problem.status, refused.headers, PROBLEM_JSON)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the description of a route: the statuses of its errors."""
    return {status: {"description": _phrase(status), "content": _CONTENT} for status in sorted(statuses)}


def _phrase(status: int) -> str:
    return _PHRASES_OF_RFC_9110.get(status) or HTTPStatus(status).phrase


# in Python only from 3.13 on; responses do not depend on the Python version
_PHRASES_OF_RFC_9110 = {413: "Content Too Large", 422: "Unprocessable Content"}
_CONTENT = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}


def handle_problems(app: FastAPI) -> None:
    """Turn every exception into a problem."""
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(KVStoreError, _on_store)
    app.add_exception_handler(Exception, _on_bug)


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return answer(error)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    # a misspelt field is reported before the field that is missing for it
    first = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = f"one of {first['ctx']['known']}"
        return answer(Refused(422, "unknown field", field=field, expected=known, seen=first["loc"][-1]))
    said = expectation(first)
    expected = said.removeprefix("expected ") if said.startswith("expected ") else None
    return answer(Refused(422, said, field=field, expected=expected, seen=_shown(first)))


def _shown(problem: Mapping[str, Any]) -> object:
    """What was sent; a long list or object as its size only."""
    value = problem.get("input")
    if problem["type"] == "missing":
        return None
    if isinstance(value, list | dict):
        return f"a JSON {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if problem["loc"][0] == "body":
        return json.dumps(value)  # 5 and "5" are two things in JSON, and null is one
    return value if value is None or isinstance(value, str) else repr(value)


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer(Refused(error.status_code, str(error.detail).lower(), headers=error.headers))


async def _on_store(request: Request, error: Exception) -> Response:
    assert isinstance(error, KVStoreError)
    if isinstance(error, InvalidRequest):
        field, expected, seen = (error.details.get(name) for name in ("field", "expected", "seen"))
        refused = Refused(
            422,
            error.message,
            field=str(field) if field else None,
            expected=None if expected is None else str(expected),
            seen=seen,
        )
        return answer(refused)
    if isinstance(error, Unavailable | Closed):
        return answer(Refused(503, error.message, headers={"Retry-After": "1"}))
    return await _on_bug(request, error)


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("a request of the administration failed path=%s", request.url.path, exc_info=error)
    return answer(Refused(500, "internal error: see the log of the service"))
