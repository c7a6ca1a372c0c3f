"""A long prompt's body, read in pieces, is what a JSON parser makes of it, or refused."""

from __future__ import annotations

import json

import pytest

from kvstore.errors import InvalidRequest
from kvstore.service.admin.resources.prompt import split_token_ids

LONG = list(range(100, 30_000))
MAX = 40_000


async def test_long_bodies_are_read_as_json_is() -> None:
    """Wherever the list stands, however it is spaced, whatever a text pretends to be: equal to the usual parser's."""
    salt = 'x","token_ids":[1,2],"y":"\\'
    for fields in ({"a": 1, "token_ids": LONG, "b": [salt]}, {"token_ids": LONG, salt: salt}, {"token_ids": LONG}):
        for text in (json.dumps(fields), json.dumps(fields, indent=2), json.dumps(fields, separators=(",", ":"))):
            rest, ids = await split_token_ids(text.encode(), MAX)
            assert ids is not None
            assert {**rest, "token_ids": ids.tolist()} == json.loads(text)


async def test_short_bodies_are_left_to_the_parser() -> None:
    """Whoever validates them says what is wrong."""
    assert await split_token_ids(b'{"token_ids": ["x"]}', MAX) == ({"token_ids": ["x"]}, None)


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
        (json.dumps([{"token_ids": LONG}]), "JSON object"),
        (json.dumps({"a": {"token_ids": LONG}}), "given once"),
        (json.dumps({"token_ids": [1] * (MAX + 1)}), "at most 40000"),
        (json.dumps({"token_ids": LONG, "x": "y" * 70_000}), "too much"),
        ("[" * 70_000, "whole numbers"),
        ("[" * 60_000, "not JSON"),
    ],
)
async def test_what_is_no_list_of_ids_is_refused(text: str, match: str) -> None:
    """By name, and never read as something else."""
    with pytest.raises(InvalidRequest, match=match):
        await split_token_ids(text.encode(), MAX)
