"""`kvstore verify`: verify every record of a tier, quarantine corrupt ones, report."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from kvstore.cli.admin import AdminClient, report_of, run_job
from kvstore.cli.options import AsJson, Config, TokenFile, parse_size, quieted
from kvstore.cli.printing import bytes_text, progress_bar
from kvstore.cli.service import NO_SERVICE, ByService, ServiceUrl, admin_of, check_store, location_of, store_in_use
from kvstore.compose import open_tier
from kvstore.doctor.store_in_use import StoreInUse
from kvstore.errors import InvalidRequest
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.sizes import counted
from kvstore.settings import Settings
from kvstore.store.upkeep.verification import BadRecord, ByteRate, Findings, count_records, verify_tier
from kvstore.tiers.locations import ColdLocation, HotLocation, NoTier, TierLocation, parse_tier

BAD_FOUND, NOT_ALL_READ = 3, 1


def verify(  # noqa: PLR0917 - typer makes flags of them
    tier: Annotated[
        str, typer.Argument(help="hot or cold, as the settings name them, or a location like s3://bucket/prefix.")
    ] = "cold",
    config: Config = None,
    rate: Annotated[str, typer.Option(help="Most bytes to read per second, like 100MiB.")] = "100MiB",
    namespace: Annotated[str, typer.Option(help="Records of this namespace only, 32 hex digits.")] = "",
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    by_service: ByService = False,
    json_: AsJson = False,
) -> int:
    """Verify every record of a tier against its checksums and quarantine corrupt ones.

    Exit status: 0 no corrupt record, 3 corrupt records were found, 1 not everything could be read, 2 a wrong call.
    """
    bytes_per_s, only = parse_size(rate, "--rate", least_bytes=1, unit="MiB"), _namespace(namespace)
    is_location = tier not in ("hot", "cold")
    if by_service and (only is not None or is_location):
        raise InvalidRequest("--by-service verifies all of hot or all of cold: name one of these, without --namespace")
    store = store_in_use(NO_SERVICE if is_location else url, token_file, config)
    check_store(store, url)
    if by_service:
        findings, name, seconds = _by_service(admin_of(store, token_file, config), tier, bytes_per_s, quiet=json_)
    else:
        location = _parsed_location(tier) if is_location else _location(store, tier)
        if not is_location:
            typer.echo(f"store: {store}", err=True)
        name, started_s = str(location), SYSTEM_CLOCK.monotonic_s()
        with quieted():  # quarantined records are listed in the report
            findings = asyncio.run(_verify(location, store.settings, only, bytes_per_s, quiet=json_))
        seconds = round(SYSTEM_CLOCK.monotonic_s() - started_s, 3)
    if json_:
        typer.echo(json.dumps({"tier": name, "seconds": seconds, **asdict(findings)}))
    else:
        _show(name, findings, seconds)
    return BAD_FOUND if findings.num_bad else NOT_ALL_READ if findings.num_unread else 0


async def _verify(
    location: HotLocation | ColdLocation,
    settings: Settings,
    namespace: NamespaceId | None,
    bytes_per_s: int,
    *,
    quiet: bool,
) -> Findings:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
    async with open_tier(location, settings) as tier:
        with progress_bar(*columns, TimeRemainingColumn(), quiet=quiet) as progress:
            bar = progress.add_task("counting", total=None, size="")
            num_records, num_bytes = await count_records(tier, namespace)
            progress.update(bar, total=num_bytes)

            def show(findings: Findings) -> None:
                text = f"{findings.num_records:,} of {num_records:,} records, {findings.num_bad:,} corrupt"
                size = f"{bytes_text(findings.num_bytes)} of {bytes_text(num_bytes)}"
                progress.update(bar, description=text, completed=findings.num_bytes, size=size)

            return await verify_tier(tier, namespace=namespace, rate=ByteRate(bytes_per_s), progress=show)


def _by_service(client: AdminClient, tier: str, bytes_per_s: int, *, quiet: bool) -> tuple[Findings, str, float]:
    """Run it as a job of the service; returns its findings, the name of the tier, and the seconds."""
    job = run_job(client, f"tiers/{tier}/verify", query={"bytes_per_s": bytes_per_s}, quiet=quiet)
    findings = report_of(Findings, job["report"])
    findings.bad = [report_of(BadRecord, one) for one in job["report"]["bad"]]
    return findings, f"{tier} of the service at {client.url}", job["ended_s"] - job["created_s"]


def _show(location: str, findings: Findings, seconds: float) -> None:
    size = f"{bytes_text(findings.num_bytes)} in {seconds:.1f} s"
    typer.echo(f"{location}: {counted(findings.num_records, 'record')}, {findings.num_whole:,} whole ({size})")
    for bad in findings.bad:
        typer.echo(f"corrupt, quarantined: {bad.name} ({bytes_text(bad.num_bytes)}): {bad.reason}")
    for name in findings.unread:
        typer.echo(f"could not be read: {name}")
    if findings.num_gone:
        typer.echo(f"deleted or evicted during the run: {findings.num_gone:,}")
    if more := findings.num_bad - len(findings.bad) + findings.num_unread - len(findings.unread):
        typer.echo(f"and {more:,} more")


def _location(store: StoreInUse, name: str) -> HotLocation | ColdLocation:
    location = location_of(store, name)
    if isinstance(location, NoTier):
        if store.service:
            raise InvalidRequest(f"there is nothing to verify: {name} of the service at {store.service} is memory:")
        step = f"set KVSTORE_{name.upper()}, or name the service's settings file with --config"
        raise InvalidRequest(f"the settings here name no such tier: {name}. Start the service, or {step}")
    return location


def _parsed_location(text: str) -> TierLocation:
    if ":" not in text and "/" not in text:
        raise InvalidRequest(f"TIER: expected hot, cold or a location like s3://bucket/prefix, got {text!r}")
    if text == "memory:":
        raise InvalidRequest(f"TIER: there is no such tier, expected a location like s3://bucket/prefix, got {text!r}")
    return parse_tier(text, field="TIER")


def _namespace(text: str) -> NamespaceId | None:
    if text and not re.fullmatch(r"[0-9a-f]{32}", text):
        raise InvalidRequest("--namespace: expected 32 hex digits in lower case", seen=repr(text))
    return NamespaceId(bytes.fromhex(text)) if text else None
