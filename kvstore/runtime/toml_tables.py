"""TOML files that are a list of `[[table]]` entries, each checked against a pydantic model."""

from __future__ import annotations

import re
import tomllib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvstore.errors import InvalidRequest
from kvstore.runtime.wrong_values import expectation, shown

_POSITION = re.compile(r"\(at [^)]*\)$")

Entry = TypeVar("Entry", bound="TableEntry")


class TableEntry(BaseModel):
    """Base of an entry. The `description` of each field says what is expected; errors show it.

    A field that may hold a secret has `repr=False`: errors do not show its value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


def parse_tables(content: bytes, model: type[Entry], *, table: str, what: str, source: object) -> list[Entry]:
    """The entries of a file, in order; a file may have none.

    Args:
        content: The file's content, in UTF-8.
        model: The fields of an entry.
        table: The name between the double brackets.
        what: What errors call the file, like "credentials file".
        source: Where the content comes from, for errors.

    Raises:
        InvalidRequest: The content is not TOML, has something else than these tables, or an entry is wrong. The message
            names file, entry and field, and says what was expected. No secret is shown.
    """
    try:
        parsed = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or a number of thousands of digits
        position = _POSITION.search(str(error))  # the rest of the parser's message may quote a secret
        raise InvalidRequest(
            f"invalid {what}: expected TOML", source=source, **({"seen": position[0]} if position else {})
        ) from None
    entries = parsed.get(table, [])
    unknown = [name for name in parsed if name != table]
    if unknown or not isinstance(entries, list):
        raise InvalidRequest(
            f"invalid {what}: expected [[{table}]] tables and nothing else",
            source=source,
            seen=", ".join(unknown) or type(entries).__name__,
        )
    return [
        _parse_entry(entry, model, what, f"{table} {number} of {source}") for number, entry in enumerate(entries, 1)
    ]


def _parse_entry(entry: object, model: type[Entry], what: str, where: str) -> Entry:
    if not isinstance(entry, dict):
        raise InvalidRequest(f"invalid {what}: expected a table", entry=where, seen=type(entry).__name__)
    try:
        return model.model_validate(entry)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # a misspelt field is reported before the field that is missing for it
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    if not problem["loc"]:
        raise InvalidRequest(f"invalid {what}: {expectation(problem)}", entry=where)
    name = str(problem["loc"][0])
    if name not in model.model_fields:
        known = ", ".join(model.model_fields)
        raise InvalidRequest(f"invalid {what}: unknown field, expected one of {known}", entry=where, field=name)
    field = model.model_fields[name]
    seen = "nothing" if problem["type"] == "missing" else shown(problem["input"])
    is_shown = problem["type"] == "missing" or field.repr
    raise InvalidRequest(
        f"invalid {what}: expected {field.description}", entry=where, field=name, **({"seen": seen} if is_shown else {})
    )
