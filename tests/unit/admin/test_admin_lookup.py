"""`/v1/lookup`: a prompt's token ids find its records, and a long body is read in pieces."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from connector.prefix_hash import PrefixChain
from kvstore.errors import InvalidRequest
from kvstore.model.keys import PlainChain, RecordKey
from kvstore.service.admin.prompt import TOKEN_IDS, read_prompts
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.testing.keys import tenant_key, write_keys
from kvstore.testing.loop_held import LoopHeld
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from tests.unit.admin.service_harness import open_service


@pytest.mark.parametrize("salt", [None, "", "a tenant's user"])
def test_plain_tokens_are_hashed_as_engines_do(salt: str | None) -> None:
    """At every multiple of 16 tokens the hash is the one that the connector names records by."""
    tokens = [i * 7919 % (1 << 32) for i in range(1000)]
    engine = PrefixChain(16, salt)
    engine.extend(tokens)
    chain = PlainChain(salt)
    assert chain.extend(tokens[:512]) + chain.extend(tokens[512:]) == engine.boundaries


async def test_a_lookup_reports_where_it_stops(tmp_path: Path) -> None:
    """A slice of the third page is missing: the prompt resumes at the end of the second, and the group, page and slice
    are named. With a salt it is another prompt. Nothing counts as a use.
    """
    tokens = list(range(1000, 1000 + 64 * 5 + 20))
    prompt, boundaries = Prompt(HYBRID, "tokens", 64, tenant="red"), PlainChain().extend(tokens)
    body = {"namespace": prompt.namespace.hex(), "token_ids": tokens}
    async with open_service(tmp_path) as made, made.client("red") as client:
        third = next(boundary.prefix for boundary in boundaries if boundary.tokens == 192)
        await made.save_pages(prompt, boundaries, without=RecordKey(prompt.namespace, third, 0, 1))
        lookups = made.store.meters.get("lookups")
        found = (await client.post("/v1/lookup", json=body)).json()
        salted = (await client.post("/v1/lookup", json={**body, "cache_salt": "x"})).json()
        empty = (await client.post("/v1/lookup", json={**body, "token_ids": [1] * 15})).json()
        assert made.store.meters.get("lookups") == lookups
    assert (found["num_tokens"], found["resume_tokens"], found["is_certain"]) == (336, 128, True)
    attention, state = found["groups"]
    assert (attention["resume_tokens"], attention["next_tokens"], attention["missing_slices"]) == (128, 192, [1])
    assert (state["resume_tokens"], state["next_tokens"], state["missing_slices"]) == (320, None, [])
    assert [(one["tokens"], one["is_whole"]) for one in found["boundaries"]] == [
        (64, True),
        (128, True),
        (192, False),
        (256, True),
        (320, True),
    ]
    assert found["boundaries"][0]["tiers"] == ["memory", "filesystem"]
    assert (salted["resume_tokens"], salted["boundaries"]) == (0, [])
    assert salted["groups"][0]["missing_slices"] == [0, 1]
    assert (empty["num_tokens"], empty["resume_tokens"], empty["groups"][0]["next_tokens"]) == (0, 0, None)


async def test_a_lookup_finds_records_under_their_keyed_names(tmp_path: Path) -> None:
    """Two pages under an earlier key, one under the current: the prompt resumes at its end, and boundaries have the
    names that other routes use.
    """
    path = write_keys(tmp_path / "keys.toml", [("", 1, 1)])
    prompt, tokens = Prompt(ATTENTION, "tokens", 64), list(range(500, 500 + 64 * 3))
    boundaries = PlainChain().extend(tokens)
    ends = [boundary.prefix for boundary in boundaries if boundary.tokens % 64 == 0]
    names = [tenant_key(generation).name_of(end).hex() for generation, end in zip((1, 1, 2), ends, strict=True)]
    async with open_service(tmp_path, with_tokens=False, encryption_keys=str(path)) as made, made.client() as client:
        assert isinstance(made.store, EncryptedStore)
        await made.save_pages(prompt, boundaries[:8])
        write_keys(path, [("", 2, 2), ("", 1, 1)])
        assert not made.store.keys.poll() and made.store.keys.poll()
        await made.save_pages(prompt, boundaries, skip=2)
        found = (
            await client.post("/v1/lookup", json={"namespace": prompt.namespace.hex(), "token_ids": tokens})
        ).json()
        assert found["resume_tokens"] == 192
        assert [one["prefix"] for one in found["boundaries"]] == names
        assert found["boundaries"][0]["tiers"] == ["memory", "filesystem"]
        shown = await client.get(f"/v1/prefixes/{prompt.namespace.hex()}/{names[2]}")
        assert shown.json()["tokens"] == 192
        assert "kvstore_encrypted_records_total 6" in (await client.get("/metrics")).text


LONG = list(range(100, 30_000))
MAX = 40_000


class Body(BaseModel):
    """A prompt with any further fields."""

    model_config = ConfigDict(extra="allow")

    token_ids: list[int] | None = None


async def read(body: str | bytes, most: int = MAX, *, prompts_max: int = 0) -> list[tuple[dict[str, Any], list[int]]]:
    """The other fields of each prompt, and its token ids."""
    data = body if isinstance(body, bytes) else body.encode()
    prompts, _ = await read_prompts(data, Body, replace(TOKEN_IDS, most=most), prompts_max=prompts_max)
    return [(one.model_extra or {}, (await text.ids()).tolist()) for one, text in prompts]


async def test_long_bodies_are_read_as_json_is() -> None:
    """Wherever the list is, and with any spacing and misleading text: the result is that of the JSON parser."""
    salt = 'x","token_ids":[1,2],"y":"\\'
    for fields in ({"a": 1, "token_ids": LONG, "b": [salt]}, {"token_ids": LONG, salt: salt}, {"token_ids": LONG}):
        for text in (json.dumps(fields), json.dumps(fields, indent=2), json.dumps(fields, separators=(",", ":"))):
            for written in (text, text.replace("200,", "200.0,", 1)):
                ((rest, ids),) = await read(written)
                assert {**rest, "token_ids": ids} == json.loads(text)


def spoilt(*changes: tuple[str, str]) -> str:
    text = json.dumps({"token_ids": LONG, "n": 1})
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (spoilt((" 200,", " ,")), "whole numbers"),
        (spoilt((" 200,", " 0200,")), "whole numbers"),
        (spoilt((" 200,", " 2 0,")), "whole numbers"),
        (spoilt((" 200,", " 4294967296,")), "32 bits"),
        (spoilt((" 200,", " 1.5,")), "whole numbers"),
        (spoilt(("29999]", "29999,]")), "whole numbers"),
        (spoilt(("[100", "[,100")), "whole numbers"),
        (spoilt(('"n": 1', '"token_ids": [1]')), "given once"),
        (spoilt(('"n": 1', '"n": ')), "not JSON"),
        (spoilt((" 200,", "," + " " * 80_000 + "200,")), "whole numbers"),
        (json.dumps({"token_ids": LONG}).replace("29999]", "29999," + " " * 80_000 + "]"), "whole numbers"),
        (json.dumps([{"token_ids": LONG}]), "JSON object"),
        (json.dumps({"a": {"token_ids": LONG}}), "given once"),
        (json.dumps({"token_ids": [1] * (MAX + 1)}), "at most 40000"),
        (json.dumps({"token_ids": LONG, "x": "y" * 70_000}), "too much"),
        ("[" * 70_000, "must be JSON with lists"),
        (spoilt(("29999]", "29999")), "not JSON"),
        ("[" * 60_000, "not JSON"),
        ('{"token_ids": ["x"]}', "whole numbers"),
        ('{"token_ids": [1.5]}', "whole numbers"),
        ('{"token\\u005fids": [1]}', "given once"),
    ],
)
async def test_invalid_token_ids_are_refused(text: str, match: str) -> None:
    """The message names the mistake, and nothing else is read instead."""
    with pytest.raises(InvalidRequest, match=match):
        await read(text)


def text_with_a_list() -> bytes:
    """JSON in UTF-16 with an empty list, and with a text whose bytes look like a long one."""
    inside = b' "token_ids":[' + b"1," * 40_000 + b"1 ] "
    return '{"token_ids":[],"cache_salt":"'.encode("utf-16-le") + inside + '"}'.encode("utf-16-le")


@pytest.mark.parametrize(
    "body",
    [
        text_with_a_list(),
        json.dumps({"token_ids": [1]}).encode("utf-16"),
        json.dumps({"token_ids": LONG}).encode("utf-8-sig"),
        b'[{"token_ids":[\x0b]},' + json.dumps({"token_ids": LONG}).encode() + b"]",
        b'{"token_ids":[1],"cache_salt":"\xff"}',
    ],
    ids=["a text with a list", "UTF-16", "a byte order mark", "another space", "no UTF-8"],
)
async def test_what_is_no_json_in_utf_8_is_refused(body: bytes) -> None:
    """Another parser would see other ids, or none."""
    with pytest.raises(InvalidRequest, match=r"not JSON|whole numbers"):
        await read(body, prompts_max=64)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b'"token_ids":[]' * 290_000, "too much"),
        (b"[%s]" % b",".join([b'{"token_ids":[]}'] * 3_800 + [b'{"token_ids":[%s1]}' % (b"1," * 40_000)]), ""),
        (b'"token_ids" ' * 320_000, "must be JSON with lists"),
        (b'{"token_ids":[%s]}' % (b"1" * (4 << 20)), "32 bits"),
    ],
    ids=["lists and nothing else", "lists in objects", "names", "digits"],
)
async def test_a_strange_body_does_not_hold_the_loop(body: bytes, match: str) -> None:
    """However many lists it has, and however long an entry is: other requests, and the engines, wait for some ms."""
    held = LoopHeld()
    async with held.watching():
        if match:
            with pytest.raises(InvalidRequest, match=match):
                await read(body, 50_000, prompts_max=64)
        else:
            prompts = await read(body, 50_000, prompts_max=4_000)
            assert len(prompts) == 3_801 and len(prompts[-1][1]) == 40_001
    assert held.longest_s < 0.12, held.longest_s


@pytest.mark.parametrize(
    ("change", "field", "expected", "seen"),
    [
        ((" 200,", " 4294967296,"), "body.token_ids.100", "at most 4294967295", "4294967296"),
        ((" 200,", f" {'9' * 5000},"), "body.token_ids.100", "at most 4294967295", "9" * 50),
        ((" 29000,", ' "x",'), "body.token_ids.28900", "a whole number", '"x"'),
        ((" 200,", " 01,"), "body.token_ids.100", "a whole number", "01"),
        ((" 200,", " ,"), "body.token_ids.100", "a whole number", "nothing"),
        (("29999]", "29999, -1]"), "body.token_ids.29900", "a whole number", "-1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_list", [False, True])
async def test_wrong_ids_are_named(
    change: tuple[str, str], field: str, expected: str, seen: str, is_list: bool
) -> None:
    """Also in a long body: the place of the id, what would be right, and what it is."""
    text = spoilt(change)
    if is_list:
        text, field = f'[{{"token_ids": [1]}}, {text}]', field.replace("body.", "body.1.")
    with pytest.raises(InvalidRequest) as refused:
        await read(text, prompts_max=2)
    told = refused.value.details
    assert (told["field"], told["expected"], told["seen"]) == (field, expected, seen)


async def test_changed_lists_are_read_as_json_reads_them() -> None:
    """Of lists with a few random changes: the ids of the JSON parser; refused where it refuses, or one is too large."""
    rng, text, outcomes = random.Random(5), json.dumps({"token_ids": LONG[:15_000]}), Counter[bool]()
    for _ in range(100):
        changed = text
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(20, len(text) - 3)
            changed = changed[:at] + rng.choice(["0", "00", "7", " ", "\n", ",", "", "99999"]) + changed[at + 1 :]
        try:
            expected = json.loads(changed)["token_ids"]
        except ValueError:
            expected = None
        if expected is not None and max(expected) >= 1 << 32:
            expected = None
        outcomes[expected is None] += 1
        if expected is None:
            with pytest.raises(InvalidRequest):
                await read(changed)
        else:
            ((_, ids),) = await read(changed)
            assert ids == expected
    assert min(outcomes.values()) > 15
