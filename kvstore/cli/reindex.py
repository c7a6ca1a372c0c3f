"""`kvstore reindex`: rebuild the catalog from the records that the tiers hold."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import Level
from kvstore.cli.administering import AdminClient
from kvstore.cli.bars import bar_of
from kvstore.cli.options import Config, TokenFile
from kvstore.cli.quieting import quieted
from kvstore.cli.shown import bytes_text, counted
from kvstore.cli.store_in_use import ByService, ServiceUrl, StoreInUse, client_of, store_in_use
from kvstore.cli.watching import watched
from kvstore.client.embedded import default_directory
from kvstore.compose import open_catalog, open_tier
from kvstore.errors import InvalidRequest
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.settings import Settings
from kvstore.store.upkeep.reindexing import ReindexReport, reindex_level
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import ColdLocation, HotLocation, NoTier

__all__ = ["reindex"]

Locations = Mapping[Level, HotLocation | ColdLocation]

_CALL_S = 30.0


def reindex(  # noqa: PLR0917 - typer makes flags of them
    config: Config = None,
    restart: Annotated[bool, typer.Option(help="Start over instead of continuing an interrupted run.")] = False,
    state: Annotated[Path | None, typer.Option(help="Folder for the progress of interrupted runs.")] = None,
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    by_service: ByService = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> int:
    """Rebuild the catalog from the records in Redis and S3, or in the directory, while services keep running.

    After an interruption run it again: it continues. Exit status: 0 done, 3 some records are of unknown namespaces,
    1 a tier failed, 2 a wrong call, 130 interrupted.
    """
    store = store_in_use(url, token_file, config)
    store.check()
    if by_service:
        return _by_service(store, client_of(store, token_file, config, _CALL_S), json_=json_)
    locations = _locations(store)
    settings = store.settings
    typer.echo(str(store), err=True)
    remembered = _Remembered(state or default_directory(), locations)
    if restart:
        remembered.forget()
    with quieted():
        reports = asyncio.run(_run(settings, locations, remembered, quiet=json_))
    remembered.forget()
    return _tell(reports, json_=json_)


def _tell(reports: Mapping[str, ReindexReport], *, json_: bool) -> int:
    """Print what was done; returns the exit status."""
    if json_:
        typer.echo(json.dumps({name: report.as_json() for name, report in reports.items()}))
    else:
        for name, report in reports.items():
            _show(name, report)
    return 3 if any(report.num_unknown for report in reports.values()) else 0


def _by_service(store: StoreInUse, client: AdminClient, *, json_: bool) -> int:
    """Have the service do it, one tier after the other; returns the exit status."""
    reports = {}
    levels = [one["level"] for one in client.get("tiers")["tiers"] if one["level"] != "memory"]
    for level in levels:
        is_last = level == levels[-1]
        job = watched(client, f"tiers/{level}/reindex", query={"confirm": is_last}, quiet=json_)
        name = str(getattr(store.settings, level)) if store.told_by else f"{level} of the service at {client.url}"
        reports[name] = ReindexReport(**job["report"])
    return _tell(reports, json_=json_)


async def _run(
    settings: Settings, locations: Locations, remembered: _Remembered, *, quiet: bool
) -> dict[str, ReindexReport]:
    reports = {}
    async with AsyncExitStack() as stack:
        tiers = {  # first: opening the catalog would create a directory that does not exist
            level: await stack.enter_async_context(open_tier(location, settings))
            for level, location in locations.items()
        }
        catalog = await stack.enter_async_context(open_catalog(settings))
        for level, location in locations.items():
            if remembered.is_done(level):
                typer.echo(f"{location}: done already, by an interrupted run", err=True)
                continue
            if num_records := remembered.num_records(level):
                typer.echo(f"{location}: continues after {num_records:,} records of an interrupted run", err=True)
            with _bar(quiet=quiet) as progress:
                reports[str(location)] = await _one(catalog, tiers, level, remembered, _shower(progress, str(location)))
            remembered.finish(level)
        await catalog.set_complete(True, deadline=Deadline.after(_CALL_S))
    return reports


async def _one(
    catalog: Catalog,
    tiers: Mapping[Level, Tier],
    level: Level,
    remembered: _Remembered,
    show: Callable[[ReindexReport], None],
) -> ReindexReport:
    others = [tier for at, tier in tiers.items() if at is not level]

    def tell(report: ReindexReport) -> None:
        remembered.save(level, report.num_records)
        show(report)

    return await reindex_level(catalog, tiers[level], level, clock=SYSTEM_CLOCK, manifests=others, progress=tell)


def _shower(progress: Progress, location: str) -> Callable[[ReindexReport], None]:
    bar = progress.add_task(f"{location}: listing", total=None)

    def show(report: ReindexReport) -> None:
        text = f"{location}: {report.num_records:,} records, {bytes_text(report.num_bytes)}"
        progress.update(bar, description=text)

    return show


class _Remembered:
    """The progress of a run, in a small file; one for each set of tiers."""

    def __init__(self, folder: Path, locations: Locations) -> None:
        text = " ".join(str(location) for location in locations.values())
        self._path = folder / f"reindex-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        try:
            values = json.loads(self._path.read_text())
        except (OSError, ValueError):
            values = {}
        self._values: dict[str, object] = values if isinstance(values, dict) else {}
        self._is_warned = False

    def is_done(self, level: Level) -> bool:
        return self._values.get(f"{level.name}_done") is True

    def num_records(self, level: Level) -> int:
        """Records that the catalog knew of when the run was interrupted."""
        number = self._values.get(level.name)
        return number if isinstance(number, int) else 0

    def save(self, level: Level, num_records: int) -> None:
        self._write({level.name: max(num_records, self.num_records(level))})

    def finish(self, level: Level) -> None:
        self._write({f"{level.name}_done": True})

    def forget(self) -> None:
        self._values = {}
        with suppress(OSError):  # then it was not written either
            self._path.unlink(missing_ok=True)

    def _write(self, values: dict[str, object]) -> None:
        self._values |= values
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(self._values))
            fresh.replace(self._path)
        except OSError as error:  # as in a container with a read-only file system
            if not self._is_warned:
                self._is_warned = True
                text = f"progress cannot be saved, name a --state folder: {self._path.parent}: {error.strerror}"
                typer.echo(text, err=True)


def _locations(store: StoreInUse) -> Locations:
    named = {Level.HOT: store.location("hot"), Level.COLD: store.location("cold")}
    locations = {level: location for level, location in named.items() if not isinstance(location, NoTier)}
    if not locations:
        settings = store.settings
        raise InvalidRequest("there is nothing to index: set hot or cold", hot=settings.hot, cold=settings.cold)
    return locations


def _bar(*, quiet: bool) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return bar_of(*columns, quiet=quiet)


def _show(name: str, report: ReindexReport) -> None:
    typer.echo(
        f"{name}: {counted(report.num_records, 'record', 'records')}, {bytes_text(report.num_bytes)}, "
        f"{counted(len(report.namespaces), 'namespace', 'namespaces')}"
    )
    if report.num_skipped:
        typer.echo(f"  in the catalog already: {report.num_skipped:,}")
    if report.num_stale:
        typer.echo(f"  removed from the catalog, no longer stored: {report.num_stale:,}")
    if report.num_resized:
        typer.echo(f"  sizes corrected: {report.num_resized:,}")
    for namespace in report.unknown_namespaces:
        typer.echo(f"  skipped, without a readable manifest: namespace {namespace}")
