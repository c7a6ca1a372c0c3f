"""Long prompts: pieces of their ids and hashes are read as at once, and kept for the next turn of a conversation."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.prefix_hash import PrefixChain
from kvstore.errors import InvalidRequest
from kvstore.model.instance import EngineInstance
from kvstore.model.keys import PlainChain, Recall
from kvstore.service.admin.known_pieces import KnownPieces
from kvstore.service.admin.prompt import PromptText, read_ids
from kvstore.testing.prompts import ATTENTION, Prompt
from tests.unit.admin.connected_engines import engine
from tests.unit.admin.service_harness import open_service

PIECES = ["0", "7", "12", "150000", "4294967295", "4294967296", "18446744073709551617", "00", "01", "-1", "1.5", "1e3"]
FROMSTRING = np.fromstring
BETWEEN = [",", ", ", " ,\n", "\t", "", ",,", " "]


def random_list(rng: random.Random) -> str:
    """Mostly a list of JSON, with what must be refused here and there."""
    is_hostile = rng.random() < 0.6
    numbers = PIECES if is_hostile else PIECES[:5]
    text = rng.choice(["", " ", "\r\n"])
    for _ in range(rng.randrange(1, 12)):
        text += rng.choice(numbers) if rng.random() < 0.3 else str(rng.randrange(1 << rng.randrange(1, 33)))
        text += rng.choice(BETWEEN[:3]) if not is_hostile or rng.random() < 0.9 else rng.choice(BETWEEN)
    text = text.rstrip(", \n") + rng.choice(["", " ", "\t"])
    if rng.random() < 0.2:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["\x0b", "\x00", "x", "+", "é", ":", "/", " ", "0"]) + text[at:]
    return text


def fromstring_before_2_3(text: bytes, **options: Any) -> Any:
    """As of NumPy before 2.3: it ends at what it cannot read, with a warning that a service does not show."""
    try:
        return FROMSTRING(text, **options)
    except (ValueError, DeprecationWarning):
        begin = re.match(rb"(?:\s*\d+\s*(?:,(?=\s*\d)|))*", text)
        assert begin is not None
        return FROMSTRING(begin[0], **options)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_piece_is_read_as_json_is(monkeypatch: pytest.MonkeyPatch, *, is_old: bool) -> None:
    """Of random and hostile texts: the numbers of the JSON parser; refused where it refuses, or one is no token id."""
    if is_old:
        monkeypatch.setattr(np, "fromstring", fromstring_before_2_3)
    rng, outcomes = random.Random(11), Counter[bool]()
    for _ in range(20_000):
        text = random_list(rng)
        try:
            expected = json.loads(f"[{text}]")
        except ValueError:
            expected = []
        is_valid = bool(expected) and all(type(one) is int and 0 <= one < 1 << 32 for one in expected)
        outcomes[is_valid] += 1
        if is_valid:
            assert read_ids(text.encode(), "f", 0).tolist() == expected, text
        else:
            with pytest.raises(InvalidRequest):
                read_ids(text.encode(), "f", 0)
    assert min(outcomes.values()) > 5000


def test_a_chain_is_the_engines_however_it_is_cut() -> None:
    """With and without hashes of earlier calls, at any distance of the boundaries."""
    rng, known = random.Random(3), KnownPieces().of("red")
    tokens = [rng.randrange(1 << 32) for _ in range(16 * 60)]
    for number in range(200):
        step, salt = 16 * rng.randrange(1, 9), rng.choice([None, "anna"])
        engine_chain, chain, found = PrefixChain(step, salt), PlainChain(salt, step), []
        engine_chain.extend(tokens)
        start = 0
        while start < len(tokens):
            stop = start + 16 * rng.randrange(1, 13)
            piece = tokens[start:stop]
            if number % 2:
                text = array("I", piece).tobytes()
                found += chain.extend_with(text, len(piece), lambda text: array("I", text), known)
            else:
                found += chain.extend(piece)
            start = stop
        assert found == engine_chain.boundaries
        assert chain.tokens == len(tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 3_000, 4_096, 5_000, 12_300])
async def test_a_prompt_as_it_is_written_has_the_boundaries_of_its_ids(num_tokens: int) -> None:
    """However it is written, whether or not its pieces are known; a wrong id is named wherever it stands."""
    rng, known = random.Random(num_tokens), KnownPieces().of("red")
    tokens = [rng.randrange(150_000) for _ in range(num_tokens)]
    ways = [(None, None, 16), (None, None, 16), (1, None, 64), (None, "anna", 64), (200, None, 32)]
    for indent, salt, step in ways + ([(5_000, None, 16)] if num_tokens < 100 else []):  # of which a piece has six ids
        text = PromptText(json.dumps(tokens, indent=indent)[1:-1].strip().encode(), "f")
        assert len(text) == num_tokens
        assert await text.boundaries(salt, step, known) == PlainChain(salt, step).extend(tokens)
    for at in {0, num_tokens // 2, num_tokens - 1} if num_tokens else ():
        wrong = [*tokens[:at], -1, *tokens[at + 1 :]]
        with pytest.raises(InvalidRequest) as refused:
            await PromptText(json.dumps(wrong)[1:-1].encode(), "f").boundaries(None, 16, known)
        assert refused.value.details["field"] == f"f.{at}"


def test_texts_and_places_are_told_apart() -> None:
    """Also two lists of ids that collide in XXH3 for some of its seeds; and the hash is not the one that Python gives
    such a text anywhere, whose key may be known.
    """
    known, before = KnownPieces(), " " * 900
    texts = [f"{before}100205,1{at}{' ' * 759}, 4861,1{8 - at}{' ' * 1024}".encode() for at in (0, 8)]
    assert known.of("red")("place", texts[0], lambda: b"first") == b"first"
    assert known.of("red")("place", texts[1], lambda: b"second") == b"second"
    assert known.of("red")("another", texts[0], lambda: b"third") == b"third"
    assert known.of("red")("place", bytes(texts[0]), lambda: b"fourth") == b"first"
    recall: Any = known.of("red")
    assert not {name for _, name in recall.args[0].entries} & {hash(text) for text in texts}


def test_results_are_kept_for_their_tenant_alone_and_within_bounds() -> None:
    pieces, computed = KnownPieces(room_bytes=6200, tenant_bytes=4200), Counter[tuple[str | None, bytes]]()

    def ask(tenant: str | None, key: bytes) -> bytes:
        def compute() -> bytes:
            computed[tenant, key] += 1
            return key * 700

        return pieces.of(tenant)("place", key, compute)

    for tenant in ("red", "blue", None):
        assert ask(tenant, b"a") == ask(tenant, b"a") == b"a" * 700
        assert computed[tenant, b"a"] == 1
    for key in (b"b", b"c", b"a", b"d", b"f"):  # `a` is used in between, so `b` is the one that leaves
        ask("red", key)
        assert pieces.used_bytes <= 6200
    assert (ask("red", b"a"), computed["red", b"a"]) == (b"a" * 700, 1)
    ask("red", b"b")
    assert computed["red", b"b"] == 2
    with pytest.raises(InvalidRequest):
        pieces.of("red")("place", b"e", lambda: read_ids(b"x", "f", 0).tobytes())
    assert ask("red", b"e") == b"e" * 700


@pytest.mark.parametrize("num_hashes", [1, 64, 256])
def test_what_is_counted_is_what_is_taken(num_hashes: int) -> None:
    """Also of engines with long steps, of which a piece has few hashes."""
    tracemalloc.start()
    try:
        before, pieces = tracemalloc.get_traced_memory()[0], KnownPieces()
        for number in range(6_000):  # the dictionaries have just grown
            place = (number.to_bytes(32, "big"), number << 20, 11_000, 64)
            pieces.of("red")(place, b"text", lambda: bytes(32 * num_hashes))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.95 < pieces.used_bytes / taken < 1.3


async def test_the_next_turn_is_answered_from_pieces_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn after turn the answer is right, and only the new pieces are computed; those of another salt, of a token of
    another tenant or of an operator are computed again."""
    computed, known_to = Counter[bool](), KnownPieces.of

    def counted(pieces: KnownPieces, tenant: str | None) -> Recall:
        def recall(place: Hashable, text: bytes, compute: Callable[[], Any]) -> Any:
            made: list[Any] = []
            found = known_to(pieces, tenant)(place, text, lambda: made.append(compute()) or made[0])
            computed[not made] += 1
            return found

        return recall

    monkeypatch.setattr(KnownPieces, "of", counted)
    rng, prompt = random.Random(4), Prompt(ATTENTION, "tokens", 64, tenant="red")
    tokens = [rng.randrange(150_000) for _ in range(61_440)]
    async with open_service(tmp_path) as made, AsyncExitStack() as stack:
        await made.save_pages(prompt, PlainChain().extend(tokens[:48_000]))
        one = EngineInstance("e", ("m",), step_tokens=16)
        await stack.enter_async_context(engine(made, one, prompt, "red"))

        async def ask(token: str, num_tokens: int, salt: str | None = None) -> tuple[int, int]:
            """How many pieces were known, and how many were computed."""
            before = Counter(computed)
            client = await stack.enter_async_context(made.client(token))
            body = {"model": "m", "token_ids": tokens[:num_tokens], "cache_salt": salt}
            answer = await client.post("/v1/query", json=body)
            assert answer.status_code == 200, answer.text
            if token != "blue":
                found = answer.json()["red"]["e"]["longest_matched"]
                assert found == (min(num_tokens - 1, 48_000) // 64 * 64 if salt is None else 0)
            return computed[True] - before[True], computed[False] - before[False]

        assert await ask("red", 40_016) == (0, 3)  # whole pieces, of 64 KiB of text
        assert await ask("red reader", 56_000) == (3, 2)
        assert await ask("red", 56_000) == (5, 0)
        assert await ask("red", 56_000, "anna") == (0, 5)
        assert await ask("operator", 56_000) == (0, 5)
        assert await ask("watcher", 56_000) == (5, 0)
        assert await ask("blue", 56_000) == (0, 5)  # although no engine of its own is connected: the ids are checked
        metrics = (await (await stack.enter_async_context(made.client("watcher"))).get("/metrics")).text
        shown = int(metrics.partition("\nkvstore_known_pieces_bytes ")[2].split()[0])
        hashes = 4 * 56_000 // 16 * 32  # of four questions, but for what their last pieces have
        assert 0.8 * hashes < shown < 1.1 * hashes
