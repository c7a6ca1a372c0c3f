"""`kvstore doctor`: what is wrong with this set-up, and the command or setting that fixes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import kvstore
from kvstore.cli.admin import ALIVE_S
from kvstore.cli.options import AsJson, Config, quieted, tls_of
from kvstore.cli.printing import console_of, echo_json, table_of
from kvstore.cli.service import NO_SERVICE, parsed_address, service_url, store_in_use
from kvstore.client.remote import EMBEDDED
from kvstore.doctor.check import Finding, Verdict, run_checks, without
from kvstore.doctor.checks import checks_of
from kvstore.doctor.service import ServiceAddress
from kvstore.doctor.store_in_use import StoreInUse
from kvstore.errors import KVStoreError
from kvstore.service.hidden_secrets import secrets_of
from kvstore.settings import TOKEN_VARIABLE, load_settings

UNHEALTHY = 1
_URL_VARIABLE = "KVSTORE_CONNECTOR_URL"

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red", Verdict.SKIPPED: "dim"}


class EngineName(Enum):
    """Engines that can be checked, by the door that they use."""

    VLLM = "vllm"
    OFFLOADING = "offloading"
    SGLANG = "sglang"


def doctor(  # noqa: PLR0917 - typer makes flags of them
    config: Config = None,
    url: Annotated[
        str,
        typer.Option(
            envvar=_URL_VARIABLE,
            help="The url of engines: unix:/path, tcp://..., tls://... or embedded:. Default: as the settings say.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVSTORE_CONNECTOR_TOKEN_FILE",
            help="A file with the service's token. Default: $KVSTORE_TOKEN, $KVSTORE_TOKEN_FILE.",
        ),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="Also check the engine in this Python: the GPU of vLLM with our connector, vLLM's own offloading, or "
            "SGLang. Default: none."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, help="Seconds for each subject; they run in parallel.")
    ] = 5.0,
    json_: AsJson = False,
) -> int:
    """Check versions, service, limits, Redis, S3, directory, clocks and namespaces, and show how to fix each problem.

    Run it where the service runs. Small probes (keys, objects, files) are written and removed.
    Exit status: 0 nothing failed (there may be warnings), 1 something failed, 2 a wrong call.
    """
    local = load_settings({}, config=config)
    given = _URL_VARIABLE if url and os.getenv(_URL_VARIABLE) == url else "--url"
    if url not in ("", EMBEDDED, NO_SERVICE):
        parsed_address(url, NO_SERVICE, given=given)
    try:
        store = store_in_use(url, token_file, config, min(timeout_s, ALIVE_S))
        store = replace(store, found=f"given as {given}") if url and store.found else store
    except KVStoreError:  # the check of the service reports why
        store = StoreInUse(local)
    settings = store.settings
    if url in ("", NO_SERVICE):
        is_named = "listen" in local.model_fields_set or not store.service
        url = service_url(local) if is_named else str(settings.listen)
    admin = settings.admin_listen if store.service or url == str(settings.listen) else None
    token = "" if token_file is not None else os.getenv(TOKEN_VARIABLE, "").strip()
    address = ServiceAddress(
        url, token_file or (None if token else settings.token_file), tls_of(settings), admin, token
    )
    checks = checks_of(store, address, engine.value if engine is not None else None)
    secrets = [*secrets_of(settings), *secrets_of(local)]
    with quieted(logging.CRITICAL, also=("asyncio",)):  # problems are reported as findings
        found = [without(one, secrets) for one in run_checks(checks, timeout_s=timeout_s)]
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    if json_:
        where = {
            "hot": str(settings.hot),
            "cold": str(settings.cold),
            "told_by": store.service or None,
            "found": store.found or None,
        }
        echo_json(
            {
                "release": kvstore.__version__,
                "store": where,
                "counts": {verdict.value: count for verdict, count in counts.items()},
                "findings": [{**asdict(one), "verdict": one.verdict.value} for one in found],
            }
        )
    else:
        _show(found, store, counts)
    return UNHEALTHY if counts[Verdict.FAILED] else 0


def _show(found: Sequence[Finding], store: StoreInUse, counts: Mapping[Verdict, int]) -> None:
    console = console_of()
    console.print(escape(f"store: {store}"), soft_wrap=True)
    table = table_of(f"kvstore doctor, release {kvstore.__version__}", "check", "verdict", "seen", "expected")
    for one in found:
        verdict = f"[{_STYLES[one.verdict]}]{one.verdict.value}[/]"
        table.add_row(escape(one.name), verdict, escape(one.seen), escape(one.expected))
    console.print(table)
    for one in found:
        if one.fix:
            console.print(f"[{_STYLES[one.verdict]}]{escape(one.name)}[/]: {escape(one.fix)}", soft_wrap=True)
    console.print(", ".join(f"[{_STYLES[verdict]}]{count} {verdict.value}[/]" for verdict, count in counts.items()))
