"""`kvstore rm`: delete a namespace, one boundary, all that continue it, one user's prompts, or what is unused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.administering import AdminUrl, AsJson, Config, NamespaceArgument, Timeout, TokenFile, Yes, administered
from kvstore.cli.shown import amounts_text, counted, echo_json, parse_duration, whole_namespace, whole_prefix
from kvstore.cli.watching import watched
from kvstore.errors import InvalidRequest

__all__ = ["rm"]

_STDIN = Path("-")


def rm(
    *,
    namespace: NamespaceArgument,
    prefix: Annotated[str, typer.Argument(help="One boundary of it; none: all of the namespace.")] = "",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="And all that continue it.")] = False,
    token_ids: Annotated[
        Path | None,
        typer.Option(help="A JSON file with token ids: prompts that begin with them; - reads standard input."),
    ] = None,
    salt_file: Annotated[
        Path | None, typer.Option(help="A file with the cache_salt of those prompts: one user's alone.")
    ] = None,
    unused: Annotated[str, typer.Option(help="Only what was unused for this long, like 30d.")] = "",
    yes: Yes = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 60.0,
    json_: AsJson = False,
) -> None:
    """Delete stored boundaries from every tier, except pinned ones. Without --yes nothing is deleted.

    Deleting more than one boundary runs as a job of the service: Ctrl-C cancels it; run it again to continue.
    """
    is_one = bool(prefix) and not recursive
    if is_one and (token_ids or salt_file or unused):
        raise InvalidRequest("these options need more than one boundary: leave them out, or add --recursive")
    if recursive and not prefix:
        raise InvalidRequest("--recursive needs a boundary: name it after the namespace")
    body: dict[str, object] = {} if not prefix else {"prefix": whole_prefix(prefix)}
    if token_ids is not None:
        body["token_ids"] = _read_token_ids(token_ids)
    if salt_file is not None:
        body["cache_salt"] = _read(salt_file).rstrip("\n")
    if unused:
        body["unused_s"] = parse_duration(unused, "unused")
    with administered(admin_url, token_file, timeout_s, config) as client:
        body["namespace"] = whole_namespace(client, namespace)
        if is_one:
            path = ("prefixes", str(body["namespace"]), prefix)
            report = client.call("DELETE", *path, query={"confirm": yes})
            answer: object = report
        else:
            answer = job = watched(client, "deletions", query={"confirm": yes}, body=body, quiet=json_)
            report = job["report"]
    if json_:
        echo_json(answer)
        return
    typer.echo(f"{'deleted' if yes else 'would delete'}: {amounts_text(report['by_tier'])}")
    if report["num_pinned"]:
        typer.echo(f"kept, pinned: {counted(report['num_pinned'], 'boundary', 'boundaries')}")
    if not yes and report["by_tier"]:
        typer.echo("nothing was deleted: add --yes to do it")


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if path == _STDIN else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            "cannot read the file", path=path, error=getattr(error, "strerror", None) or error
        ) from error


def _read_token_ids(path: Path) -> list[int]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise InvalidRequest("expected a JSON list of token ids", path=path, error=error) from error
    if not isinstance(found, list):
        raise InvalidRequest("expected a JSON list of token ids", path=path, seen=type(found).__name__)
    return found
