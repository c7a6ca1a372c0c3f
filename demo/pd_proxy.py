"""A proxy for disaggregated prefill: `python -m demo.pd_proxy --prefill URL --decode URL --port PORT`.

Each request goes to the prefill server for one token. Then it goes to the decode server, with the `kv_transfer_params`
of that answer. The second answer is passed on as it arrives, streamed or whole. The proxy knows nothing of pages and
waits for none: the parameters are a receipt, and the decode engine waits for the pages that it promises. A prefill
server that fails costs a recomputation and no error.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

__all__ = ["decode_body", "make_app", "prefill_body"]

_PREFILL_S = 600.0
_CONNECT_S = 5.0
_ONE_TOKEN = ("max_tokens", "max_completion_tokens")
_FOR_DECODE_ONLY = (
    "stream",
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
)
_HOP = ("content-length", "transfer-encoding", "connection", "date", "server")

_log = logging.getLogger("pd_proxy")


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: the same prompt, one token, and a note that another engine decodes."""
    kept = {name: value for name, value in body.items() if name not in _FOR_DECODE_ONLY}
    one = {name: 1 for name in _ONE_TOKEN if name in body} or {"max_tokens": 1}
    params = {**(body.get("kv_transfer_params") or {}), "do_remote_decode": True}
    return {**kept, **one, "stream": False, "kv_transfer_params": params}


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request for the decode server: the user's own, with what the prefill engine gave for it."""
    merged = {**(body.get("kv_transfer_params") or {}), **(params or {})}
    return {**body, "kv_transfer_params": merged} if merged else dict(body)


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    """The proxy in front of a prefill and a decode server."""
    timeout = httpx.Timeout(_PREFILL_S, connect=_CONNECT_S)
    limits = httpx.Limits(max_connections=None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
            app.state.client = client
            yield

    app = FastAPI(title="disaggregated prefill", lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> StreamingResponse:
        client: httpx.AsyncClient = request.app.state.client
        body, path = await request.json(), request.url.path
        headers = {name: value for name, value in request.headers.items() if name == "authorization"}
        params = await _prefill(client, f"{prefill_url}{path}", prefill_body(body), headers)
        call = client.build_request("POST", f"{decode_url}{path}", json=decode_body(body, params), headers=headers)
        answer = await client.send(call, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        return StreamingResponse(_pass_on(answer), status_code=answer.status_code, headers=kept)

    return app


async def _prefill(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]
) -> Mapping[str, Any] | None:
    """What the prefill engine gives the decode engine; `None` when it failed, and the prompt is computed there."""
    try:
        answer = await client.post(url, json=body, headers=headers)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        _log.warning("no prefill, the decode server computes the prompt: %s", error)
        return None
    params = answer.json().get("kv_transfer_params")
    return params if isinstance(params, Mapping) else None


async def _pass_on(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()  # when the client disconnects, the decode server stops as well


def main() -> None:
    parser = argparse.ArgumentParser(prog="pd_proxy", description="A proxy for disaggregated prefill.")
    parser.add_argument("--prefill", required=True, help="root of the prefill server, e.g. http://127.0.0.1:8100")
    parser.add_argument("--decode", required=True, help="root of the decode server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    app = make_app(arguments.prefill.rstrip("/"), arguments.decode.rstrip("/"))
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="info")


if __name__ == "__main__":
    main()
