"""Flags that most verbs have, and the values that verbs make of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvstore.errors import InvalidRequest
from kvstore.runtime.sizes import parse_bytes
from kvstore.service.authentication import read_token
from kvstore.settings import TOKEN_VARIABLE, Settings
from kvstore.wire.tls import ClientTls

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Config: TypeAlias = Annotated[Path | None, typer.Option(help="TOML file with settings. Default: $KVSTORE_CONFIG.")]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with the token, chmod 600. Default: $KVSTORE_TOKEN_FILE, or the token in ${TOKEN_VARIABLE}."
    ),
]


def token_of(settings: Settings, token_file: Path | None) -> str:
    """The token: from the flag, else from the environment, else from the settings; empty: none.

    Raises:
        InvalidRequest: A file cannot be read, or others may read it.
    """
    if token_file is not None:
        try:
            return read_token(token_file)
        except InvalidRequest as error:
            details = error.details | {"field": "--token-file"}
            raise InvalidRequest(f"--token-file: {error.message}", **details) from error
    if token := os.getenv(TOKEN_VARIABLE, "").strip():
        return token
    return read_token(settings.token_file) if settings.token_file is not None else ""


def parse_size(text: str, flag: str, *, least_bytes: int = 0, unit: str = "GiB") -> int:
    """A size in bytes that was given with a flag, like `100MiB`. It has a unit, unless it is 0: `5` would be 5 bytes.

    Args:
        unit: A usual one, for errors.

    Raises:
        InvalidRequest: It is not a size, or below `least_bytes`.
    """
    if text.strip().isdecimal() and int(text) > 0:
        raise InvalidRequest(f"{flag}: expected a size with its unit, like {text.strip()}{unit}", seen=repr(text))
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        expected = f"expected a size with its unit, like 100{unit}" if "like" in str(error) else str(error)
        raise InvalidRequest(f"{flag}: {expected}", seen=repr(text)) from error
    if num_bytes < least_bytes:
        raise InvalidRequest(f"{flag}: expected at least {least_bytes} B", seen=repr(text))
    return num_bytes


def tls_of(settings: Settings) -> ClientTls:
    return ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)


@contextmanager
def quieted(level: int = logging.ERROR, *, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Hide logs of `kvstore` and of the loggers `also` below `level`: a verb reports the same in its own words."""
    loggers = [logging.getLogger(name) for name in ("kvstore", *also)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
