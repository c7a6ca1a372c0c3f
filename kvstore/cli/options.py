"""Flags that most verbs have, how sizes in flags are read, and the token to use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvstore.errors import InvalidRequest
from kvstore.runtime.sizes import parse_bytes
from kvstore.service.authentication import read_token
from kvstore.settings import TOKEN_VARIABLE, Settings

__all__ = ["AsJson", "Config", "TokenFile", "parse_size", "token_of"]

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Config: TypeAlias = Annotated[Path | None, typer.Option(help="TOML file with settings; else $KVSTORE_CONFIG.")]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with the token, chmod 600; else $KVSTORE_TOKEN_FILE, or the token in ${TOKEN_VARIABLE}."
    ),
]


def token_of(settings: Settings, token_file: Path | None) -> str:
    """The token: from the flag, else from the environment, else from the settings; empty: none.

    Raises:
        InvalidRequest: A file cannot be read, or others may read it.
    """
    if token_file is not None:
        return read_token(token_file)
    if token := os.getenv(TOKEN_VARIABLE, "").strip():
        return token
    return read_token(settings.token_file) if settings.token_file is not None else ""


def parse_size(text: str, name: str) -> int:
    """A size in bytes that was given with the option `name`, like `100MiB`.

    Raises:
        InvalidRequest: It is not a size.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", seen=repr(text)) from error
