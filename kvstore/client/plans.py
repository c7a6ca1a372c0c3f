"""`PlanClient`: asks a service in which order documents restore most of a prompt, and joins the prompt."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Literal

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.wire.address import parse_admin_url
from kvstore.wire.tls import ClientTls

Piece = str | Sequence[int]
"""Token ids, or text that the client's own tokenizer turns into token ids."""

_ANSWER_BYTES_MAX = 1 << 20
_JSON = {"Content-Type": "application/json", "Accept": "application/json"}
_WRONG_CALL = (401, 403, 404, 413, 422)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt whose documents are in the order that restores most of it.

    Attributes:
        token_ids: The prompt to send, an ordinary one.
        order: The documents in it, by their place in the call.
        left_out: Documents that equal one in `order`.
        hit_tokens: How many of the tokens the store can restore; an engine's block size can reduce it.
        hit_by_tier: The same by tier: what it adds to faster tiers.
        given_hit_tokens: Hit of the order that was given; `None`: the call did not ask to compare.
        search_ms: How long the service searched for the order.
        total_ms: How long the service took in all, including the wait for its turn.
        retain: Beginnings that are worth to be retained, as `POST /v1/plan` describes them.
        failure: Why no plan was made: the prompt is the one that was given. Empty: it was planned.
    """

    token_ids: list[int]
    order: list[int]
    left_out: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    hit_by_tier: Mapping[str, int] = field(default_factory=dict)
    given_hit_tokens: int | None = None
    search_ms: float = 0.0
    total_ms: float = 0.0
    retain: Sequence[Mapping[str, Any]] = ()
    failure: str = ""


class PlanClient:
    """Plans prompts by the administration interface of one service. Threads may share it: their calls take turns.

    Args:
        url: `http://host:port` or `https://host:port`, the service's `admin_listen`. It may end in the path under which
            a proxy serves that.
        namespace: Id of the namespace, 32 hex digits: `kvstore ls` lists it.
        token: A token with the scope `read`; `None`: the service needs none.
        tokenize: Turns text into token ids, without adding any. `None`: all pieces are token ids.
        timeout_s: For each answer.
        tls: For an `https` address; `None`: the system's authorities are trusted.

    Raises:
        InvalidRequest: The url, or a file of `tls`, is wrong.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        token: str | None = None,
        tokenize: Callable[[str], Sequence[int]] | None = None,
        timeout_s: float = 1.0,
        tls: ClientTls | None = None,
    ) -> None:
        parts = parse_admin_url(url)
        host, self._path = parts.hostname or "", f"{parts.path}/v1/plan"
        self._namespace = namespace
        self._tokenize = tokenize
        self._headers = _JSON | ({"Authorization": f"Bearer {token}"} if token else {})
        self._lock = threading.Lock()
        if parts.scheme == "https":
            context = (tls or ClientTls()).context()
            self._connection: HTTPConnection = HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
        else:
            self._connection = HTTPConnection(host, parts.port, timeout=timeout_s)

    def plan(
        self,
        documents: Sequence[Piece],
        *,
        system: Piece = (),
        following: Piece = (),
        order: Literal["any", "fixed"] = "any",
        fixed_first: int = 0,
        fixed_last: int = 0,
        keep_duplicates: bool = False,
        cache_salt: str | None = None,
        within_ms: int = 4,
        compare: bool = False,
    ) -> Plan:
        """Plan a prompt. If the service does not answer, the prompt is returned as it was given, with the reason in
        `failure`: a right answer never needs a plan.

        Args:
            documents: At most 64, none of them empty.
            system: What comes before them.
            following: What comes after them, like the question.
            order: `fixed`: they stay in this order.
            fixed_first: How many at the start stay where they are.
            fixed_last: How many at the end stay where they are.
            keep_duplicates: Equal documents are sent as often as they are given.
            cache_salt: The request's `cache_salt`.
            within_ms: No round of the search begins later than this after it began.
            compare: Also find the hit of the order that was given.

        Raises:
            InvalidRequest: A piece is text and there is no tokenizer, or the service refuses the call.
        """
        head, tail = self._ids(system), self._ids(following)
        pieces = [self._ids(document) for document in documents]
        given = _joined(head, pieces, tail)
        body = {
            "namespace": self._namespace,
            "token_ids": given,
            "system_tokens": len(head),
            "document_tokens": [len(piece) for piece in pieces],
            "order": order,
            "fixed_first": fixed_first,
            "fixed_last": fixed_last,
            "keep_duplicates": keep_duplicates,
            "cache_salt": cache_salt,
            "within_ms": within_ms,
            "compare": compare,
        }
        try:
            found = self._ask(json.dumps(body, separators=(",", ":")).encode())
            return _plan(found, head, pieces, tail)
        except Unavailable as error:
            return Plan(given, list(range(len(pieces))), failure=str(error))

    def close(self) -> None:
        """Close the connection; a later call opens another one."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> PlanClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, piece: Piece) -> list[int]:
        if not isinstance(piece, str):
            return list(piece)
        if self._tokenize is None:
            raise InvalidRequest("a piece of the prompt is text: give the client a tokenizer, or send token ids")
        return list(self._tokenize(piece))

    def _ask(self, body: bytes) -> dict[str, Any]:
        try:
            status, content = self._post(body)
        except (HTTPException, OSError) as error:
            raise Unavailable("the service's administration does not answer", error=error) from error
        try:
            answer = json.loads(content)
            if status == 200:
                return dict(answer)
            detail = str(answer["detail"])
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable("this is not an administration interface of kvstore", status=status) from error
        if status in _WRONG_CALL:
            raise InvalidRequest(detail, status=status, field=answer.get("field"))
        raise Unavailable(detail, status=status)

    def _post(self, body: bytes) -> tuple[int, bytes]:
        with self._lock:
            connection, was_open = self._connection, self._connection.sock is not None
            while True:
                try:
                    connection.request("POST", self._path, body, self._headers)
                    answer = connection.getresponse()
                    return answer.status, answer.read(_ANSWER_BYTES_MAX)
                except (HTTPException, OSError) as error:
                    connection.close()
                    if not was_open or isinstance(error, TimeoutError):
                        raise
                    was_open = False  # a service closes connections that were idle: once more, over a new one


def _joined(head: Sequence[int], pieces: Sequence[Sequence[int]], tail: Sequence[int]) -> list[int]:
    return [*head, *(token for piece in pieces for token in piece), *tail]


def _plan(found: Mapping[str, Any], head: Sequence[int], pieces: Sequence[Sequence[int]], tail: Sequence[int]) -> Plan:
    """The plan of an answer.

    Raises:
        Unavailable: It is none: a field is missing, or a document would be lost or sent twice.
    """
    try:
        order, left_out = list(found["order"]), list(found["left_out"])
        kept = {tuple(pieces[index]) for index in order}
        if sorted(order + left_out) != list(range(len(pieces))):
            raise ValueError("not each document is in it once")
        if any(tuple(pieces[index]) not in kept for index in left_out):
            raise ValueError("a document is left out that equals no other one")
        return Plan(
            _joined(head, [pieces[index] for index in order], tail),
            order,
            left_out,
            found["hit_tokens"],
            found["hit_by_tier"],
            found["given_hit_tokens"],
            found["search_ms"],
            found["total_ms"],
            found["retain"],
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Unavailable("the service's answer is no plan", error=error) from error
