"""`PlanClient` and a real administration interface: the prompt that it joins, and what happens without a service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvstore.client import PlanClient
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PlainChain
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers.ports import free_address
from tests.unit.admin.service_harness import open_service

SYSTEM, FOLLOWING = "the system prompt", "the question"
TEXTS = {"a": "a" * 90, "b": "b" * 130, "c": "c" * 75}


def tokenize(text: str) -> list[int]:
    return [ord(character) for character in text]


async def test_a_prompt_of_text_is_planned(tmp_path: Path) -> None:
    """The client turns text into token ids, drops a document that is given twice, and joins the prompt in the order of
    the plan.
    """
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    stored = tokenize(SYSTEM + TEXTS["c"] + TEXTS["a"])
    async with open_service(tmp_path) as made:
        await made.save_pages(prompt, PlainChain().extend(stored))
        client = PlanClient(
            made.url, prompt.namespace.hex(), token="red reader token", tokenize=tokenize, timeout_s=60.0
        )
        ask = partial(
            client.plan,
            [TEXTS[name] for name in "abca"],
            system=SYSTEM,
            following=FOLLOWING,
            within_ms=1000,
            compare=True,
        )
        plan = await asyncio.to_thread(ask)
        assert (plan.failure, plan.order, plan.left_out) == ("", [2, 0, 1], [3])
        assert plan.token_ids == tokenize(SYSTEM + TEXTS["c"] + TEXTS["a"] + TEXTS["b"] + FOLLOWING)
        assert (plan.hit_tokens, plan.given_hit_tokens) == (len(stored) // 64 * 64, 0)
        assert sum(plan.hit_by_tier.values()) == plan.hit_tokens
        mixed = await asyncio.to_thread(client.plan, [tokenize(TEXTS["b"])], order="fixed", keep_duplicates=True)
        assert (mixed.order, mixed.hit_tokens) == ([0], 0)
        client.close()


async def test_a_wrong_call_is_an_error(tmp_path: Path) -> None:
    """Text without a tokenizer, an empty document, another tenant's namespace, a wrong token."""
    prompt = Prompt(ATTENTION, "plan", 64, tenant="red")
    async with open_service(tmp_path) as made:
        await made.save_pages(prompt, PlainChain().extend(list(range(64))))
        for token, pieces, message in (
            ("red token", ["text"], "tokenizer"),
            ("red token", [[]], "expected at least 1"),
            ("blue token", [[1, 2]], "no such namespace"),
            ("wrong token", [[1, 2]], "not valid"),
        ):
            with (
                PlanClient(made.url, prompt.namespace.hex(), token=token, timeout_s=60.0) as client,
                pytest.raises(InvalidRequest, match=message),
            ):
                await asyncio.to_thread(client.plan, pieces)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:7070",
        "ftp://h:1",
        "http://",
        "http://h:abc",
        "http://h:0",
        "http://h:70000",
        "http://[::1",
        "http://h/?a",
    ],
)
def test_a_wrong_url_is_named(url: str) -> None:
    """Whatever is wrong with it, when the client is made."""
    with pytest.raises(InvalidRequest, match="http://host:port"):
        PlanClient(url, "0" * 32)


@pytest.mark.parametrize(
    ("end", "path"),
    [
        ("", "/v1/plan"),
        ("/", "/v1/plan"),
        ("/kv/store/", "/kv/store/v1/plan"),
        ("/a b/%20/\u00e9", "/a%20b/%20/%C3%A9/v1/plan"),
    ],
)
def test_a_proxy_may_serve_the_interface_under_a_path(end: str, path: str) -> None:
    """The path of the url is kept."""
    paths: list[str] = []
    with something_else(b"<html>", [], paths) as url, PlanClient(url + end, "0" * 32) as client:
        client.plan([[1]])
    assert set(paths) == {path}


@contextmanager
def something_else(text: bytes, seen: list[int], paths: list[str] | None = None) -> Iterator[str]:
    """A web server that always gives one answer, and closes each connection after it without having said so.

    Args:
        seen: Receives the port of each request's peer.
        paths: Receives the path of each request.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            seen.append(self.client_address[1])
            if paths is not None:
                paths.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_without_an_answer_the_prompt_is_as_given() -> None:
    """No service, or something else at its address: the caller sends what it had, and reads why it is not planned."""
    pieces = [[1, 2], [3], [1, 2]]
    nobody = f"http://{free_address()}"
    with something_else(b"<html>", []) as other:
        for url in (nobody, other):
            with PlanClient(url, "0" * 32) as client:
                plan = client.plan(pieces, system=[9], following=[8])
            assert (plan.token_ids, plan.order, plan.hit_tokens) == ([9, 1, 2, 3, 1, 2, 8], [0, 1, 2], 0)
            assert plan.failure


def test_a_connection_that_was_closed_is_opened_again() -> None:
    """A service closes connections that are idle: the next call does not fail for that."""
    answer = {"order": [1, 0], "left_out": [], "hit_tokens": 64, "hit_by_tier": {"memory": 64}}
    answer |= {"given_hit_tokens": None, "search_ms": 0.1, "total_ms": 0.2, "retain": []}
    seen: list[int] = []
    with something_else(json.dumps(answer).encode(), seen) as url, PlanClient(url, "0" * 32) as client:
        plans = [client.plan([[1], [2]]) for _ in range(3)]
    assert [(plan.failure, plan.token_ids) for plan in plans] == [("", [2, 1])] * 3
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": [1]},
        {"order": [1], "left_out": [0]},
        {"order": [1, 0, 1]},
        {"order": [1, 2]},
        {"order": [0, -1]},
        {"order": ["0", "1"]},
        {"order": None},
        {"hit_by_tier": ...},
    ],
    ids=str,
)
def test_an_answer_that_would_lose_a_document_is_no_plan(wrong: dict[str, object]) -> None:
    """Whatever answers: no document is lost or sent twice, and the call does not fail."""
    answer: dict[str, object] = {"order": [1, 0], "left_out": [], "hit_tokens": 64, "hit_by_tier": {"memory": 64}}
    answer |= {"given_hit_tokens": None, "search_ms": 0.1, "total_ms": 0.2, "retain": [], **wrong}
    answer = {name: value for name, value in answer.items() if value is not ...}
    with something_else(json.dumps(answer).encode(), []) as url, PlanClient(url, "0" * 32) as client:
        plan = client.plan([[1], [2]])
    assert (plan.token_ids, plan.order) == ([1, 2], [0, 1]) and "no plan" in plan.failure
