"""`kvstore gc`: delete what serves no hit: retired weights, incomplete boundaries, unfinished deletions, orphans."""

from __future__ import annotations

import typer

from kvstore.cli.administering import AdminUrl, AsJson, Config, Timeout, TokenFile, Yes, administered
from kvstore.cli.shown import amounts_text, counted, echo_json
from kvstore.cli.watching import watched

__all__ = ["gc"]

_WORDS = {
    "retired": "of retired weights",
    "incomplete": "incomplete, or without the prefix before it",
    "unfinished": "left by interrupted deletions",
    "orphans": "unknown to the catalog",
}


def gc(
    *,
    yes: Yes = False,
    admin_url: AdminUrl = "",
    token_file: TokenFile = None,
    config: Config = None,
    timeout_s: Timeout = 60.0,
    json_: AsJson = False,
) -> None:
    """Delete what can serve no hit any more, except what is pinned. Without --yes nothing is deleted.

    It runs as a job of the service: Ctrl-C cancels it; run it again to continue. A tenant's token covers its own data.
    """
    with administered(admin_url, token_file, timeout_s, config) as client:
        job = watched(client, "gc", query={"confirm": yes}, quiet=json_)
    if json_:
        echo_json(job)
        return
    report = job["report"]
    for kind, words in _WORDS.items():
        typer.echo(f"{'deleted' if yes else 'would delete'}, {words}: {amounts_text(report[kind])}")
    if report["num_pinned"]:
        typer.echo(f"kept, pinned: {counted(report['num_pinned'], 'boundary', 'boundaries')}")
    for namespace in report["undescribed_namespaces"]:
        typer.echo(f"skipped, without a description: namespace {namespace}")
    for note in report["notes"]:
        typer.echo(f"note: {note}")
    if not yes and any(report[kind] for kind in _WORDS):
        typer.echo("nothing was deleted: add --yes to do it")
