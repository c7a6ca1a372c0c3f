"""`/`: the dashboard: files of this package, and one library of an installed package.

The files need no token, since they contain no data. The page gets data from the other routes, with the user's token.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import Response

from kvstore.service.admin.problems import Refused

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent.parent / "dashboard"
_CHARTS = "charts.js"
_CHARTS_PACKAGE, _CHARTS_FILE = "chartkick", "django/static/chartkick/Chart.bundle.js"
"""Chart.js with its date adapter, from that package."""
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # nothing from other hosts, nothing inline, and no text that becomes HTML or a script
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}
_REVALIDATE, _FOR_A_YEAR = "no-cache", "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is sent; `packed` is the body compressed with gzip, `tag` a digest of it."""

    body: bytes
    packed: bytes
    tag: str
    media_type: str


@router.get("/")
async def page(request: Request) -> Response:
    """The page. The address of the chart library contains its digest, so that a browser may cache it for a year."""
    return await _answer(request, "index.html", "")


@router.get("/dashboard/{name}")
async def file(
    request: Request,
    name: Annotated[str, PathParameter(max_length=100)],
    v: Annotated[str, Query(max_length=100, description="digest of a file that browsers may cache")] = "",
) -> Response:
    """A file of the page."""
    return await _answer(request, name, v)


async def _answer(request: Request, name: str, wanted: str) -> Response:
    # what `load` answers is kept for good: never for a name that a client without a token has made up
    is_known = name == _CHARTS or name in _own_files()
    found = await asyncio.to_thread(load, name) if is_known else None
    if found is None:
        raise Refused(404, "the dashboard has no such file", seen=name)
    tag = f'"{found.tag}"'
    caching = _FOR_A_YEAR if wanted == found.tag else _REVALIDATE
    headers = {**_HEADERS, "ETag": tag, "Cache-Control": caching}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.body, headers=headers, media_type=found.media_type)
    return Response(found.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=found.media_type)


@cache
def load(name: str) -> _File | None:
    """A file by its name, read once; `None`: there is no such file."""
    path = _charts_path() if name == _CHARTS else _own_files().get(name)
    if path is None or not path.is_file():
        return None
    body = path.read_bytes()
    if name == "index.html":
        charts = load(_CHARTS)
        body = body.replace(b"{charts}", f"/dashboard/{_CHARTS}?v={charts.tag}".encode() if charts else b"")
    packed = gzip.compress(body, 9, mtime=0)
    return _File(body, packed, hashlib.sha256(body).hexdigest()[:16], _MEDIA_TYPES[path.suffix])


@cache
def _own_files() -> dict[str, Path]:
    """The files by their names, so that no part of an address becomes part of a path."""
    return {path.name: path for path in FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}


def _charts_path() -> Path | None:
    spec = find_spec(_CHARTS_PACKAGE)
    return Path(spec.origin).parent / _CHARTS_FILE if spec is not None and spec.origin is not None else None
