"""`kvstore reindex`: rebuild the catalog from the records that the tiers hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict

import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.catalog.entry import Level
from kvstore.cli.admin import AdminClient, report_of, run_job
from kvstore.cli.options import AsJson, Config, TokenFile, quieted
from kvstore.cli.printing import bytes_text, progress_bar
from kvstore.cli.service import ByService, ServiceUrl, admin_of, check_store, location_of, store_in_use
from kvstore.compose import open_catalog, open_tier
from kvstore.doctor.store_in_use import StoreInUse
from kvstore.errors import InvalidRequest
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.sizes import counted
from kvstore.settings import Settings
from kvstore.store.upkeep.reindexing import ReindexReport, reindex_store
from kvstore.tiers.locations import ColdLocation, HotLocation, NoTier, RedisLocation

Locations = Mapping[Level, HotLocation | ColdLocation]


def reindex(
    config: Config = None,
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    by_service: ByService = False,
    json_: AsJson = False,
) -> int:
    """Rebuild the catalog from the records in Redis and S3, or in the directory, while services keep running.

    What an interrupted run added stays: run it again. Exit status: 0 done, 3 the catalog cannot hold some records,
    1 a tier failed, 2 a wrong call, 130 interrupted.
    """
    store = store_in_use(url, token_file, config)
    check_store(store, url)
    if by_service:
        reports = _by_service(store, admin_of(store, token_file, config), quiet=json_)
    else:
        locations = _locations(store)
        typer.echo(f"store: {store}", err=True)
        with quieted():
            reports = asyncio.run(_reindex(store.settings, locations, quiet=json_))
    if json_:
        typer.echo(json.dumps({name: asdict(report) for name, report in reports.items()}))
    else:
        for name, report in reports.items():
            _show(name, report)
        if store.service and isinstance(store.settings.hot, RedisLocation):
            typer.echo("running services, and so `kvstore status`, take notice of this within 15 s", err=True)
    return 3 if any(report.num_unknown for report in reports.values()) else 0


def _locations(store: StoreInUse) -> Locations:
    named = {Level.HOT: location_of(store, "hot"), Level.COLD: location_of(store, "cold")}
    locations = {level: location for level, location in named.items() if not isinstance(location, NoTier)}
    if not locations:
        raise InvalidRequest("there is nothing to index: hot and cold are both memory:")
    return locations


def _by_service(store: StoreInUse, client: AdminClient, *, quiet: bool) -> dict[str, ReindexReport]:
    """Run it as a job of the service."""
    job = run_job(client, "reindex", query={}, quiet=quiet)
    return {
        str(getattr(store.settings, level)) if store.service else f"{level} of the service at {client.url}": (
            report_of(ReindexReport, report)
        )
        for level, report in job["report"].items()
    }


async def _reindex(settings: Settings, locations: Locations, *, quiet: bool) -> dict[str, ReindexReport]:
    async with AsyncExitStack() as stack:
        tiers = {  # first: opening the catalog would create a directory that does not exist
            level: await stack.enter_async_context(open_tier(location, settings))
            for level, location in locations.items()
        }
        catalog = await stack.enter_async_context(open_catalog(settings))
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with progress_bar(*columns, quiet=quiet) as bars:
            shown = {level: bars.add_task(f"{location}: listing", total=None) for level, location in locations.items()}

            def show(level: Level, report: ReindexReport) -> None:
                amount = f"{counted(report.num_records, 'record')}, {bytes_text(report.num_bytes)}"
                bars.update(shown[level], description=f"{locations[level]}: {amount}")

            reports = await reindex_store(catalog, tiers, clock=SYSTEM_CLOCK, progress=show)
    return {str(locations[level]): report for level, report in reports.items()}


def _show(name: str, report: ReindexReport) -> None:
    amount = f"{counted(report.num_records, 'record')}, {bytes_text(report.num_bytes)}"
    typer.echo(f"{name}: {amount}, {counted(len(report.namespaces), 'namespace')}")
    typer.echo(f"  added to the catalog: {report.num_added:,}")
    if report.num_skipped:
        typer.echo(f"  already in the catalog: {report.num_skipped:,}")
    if report.num_stale:
        typer.echo(f"  removed from the catalog, no longer stored: {report.num_stale:,}")
    if report.num_resized:
        typer.echo(f"  sizes corrected: {report.num_resized:,}")
    if report.num_unknown:
        typer.echo(f"  skipped, as the catalog cannot hold them: {report.num_unknown:,}")
    for namespace in report.unknown_namespaces:
        typer.echo(f"  skipped, without a readable manifest: namespace {namespace}")
