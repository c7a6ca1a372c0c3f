"""`kvstore verify`: verify every record of a tier, quarantine corrupt ones, report."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvstore.cli.administering import AdminClient
from kvstore.cli.bars import bar_of
from kvstore.cli.options import Config, TokenFile, parse_size
from kvstore.cli.quieting import quieted
from kvstore.cli.store_in_use import NONE, ByService, ServiceUrl, StoreInUse, client_of, store_in_use
from kvstore.cli.watching import watched
from kvstore.compose import open_tier
from kvstore.errors import InvalidRequest
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.store.upkeep.verification import BadRecord, ByteRate, Findings, count_records, verify_tier
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import ColdLocation, HotLocation, NoTier, parse_cold, parse_hot

__all__ = ["verify"]

BAD_FOUND, NOT_ALL_READ = 3, 1
_JOB_ANSWER_S = 30.0


def verify(  # noqa: PLR0917 - typer makes flags of them
    tier: Annotated[
        str, typer.Argument(help="hot or cold, as the settings name them, or a location like s3://bucket/prefix.")
    ] = "cold",
    config: Config = None,
    rate: Annotated[str, typer.Option(help="Bytes per second, like 100MiB; the tier has other users.")] = "100MiB",
    namespace: Annotated[str, typer.Option(help="Records of this namespace only, 32 hex digits.")] = "",
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    by_service: ByService = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> int:
    """Verify every record of a tier against its checksums and quarantine corrupt ones.

    Exit status: 0 all whole, 3 corrupt records were found, 1 not everything could be read, 2 a wrong call.
    """
    bytes_per_s, only = parse_size(rate, "rate"), _namespace(namespace)
    byte_rate = ByteRate(bytes_per_s)
    if by_service and (only is not None or tier not in ("hot", "cold")):
        raise InvalidRequest("a service verifies all of hot or of cold: leave --by-service out", seen=repr(tier))
    is_named = tier not in ("hot", "cold")
    store = store_in_use(NONE if is_named else url, token_file, config)
    store.check()
    if by_service:
        client = client_of(store, token_file, config, _JOB_ANSWER_S)
        return _by_service(client, tier, bytes_per_s, json_=json_)
    location = _named_location(tier) if is_named else _location(store, tier)
    settings = store.settings
    if not is_named:
        typer.echo(str(store), err=True)
    started_s = SYSTEM_CLOCK.monotonic_s()

    async def run() -> Findings:
        async with open_tier(location, settings) as opened:
            with _bar(quiet=json_) as progress:
                return await _walk(opened, only, byte_rate, progress)

    with quieted():  # quarantined records are listed in the report
        findings = asyncio.run(run())
    seconds = SYSTEM_CLOCK.monotonic_s() - started_s
    if json_:
        typer.echo(json.dumps({"tier": str(location), "seconds": round(seconds, 3), **asdict(findings)}))
    else:
        _show(str(location), findings, seconds)
    return BAD_FOUND if findings.num_bad else NOT_ALL_READ if findings.num_unread else 0


async def _walk(tier: Tier, namespace: NamespaceId | None, rate: ByteRate, progress: Progress) -> Findings:
    bar = progress.add_task("counting", total=None)
    num_records, num_bytes = await count_records(tier, namespace)
    progress.update(bar, total=num_bytes)

    def tell(findings: Findings) -> None:
        text = f"{findings.num_records:,} of {num_records:,} records, {findings.num_bad:,} corrupt"
        progress.update(bar, description=text, completed=findings.num_bytes)

    return await verify_tier(tier, namespace=namespace, rate=rate, progress=tell)


def _bar(*, quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return bar_of(*columns, TimeRemainingColumn(), quiet=quiet)


def _show(location: str, findings: Findings, seconds: float) -> None:
    say: Callable[[str], None] = typer.echo
    size = f"{findings.num_bytes:,} bytes in {seconds:.1f} s"
    say(f"{location}: {findings.num_records:,} records, {findings.num_whole:,} whole ({size})")
    for bad in findings.bad:
        say(f"corrupt, quarantined: {bad.name} ({bad.num_bytes:,} bytes): {bad.reason}")
    for name in findings.unread:
        say(f"could not be read: {name}")
    if findings.num_gone:
        say(f"deleted meanwhile: {findings.num_gone:,}")
    if more := findings.num_bad - len(findings.bad) + findings.num_unread - len(findings.unread):
        say(f"and {more:,} more")


def _by_service(client: AdminClient, tier: str, bytes_per_s: int, *, json_: bool) -> int:
    """Have the service do it; returns the exit status."""
    job = watched(client, f"tiers/{tier}/verify", query={"bytes_per_s": bytes_per_s}, quiet=json_)
    report, where = job["report"], f"{tier} of the service at {client.url}"
    seconds = job["ended_s"] - job["created_s"]
    if json_:
        typer.echo(json.dumps({"tier": where, "seconds": seconds, **report}))
    else:
        bad = [BadRecord(one["name"], one["num_bytes"], one["reason"]) for one in report["bad"]]
        _show(where, Findings(**{**report, "bad": bad}), seconds)
    return BAD_FOUND if report["num_bad"] else NOT_ALL_READ if report["num_unread"] else 0


def _location(store: StoreInUse, name: str) -> HotLocation | ColdLocation:
    location = store.location(name)
    if isinstance(location, NoTier):
        where = f"the service at {store.told_by} has" if store.told_by else "the settings here name"
        step = "" if store.told_by else ": run this with the service's (--config, KVSTORE_HOT, KVSTORE_COLD)"
        raise InvalidRequest(f"{where} no such tier{step}", seen=repr(name))
    return location


def _named_location(text: str) -> HotLocation | ColdLocation:
    if ":" not in text:
        raise InvalidRequest("expected hot, cold or a location like s3://bucket/prefix", seen=repr(text))
    location: HotLocation | ColdLocation = parse_hot(text) if text.startswith("redis") else parse_cold(text)
    if isinstance(location, NoTier):
        raise InvalidRequest("there is no such tier: expected a location like s3://bucket/prefix", seen=repr(text))
    return location


def _namespace(text: str) -> NamespaceId | None:
    if text and not re.fullmatch(r"[0-9a-f]{32}", text):
        raise InvalidRequest("a namespace is 32 hex digits in lower case", seen=repr(text))
    return NamespaceId(bytes.fromhex(text)) if text else None
