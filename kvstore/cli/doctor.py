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
from kvstore.cli.store_in_use import NONE, StoreInUse, store_in_use
from kvstore.cli.tables import console_of, table_of
from kvstore.doctor import (
    Finding,
    ServiceAddress,
    ToldStore,
    Verdict,
    checks_of,
    run_checks,
    without,
)
from kvstore.errors import KVStoreError
from kvstore.service.reported_settings import secrets_of
from kvstore.settings import TOKEN_VARIABLE, Settings, load_settings
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

    Run it where the service runs: the service tells which store it uses. Small probes (keys, objects, files) are
    written and removed.
    Exit status: 0 nothing failed (there may be warnings), 1 something failed, 2 a wrong call.
    """
    local = load_settings({}, config=config)
    store = _store(local, url, token_file, config, timeout_s)
    settings = store.settings
    tls = ClientTls(settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    if url in ("", NONE):
        is_named = "listen" in local.model_fields_set or not store.told_by
        url = service_url(local) if is_named else str(settings.listen)
    admin = settings.admin_listen if store.told_by or url == str(settings.listen) else None
    token = "" if token_file is not None else os.getenv(TOKEN_VARIABLE, "").strip()
    address = ServiceAddress(url, token_file or (None if token else settings.token_file), tls, admin, token)
    obstacles = {name: why for name in ("hot", "cold") if (why := store.obstacle(name)) is not None}
    told = ToldStore(str(store), bool(store.told_by), store.problem, store.differs, obstacles)
    checks = checks_of(settings, address, told)
    secrets = [*secrets_of(settings), *secrets_of(local)]
    with quieted(logging.CRITICAL, also=("asyncio",)):  # problems are reported as findings
        found = [without(one, secrets) for one in run_checks(checks, timeout_s=timeout_s)]
    _show_json(found, store) if json_ else _show(found, store)
    return UNHEALTHY if any(one.verdict is Verdict.FAILED for one in found) else 0


def _store(local: Settings, url: str, token_file: Path | None, config: Path | None, timeout_s: float) -> StoreInUse:
    """The store of the service that runs; that of the settings here where none tells, which the checks say."""
    try:
        return store_in_use(url, token_file, config, timeout_s)
    except KVStoreError:  # why it does not answer is a finding
        return StoreInUse(local)


def _show_json(found: Sequence[Finding], store: StoreInUse) -> None:
    findings = [{**asdict(one), "verdict": one.verdict.value} for one in found]
    counts = {verdict.value: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    where = {"hot": str(store.settings.hot), "cold": str(store.settings.cold), "told_by": store.told_by or None}
    said = {"release": kvstore.__version__, "store": where, "counts": counts, "findings": findings}
    typer.echo(json.dumps(said, indent=2))


def _show(found: Sequence[Finding], store: StoreInUse) -> None:
    console = console_of()
    console.print(escape(str(store)), soft_wrap=True)
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
