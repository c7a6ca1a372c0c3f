"""The proxy for disaggregated prefill, in front of two small servers that note what they are asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from starlette.testclient import TestClient

from demo.pd_proxy import decode_body, make_app, prefill_body
from kvstore.testing.servers.ports import free_ports

BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 40, "stream": True, "logprobs": 5, "temperature": 0.0}
RECEIPT = {"kvstore_handoff": {"tokens": 128}}


def test_the_prefill_server_computes_the_prompt_and_one_token() -> None:
    """The same prompt and sampling, one token, not streamed, and a word that another server will decode."""
    assert prefill_body(BODY) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "temperature": 0.0,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert prefill_body({"messages": [], "max_completion_tokens": 40})["max_completion_tokens"] == 1
    assert "max_tokens" not in prefill_body({"messages": [], "max_completion_tokens": 40})


def test_the_decode_server_gets_the_users_own_request() -> None:
    """Nothing of it is changed; what the prefill engine gave comes beside the user's own parameters."""
    assert decode_body(BODY, None) == BODY
    assert decode_body(BODY, RECEIPT) == {**BODY, "kv_transfer_params": RECEIPT}
    own = {**BODY, "kv_transfer_params": {"kvstore": {"save": False}}}
    assert decode_body(own, RECEIPT)["kv_transfer_params"] == {"kvstore": {"save": False}, **RECEIPT}


class Stub(ThreadingHTTPServer):
    """Answers every POST the same, and keeps the bodies."""

    def __init__(self, status: int, answer: bytes) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                stub.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(status)
                self.send_header(
                    "Content-Type", "text/event-stream" if answer.startswith(b"data") else "application/json"
                )
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(status: int, answer: bytes) -> Iterator[Stub]:
    with Stub(status, answer) as stub:
        thread = threading.Thread(target=stub.serve_forever)
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()


@pytest.fixture
def decode() -> Iterator[Stub]:
    with serving(200, b"data: one\n\ndata: [DONE]\n\n") as stub:
        yield stub


def ask(prefill_url: str, decode_url: str) -> tuple[int, bytes, str]:
    with TestClient(make_app(prefill_url, decode_url)) as client:
        answer = client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer secret"})
        return answer.status_code, answer.content, answer.headers["content-type"]


def test_prefill_then_decode(decode: Stub) -> None:
    """The decode server is asked with the receipt, both with the user's token, and its stream is passed on as it is."""
    with serving(200, json.dumps({"choices": [], "kv_transfer_params": RECEIPT}).encode()) as prefill:
        assert ask(prefill.url, decode.url) == (200, b"data: one\n\ndata: [DONE]\n\n", "text/event-stream")
        assert [body["max_tokens"] for body in prefill.bodies] == [1]
        assert prefill.headers[0]["authorization"] == decode.headers[0]["authorization"] == "Bearer secret"
    assert decode.bodies == [{**BODY, "kv_transfer_params": RECEIPT}]


@pytest.mark.parametrize("failure", ["refused", "an error", "no receipt"])
def test_a_prefill_server_that_fails_costs_a_recomputation(failure: str, decode: Stub) -> None:
    """The decode server gets the request as the user sent it, and the user an answer."""
    with ExitStack() as stack:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        if failure == "an error":
            url = stack.enter_context(serving(500, b"{}")).url
        if failure == "no receipt":
            url = stack.enter_context(serving(200, b'{"kv_transfer_params": null}')).url
        assert ask(url, decode.url)[0] == 200
    assert decode.bodies == [BODY]


def test_an_error_of_the_decode_server_is_passed_on() -> None:
    """Its status and its words reach the user."""
    with serving(400, b'{"error": "too long"}') as refusing, serving(200, b"{}") as prefill:
        assert ask(prefill.url, refusing.url) == (400, b'{"error": "too long"}', "application/json")
