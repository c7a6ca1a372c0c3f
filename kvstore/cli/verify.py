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

from kvstore.cli.bars import bar_of
from kvstore.cli.options import Config, parse_size
from kvstore.cli.quieting import quieted
from kvstore.compose import open_tier
from kvstore.errors import InvalidRequest
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.settings import Settings, load_settings
from kvstore.store.verification import ByteRate, Findings, count_records, verify_tier
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import ColdLocation, HotLocation, NoTier, parse_cold, parse_hot

__all__ = ["verify"]

BAD_FOUND, NOT_ALL_READ = 3, 1


def verify(
    tier: Annotated[
        str, typer.Argument(help="hot or cold, as the settings name them, or a location like s3://bucket/prefix.")
    ] = "cold",
    config: Config = None,
    rate: Annotated[str, typer.Option(help="Bytes per second, like 100MiB; the tier has other users.")] = "100MiB",
    namespace: Annotated[str, typer.Option(help="Records of this namespace only, 32 hex digits.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> int:
    """Verify every record of a tier against its checksums and quarantine corrupt ones.

    Exit status: 0 all whole, 3 corrupt records were found, 1 not everything could be read, 2 a wrong call.
    """
    settings = load_settings({}, config=config)
    location = _location(tier, settings)
    byte_rate, only = ByteRate(parse_size(rate, "rate")), _namespace(namespace)
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
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
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


def _location(text: str, settings: Settings) -> HotLocation | ColdLocation:
    location: HotLocation | ColdLocation
    if text == "hot":
        location = settings.hot
    elif text == "cold":
        location = settings.cold
    else:
        if ":" not in text:
            raise InvalidRequest("expected hot, cold or a location like s3://bucket/prefix", seen=repr(text))
        location = parse_hot(text) if text.startswith("redis") else parse_cold(text)
    if isinstance(location, NoTier):
        raise InvalidRequest(
            "the settings here name no such tier: run this with the service's (--config, KVSTORE_HOT, KVSTORE_COLD)",
            seen=repr(text),
        )
    return location


def _namespace(text: str) -> NamespaceId | None:
    if text and not re.fullmatch(r"[0-9a-f]{32}", text):
        raise InvalidRequest("a namespace is 32 hex digits in lower case", seen=repr(text))
    return NamespaceId(bytes.fromhex(text)) if text else None
