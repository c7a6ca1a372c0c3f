"""`kvstore doctor`: what is wrong with this set-up, and the command or setting that mends it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvstore
from kvstore.doctor import (
    EMBEDDED,
    Finding,
    ServiceAddress,
    Verdict,
    checks_of,
    run_checks,
    without,
)
from kvstore.service.secrets import secrets_of
from kvstore.settings import Settings, load_settings
from kvstore.wire.address import UnixAddress
from kvstore.wire.tls import ClientTls

__all__ = ["doctor"]

UNHEALTHY = 1

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red", Verdict.SKIPPED: "dim"}


def doctor(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; else $KVSTORE_CONFIG.")] = None,
    url: Annotated[
        str,
        typer.Option(
            envvar="KVSTORE_CONNECTOR_URL",
            help="What engines have as url: unix:/path, tcp://..., tls://... or embedded:; else as the settings say.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="KVSTORE_CONNECTOR_TOKEN_FILE", help="The service's token; else $KVSTORE_TOKEN_FILE."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, help="Seconds for each subject; all are asked at once.")
    ] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> int:
    """Check versions, service, limits, Redis, S3, directory, clocks and namespaces, and say how to mend each.

    Run it where the service runs, with its settings. A small key and a small object are written and removed again.
    Exit status: 0 nothing failed (there may be warnings), 1 something failed, 2 a wrong call.
    """
    settings = load_settings({}, config=config)
    tls = ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    url = url or _url_of(settings)
    admin = settings.admin_listen if url == str(settings.listen) else None
    address = ServiceAddress(url, token_file or settings.token_file, tls, admin)
    checks = checks_of(settings, address)
    secrets = secrets_of(settings)
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)  # what is wrong stands in the findings
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    found = [without(one, secrets) for one in run_checks(checks, timeout_s=timeout_s)]
    _show_json(found) if json_ else _show(found)
    return UNHEALTHY if any(one.verdict is Verdict.FAILED for one in found) else 0


def _url_of(settings: Settings) -> str:
    """Where the service of these settings listens; where nothing was set and nothing listens, the private one."""
    is_set = bool({"listen", "hot", "cold"} & settings.model_fields_set)
    listen = settings.listen
    is_there = isinstance(listen, UnixAddress) and Path(listen.path).exists()
    return str(listen) if is_set or is_there else EMBEDDED


def _show_json(found: Sequence[Finding]) -> None:
    findings = [{**asdict(one), "verdict": one.verdict.value} for one in found]
    counts = {verdict.value: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    typer.echo(json.dumps({"release": kvstore.__version__, "counts": counts, "findings": findings}, indent=2))


def _show(found: Sequence[Finding]) -> None:
    console = Console()
    table = Table("check", "verdict", title=f"kvstore doctor, release {kvstore.__version__}")
    table.add_column("seen", overflow="fold")
    table.add_column("expected", overflow="fold")
    for one in found:
        verdict = f"[{_STYLES[one.verdict]}]{one.verdict.value}[/]"
        table.add_row(escape(one.name), verdict, escape(one.seen), escape(one.expected))
    console.print(table)
    for one in found:
        if one.fix:
            console.print(f"[{_STYLES[one.verdict]}]{escape(one.name)}[/]: {escape(one.fix)}", soft_wrap=True)
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    console.print(", ".join(f"[{_STYLES[verdict]}]{count} {verdict.value}[/]" for verdict, count in counts.items()))
