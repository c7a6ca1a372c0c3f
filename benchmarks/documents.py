"""How many tokens remain to compute when documents are put into the planned order: `python -m benchmarks.documents`.

Each query has a system prompt, some of many documents in random order, and a question. Which documents follows Zipf's
law. The queries are answered one after the other, once as they are given and once as `POST /v1/plan` of a real service
orders them, each in a namespace of its own in a real Redis. For each the store is asked what it restores, and what it
does not restore is saved, as an engine does: the ends of pages, and the end of the prompt. No engine runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import uvloop

from benchmarks.node import Node, temporary_folder
from benchmarks.program import Column, count, run_rows
from kvstore.api import PrefixQuery
from kvstore.client import PlanClient, RemoteStore, connect
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import LINK_TOKENS, Boundary, PlainChain, RecordKey
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.testing.servers import redis_server
from kvstore.testing.servers.ports import free_address
from kvstore.testing.waiting import soon

__all__ = ["main"]

_SYSTEM_TOKENS, _QUESTION_TOKENS = 120, 60
_PAYLOAD_BYTES = 256
_SAVED_AT_ONCE = 64
_PARTS = 5
_SEED = 22


@dataclass(frozen=True)
class Row:
    """One exponent.

    Attributes:
        exponent: Of Zipf's law: the document of rank r is asked for with a weight of r ** -exponent.
        tokens: Of all prompts.
        computed_given: Tokens that the store did not restore, in the order given.
        computed_planned: The same in the planned order.
        ratio: The first by the second.
        ratios: `ratio` for each fifth of the queries, in the order in which they were asked.
        search_p50_ms: The search in the service.
        call_p50_ms: The whole call, over HTTP.
        cpu_ms: Processor time of the service for one plan.
    """

    exponent: float
    queries: int
    tokens: int
    computed_given: int
    computed_planned: int
    ratio: float
    ratios: list[float]
    search_p50_ms: float
    search_p99_ms: float
    search_max_ms: float
    call_p50_ms: float
    call_p99_ms: float
    cpu_ms: float


_COLUMNS: Sequence[Column[Row]] = (
    ("exponent", lambda row: f"{row.exponent:g}"),
    ("tokens", lambda row: f"{row.tokens:,}"),
    ("computed: given", lambda row: f"{row.computed_given:,}"),
    ("planned", lambda row: f"{row.computed_planned:,}"),
    ("ratio", lambda row: f"{row.ratio:.2f}"),
    ("by fifths", lambda row: " ".join(f"{ratio:.2f}" for ratio in row.ratios)),
    ("search ms 50% 99% max", lambda row: f"{row.search_p50_ms:.1f} {row.search_p99_ms:.1f} {row.search_max_ms:.1f}"),
    ("call ms 50% 99%", lambda row: f"{row.call_p50_ms:.1f} {row.call_p99_ms:.1f}"),
    ("CPU ms", lambda row: f"{row.cpu_ms:.1f}"),
)


@dataclass
class _Run:
    """What one run over all queries found.

    Attributes:
        computed: Of each query the tokens that were not restored.
    """

    tokens: int = 0
    computed: list[int] = field(default_factory=list)
    search_ms: list[float] = field(default_factory=list)
    call_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Query:
    system: list[int]
    documents: list[list[int]]
    question: list[int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and a last line `BENCH [...]`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__)
    parser.add_argument("--queries", type=count, default=1000, help="default 1000")
    parser.add_argument("--documents", type=count, default=200, help="documents that there are (default 200)")
    parser.add_argument("--each", type=count, default=14, help="documents of a query (default 14)")
    parser.add_argument("--tokens", type=count, default=500, help="of a document, on average (default 500)")
    parser.add_argument("--page", type=count, default=256, help="tokens of a page (default 256)")
    parser.add_argument("--within-ms", type=count, default=4, help="as in the request (default 4)")
    parser.add_argument("--exponents", type=_exponents, default=(1.0, 1.2), help="of Zipf's law, like 1.0,1.2")
    title = "tokens to compute, documents as they are given and in the planned order"
    return run_rows(parser, arguments, lambda chosen, say: uvloop.run(_measure(chosen, say)), title, _COLUMNS)


def _exponents(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


async def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    rows = []
    with temporary_folder() as folder, redis_server() as redis:
        address = free_address()
        with Node(folder, "plan", hot=redis.url, admin_listen=address) as node:
            store = connect(node.url)
            try:
                for exponent in chosen.exponents:
                    say(f"exponent {exponent:g}: {chosen.queries} queries as given, then planned")
                    rows.append(await _compare(store, node, f"http://{address}", exponent, chosen))
            finally:
                await store.aclose()
    return rows


async def _compare(store: RemoteStore, node: Node, url: str, exponent: float, chosen: argparse.Namespace) -> Row:
    given = await _run(store, node, None, exponent, chosen)
    planned = await _run(store, node, url, exponent, chosen)
    part = -(-chosen.queries // _PARTS)
    ratios = [
        round(sum(given.computed[at : at + part]) / sum(planned.computed[at : at + part]), 3)
        for at in range(0, chosen.queries, part)
    ]
    computed_given, computed_planned = sum(given.computed), sum(planned.computed)
    at = partial(np.percentile, method="higher")
    return Row(
        exponent,
        chosen.queries,
        planned.tokens,
        computed_given,
        computed_planned,
        round(computed_given / computed_planned, 3),
        ratios,
        round(float(at(planned.search_ms, 50)), 2),
        round(float(at(planned.search_ms, 99)), 2),
        round(max(planned.search_ms), 2),
        round(float(at(planned.call_ms, 50)), 2),
        round(float(at(planned.call_ms, 99)), 2),
        round(float(at(planned.cpu_ms, 50)), 2),
    )


async def _run(store: RemoteStore, node: Node, url: str | None, exponent: float, chosen: argparse.Namespace) -> _Run:
    """Answer all queries in a new namespace, planned by the service at `url`, if there is one."""
    layout = Layout(chosen.page, (GroupLayout(FullAttention(), 2),))
    name = f"exponent {exponent}, {'given' if url is None else 'planned'}"
    description = NamespaceDescription.from_fields({"model": name, "layout": describe_layout(layout)})
    namespace = await store.open_namespace(description, deadline=soon())
    client = PlanClient(url, namespace.hex(), timeout_s=10.0) if url is not None else None
    run = _Run()
    for query in _queries(exponent, chosen):
        token_ids = [*query.system, *(token for one in query.documents for token in one), *query.question]
        promised = None
        if client is not None:
            before_s, started_s = node.cpu_s(), time.perf_counter()
            plan = client.plan(
                query.documents, system=query.system, following=query.question, within_ms=chosen.within_ms
            )
            run.call_ms.append((time.perf_counter() - started_s) * 1000)
            run.cpu_ms.append((node.cpu_s() - before_s) * 1000)
            if plan.failure:
                raise RuntimeError(f"no plan: {plan.failure}")
            run.search_ms.append(plan.search_ms)
            token_ids, promised = plan.token_ids, plan.hit_tokens
        boundaries = PlainChain().extend(token_ids)
        cap_tokens = (len(token_ids) - 1) // LINK_TOKENS * LINK_TOKENS  # the last token is always computed
        asked = PrefixQuery(namespace, tuple(boundaries), 0, cap_tokens, LINK_TOKENS)
        resume_tokens = (await store.lookup(asked, deadline=soon())).resume_tokens
        if promised not in (None, resume_tokens):
            raise RuntimeError(f"the plan expected {promised} tokens, the store restores {resume_tokens}")
        run.tokens += len(token_ids)
        run.computed.append(len(token_ids) - resume_tokens)
        ends = [one for one in boundaries if one.tokens % chosen.page == 0 or one is boundaries[-1]]
        await _save(store, description, [one for one in ends if one.tokens > resume_tokens])
    if client is not None:
        client.close()
    return run


async def _save(store: RemoteStore, description: NamespaceDescription, boundaries: Sequence[Boundary]) -> None:
    layout = description.layout()
    records: list[Record] = []
    for boundary in boundaries:
        for group, one in enumerate(layout.groups):
            kind, span = one.record_at(boundary.tokens, layout.page_tokens)
            for slice_ in range(one.num_slices):
                key = RecordKey(description.id, boundary.prefix, group, slice_)
                header = HeaderV1.unsealed(
                    key, kind, span, codec_chain=0, decoded_bytes=_PAYLOAD_BYTES, created_ms=1_700_000_000_000
                )
                records.append(seal(header, bytearray(HEADER_BYTES + _PAYLOAD_BYTES)))
    for start in range(0, len(records), _SAVED_AT_ONCE):
        part = records[start : start + _SAVED_AT_ONCE]
        await asyncio.gather(*(store.save(record, deadline=soon()) for record in part))


def _queries(exponent: float, chosen: argparse.Namespace) -> list[_Query]:
    """The same for both runs."""
    numbers = np.random.default_rng(_SEED)
    lengths = numbers.integers(chosen.tokens * 3 // 5, chosen.tokens * 7 // 5 + 1, chosen.documents)
    documents = [numbers.integers(0, 128_000, length).tolist() for length in lengths]
    system = numbers.integers(0, 128_000, _SYSTEM_TOKENS).tolist()
    weights = np.arange(1, chosen.documents + 1) ** -exponent
    made = []
    for _ in range(chosen.queries):
        drawn = numbers.choice(chosen.documents, chosen.each, replace=False, p=weights / weights.sum())
        question = numbers.integers(0, 128_000, _QUESTION_TOKENS).tolist()
        made.append(_Query(system, [documents[index] for index in numbers.permutation(drawn)], question))
    return made


if __name__ == "__main__":
    sys.exit(main())
