"""`kvstore rm` and `kvstore gc`: delete what is named, or what can no longer be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.admin import (
    AdminClient,
    NamespaceArgument,
    Yes,
    admin_verb,
    parse_duration,
    run_job,
    whole_namespace,
    whole_prefix,
)
from kvstore.cli.printing import amounts_text, echo_json
from kvstore.errors import InvalidRequest
from kvstore.runtime.sizes import counted
from kvstore.runtime.wrong_values import not_json

_STDIN = Path("-")
_GARBAGE = {
    "retired": "of retired weights",
    "incomplete": "incomplete, or without the prefix before it",
    "unfinished": "left by interrupted deletions",
    "orphans": "unknown to the catalog",
}


@admin_verb(60.0)
def rm(  # noqa: PLR0917 - typer makes flags of them
    client: AdminClient,
    json_: bool,
    namespace: NamespaceArgument,
    prefix: Annotated[str | None, typer.Argument(help="One boundary of it. Default: the whole namespace.")] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Also delete the boundaries that continue it.")
    ] = False,
    token_ids: Annotated[
        Path | None,
        typer.Option(help="A JSON file with token ids: delete prompts that begin with them; - reads standard input."),
    ] = None,
    salt_file: Annotated[
        Path | None, typer.Option(help="A file with the cache_salt of these prompts: those of one user.")
    ] = None,
    unused: Annotated[str | None, typer.Option(help="Only what was unused for this long, like 30d.")] = None,
    yes: Yes = False,
) -> None:
    """Delete stored boundaries from every tier, except pinned ones. Without --yes nothing is deleted.

    Deleting more than one boundary runs as a job of the service: Ctrl-C cancels it; run it again to continue.
    """
    # without a prefix and an age the whole namespace goes, so an empty one, as of a shell's unset variable, is refused
    is_one = prefix is not None and not recursive
    if is_one and (token_ids or salt_file or unused):
        raise InvalidRequest("--token-ids, --salt-file and --unused do not apply to one boundary: add --recursive")
    if recursive and prefix is None:
        raise InvalidRequest("--recursive needs a boundary: name it after the namespace")
    body: dict[str, object] = {} if prefix is None else {"prefix": whole_prefix(prefix)}
    if token_ids is not None:
        body["token_ids"] = _read_token_ids(token_ids)
    if salt_file is not None:
        body["cache_salt"] = _read(salt_file).rstrip("\n")
        if not body["cache_salt"]:
            raise InvalidRequest("--salt-file: expected a salt, the file is empty", path=salt_file)
    if unused is not None:
        body["unused_s"] = parse_duration(unused, "--unused")
    whole = whole_namespace(client, namespace)
    if is_one:
        report = answer = client.call("DELETE", "prefixes", whole, str(prefix), query={"confirm": yes})
    else:
        body["namespace"] = whole
        answer = run_job(client, "deletions", query={"confirm": yes}, body=body, quiet=json_)
        report = answer["report"]
    if json_:
        echo_json(answer)
        return
    typer.echo(f"{'deleted' if yes else 'would delete'}: {amounts_text(report['by_tier'])}")
    _show_rest(report, is_trial=not yes and bool(report["by_tier"]))


@admin_verb(60.0)
def gc(client: AdminClient, json_: bool, yes: Yes = False) -> None:
    """Delete what can no longer be used, except what is pinned. Without --yes nothing is deleted.

    It runs as a job of the service: Ctrl-C cancels it; run it again to continue. A tenant's token covers its own data.
    Records that the catalog does not have are compared again a minute later, before they are deleted. In S3 those that
    are younger than a day stay: a service that cannot reach Redis reports later what it writes.
    """
    job = run_job(client, "gc", query={"confirm": yes}, quiet=json_)
    if json_:
        echo_json(job)
        return
    report = job["report"]
    for kind, words in _GARBAGE.items():
        typer.echo(f"{'deleted' if yes else 'would delete'}, {words}: {amounts_text(report[kind])}")
    for namespace in report["undescribed_namespaces"]:
        typer.echo(f"skipped, without a description: namespace {namespace}")
    _show_rest(report, is_trial=not yes and any(report[kind] for kind in _GARBAGE))


def _show_rest(report: Mapping[str, Any], *, is_trial: bool) -> None:
    for note in report.get("notes", ()):
        typer.echo(f"note: {note}")
    if report["num_pinned"]:
        typer.echo(f"kept, pinned: {counted(report['num_pinned'], 'boundary', 'boundaries')}")
    if is_trial:
        typer.echo("nothing was deleted: add --yes to do it")


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if path == _STDIN else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _read_token_ids(path: Path) -> list[int]:
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"expected a JSON list of token ids in {path}", seen=not_json(error)) from error
    if not isinstance(found, list):
        raise InvalidRequest(f"expected a JSON list of token ids in {path}", seen=type(found).__name__)
    return found
