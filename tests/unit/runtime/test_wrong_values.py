"""What an error says of a wrong value: in our words, whatever the library that found it says."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from kvstore.runtime.wrong_values import expectation


class Order(Enum):
    HITS = "hits"
    AGE = "age"


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Annotated[int, Field(ge=1)], 0, "expected at least 1"),
        (Annotated[int, Field(le=1000)], 1001, "expected at most 1000"),
        (Annotated[float, Field(gt=0)], 0, "expected more than 0"),
        (int, "x", "expected a whole number"),
        (int, 1.5, "expected a whole number"),
        (float, "x", "expected a number"),
        (Annotated[float, Field(allow_inf_nan=False)], "inf", "expected a finite number"),
        (bool, "maybe", "expected true or false"),
        (str, 5, "expected text"),
        (Path, 5, "expected a path"),
        (list[int], 5, "expected a list"),
        (dict[str, int], 5, "expected a JSON object"),
        (Literal["text", "json"], "xml", "expected text or json"),
        (Literal["a", "b", "c"], "d", "expected one of a, b, c"),
        (Order, "size", "expected hits or age"),
        (Annotated[str, Field(pattern="^[0-9a-f]{32}$")], "x", "expected 32 hex digits in lower case"),
        (Annotated[str, Field(pattern="^([0-9a-f]{32})?$")], "x", "expected 32 hex digits in lower case"),
        (Annotated[str, Field(pattern="^[0-9]{0,20}$")], "x", "expected at most 20 digits"),
        (
            Annotated[str, Field(pattern="^[!-~]{1,128}$")],
            "a b",
            "expected 1 to 128 printable characters without a space",
        ),
        (Annotated[str, Field(min_length=1)], "", "expected text that is not empty"),
        (Annotated[list[int], Field(max_length=1)], [1, 2], "expected at most 1 entries"),
    ],
)
def test_a_wrong_value_is_told_in_our_words(kind: Any, value: object, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(value)
    assert expectation(caught.value.errors()[0]) == said
