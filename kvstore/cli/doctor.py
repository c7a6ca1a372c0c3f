"""`kvstore doctor`: what is wrong with this set-up, and the command or setting that fixes it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import kvstore
from kvstore.cli.asking import service_url
from kvstore.cli.quieting import quieted
from kvstore.cli.tables import console_of, table_of
from kvstore.doctor import (
    Finding,
    ServiceAddress,
    Verdict,
    checks_of,
    run_checks,
    without,
)
from kvstore.service.secrets import secrets_of
from kvstore.settings import TOKEN_VARIABLE, load_settings
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
        typer.Option(
            envvar="KVSTORE_CONNECTOR_TOKEN_FILE", help="The service's token; else $KVSTORE_TOKEN, $KVSTORE_TOKEN_FILE."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, help="Seconds for each subject; all are asked at once.")
    ] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> int:
    """Check versions, service, limits, Redis, S3, directory, clocks and namespaces, and say how to fix each problem.

    Run it where the service runs, with its settings. Small probes (keys, objects, files) are written and removed.
    Exit status: 0 nothing failed (there may be warnings), 1 something failed, 2 a wrong call.
    """
    settings = load_settings({}, config=config)
    tls = ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    url = url or service_url(settings)
    admin = settings.admin_listen if url == str(settings.listen) else None
    token = "" if token_file is not None else os.getenv(TOKEN_VARIABLE, "").strip()
    address = ServiceAddress(url, token_file or (None if token else settings.token_file), tls, admin, token)
    checks = checks_of(settings, address)
    secrets = secrets_of(settings)
    with quieted(logging.CRITICAL, also=("asyncio",)):  # problems are reported as findings
        found = [without(one, secrets) for one in run_checks(checks, timeout_s=timeout_s)]
    _show_json(found) if json_ else _show(found)
    return UNHEALTHY if any(one.verdict is Verdict.FAILED for one in found) else 0


def _show_json(found: Sequence[Finding]) -> None:
    findings = [{**asdict(one), "verdict": one.verdict.value} for one in found]
    counts = {verdict.value: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    typer.echo(json.dumps({"release": kvstore.__version__, "counts": counts, "findings": findings}, indent=2))


def _show(found: Sequence[Finding]) -> None:
    console = console_of()
    table = table_of(f"kvstore doctor, release {kvstore.__version__}", "check", "verdict", "seen", "expected")
    for one in found:
        verdict = f"[{_STYLES[one.verdict]}]{one.verdict.value}[/]"
        table.add_row(escape(one.name), verdict, escape(one.seen), escape(one.expected))
    console.print(table)
    for one in found:
        if one.fix:
            console.print(f"[{_STYLES[one.verdict]}]{escape(one.name)}[/]: {escape(one.fix)}", soft_wrap=True)
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    console.print(", ".join(f"[{_STYLES[verdict]}]{count} {verdict.value}[/]" for verdict, count in counts.items()))
