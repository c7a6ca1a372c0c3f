"""What was expected of a wrong value, and what was seen: one wording for flags, settings, files and HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_EXPECTED = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "missing": "a value",
    "finite_number": "a finite number",
    "int_parsing_size": "a smaller whole number",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a JSON object",
    "model": "a JSON object",
    "mapping": "a JSON object",
}
"""By the first word of an error's type: of `int_type`, `int_parsing` and `int_from_float`."""
_CHARACTERS = {
    "[0-9a-f]": "hex digits in lower case",
    "[0-9]": "digits",
    "[!-~]": "printable characters without a space",
}
_PATTERN = re.compile(r"\^\(?(?P<of>\[[^]]+\])\{(?P<least>\d+)(?:,(?P<most>\d+))?\}(?:\)\?)?\$")
_CHOICES = re.compile(r".* is not (?:one of )?('[^']*'(?:, '[^']*')*)\.?$")


def expectation(problem: Mapping[str, Any]) -> str:
    """What would be right, like `expected at most 1000` or `expected a whole number`.

    Args:
        problem: One of the `errors()` of a pydantic `ValidationError`, with its context. Its own text is returned only
            where a validator of ours wrote it.
    """
    kind, context = str(problem["type"]), {name: as_whole(value) for name, value in (problem.get("ctx") or {}).items()}
    if kind in ("value_error", "assertion_error"):
        text = str(problem["msg"]).partition(", ")[2]
        if (choices := _CHOICES.fullmatch(text)) is None:
            return text[:1].lower() + text[1:]
        return f"expected {_one_of(choices[1])}"  # of a flag with an enumeration
    if kind == "string_pattern_mismatch":
        return f"expected {_in_words(str(context['pattern']))}"
    if kind in ("literal_error", "enum"):
        return f"expected {_one_of(str(context['expected']))}"
    if context.get("min_length") == 1:
        return "expected text that is not empty" if kind == "string_too_short" else "expected at least one entry"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind].format(**context)}"
    return f"expected {_KINDS.get(kind.partition('_')[0], 'another kind of value')}"


def as_whole(value: object) -> object:
    """5 for 5.0; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_of(quoted: str) -> str:
    choices = re.findall("'([^']*)'", quoted)
    return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"


def _in_words(pattern: str) -> str:
    form = _PATTERN.fullmatch(pattern)
    if form is None or form["of"] not in _CHARACTERS:
        return "text of another form"
    least, most = int(form["least"]), form["most"]
    number = f"{least} to {most}" if most and least else f"at most {most}" if most else str(least)
    return f"{number} {_CHARACTERS[form['of']]}"


def not_json(error: Exception) -> str:
    """Where a text stops being JSON; the parser's own words would name no field that was typed."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if "\n" in error.doc.rstrip() else ""
        return f"text that is no JSON from {line}column {error.colno} on"
    return "bytes that are no text" if isinstance(error, UnicodeDecodeError) else "text that no JSON parser can read"


def shown(value: object) -> str:
    """A value as errors show it: cut, since it may be anything."""
    try:
        return cut(repr(value))
    except ValueError:  # Python does not write numbers of thousands of digits
        return "a number of thousands of digits"


def cut(text: str, most: int = 100) -> str:
    """The first characters of a text, and how many it has."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
