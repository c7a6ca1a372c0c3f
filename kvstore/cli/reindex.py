"""`kvstore reindex`: rebuild the catalog from the records that the tiers hold."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.catalog.entry import Level
from kvstore.cli.admin import AdminClient, run_job
from kvstore.cli.options import AsJson, Config, TokenFile, quieted
from kvstore.cli.printing import bytes_text, counted, progress_bar
from kvstore.cli.service import ByService, ServiceUrl, admin_of, check_store, location_of, store_in_use
from kvstore.compose import open_catalog, open_tier
from kvstore.doctor.store_in_use import StoreInUse
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.files import read_regular
from kvstore.settings import Settings
from kvstore.store.upkeep.reindexing import LOST_MORE, ReindexReport, reindex_level
from kvstore.tiers.locations import ColdLocation, HotLocation, NoTier, RedisLocation
from kvstore.wire.private_place import default_directory

Locations = Mapping[Level, HotLocation | ColdLocation]

_CALL_S = 30.0


def reindex(  # noqa: PLR0917 - typer makes flags of them
    config: Config = None,
    restart: Annotated[bool, typer.Option(help="Start over instead of continuing an interrupted run.")] = False,
    state: Annotated[Path | None, typer.Option(help="Folder for the progress of interrupted runs.")] = None,
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    by_service: ByService = False,
    json_: AsJson = False,
) -> int:
    """Rebuild the catalog from the records in Redis and S3, or in the directory, while services keep running.

    After an interruption run it again: it continues. Exit status: 0 done, 3 some records are of unknown namespaces,
    1 a tier failed, 2 a wrong call, 130 interrupted.
    """
    store = store_in_use(url, token_file, config)
    check_store(store)
    if by_service:
        reports = _by_service(store, admin_of(store, token_file, config, _CALL_S), quiet=json_)
    else:
        locations = _locations(store)
        typer.echo(f"store: {store}", err=True)
        saved = SavedProgress(state or default_directory(), locations)
        if restart:
            saved.clear()
        with quieted():
            reports = asyncio.run(_reindex(store.settings, locations, saved, quiet=json_))
        saved.clear()
    if json_:
        typer.echo(json.dumps({name: report.as_json() for name, report in reports.items()}))
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
    """Run it as jobs of the service, one tier after the other."""
    reports = {}
    levels = [one["level"] for one in client.get("tiers")["tiers"] if one["level"] != "memory"]
    for level in levels:
        is_last = level == levels[-1]
        job = run_job(client, f"tiers/{level}/reindex", query={"confirm": is_last}, quiet=quiet)
        name = str(getattr(store.settings, level)) if store.service else f"{level} of the service at {client.url}"
        reports[name] = ReindexReport(**job["report"])
    return reports


async def _reindex(
    settings: Settings, locations: Locations, saved: SavedProgress, *, quiet: bool
) -> dict[str, ReindexReport]:
    reports = {}
    async with AsyncExitStack() as stack:
        tiers = {  # first: opening the catalog would create a directory that does not exist
            level: await stack.enter_async_context(open_tier(location, settings))
            for level, location in locations.items()
        }
        catalog = await stack.enter_async_context(open_catalog(settings))
        if (token := saved.token) is None:
            token = await catalog.start_rebuild(deadline=Deadline.after(_CALL_S))
            saved.begin(token)
        for level, location in locations.items():
            if saved.is_done(level):
                typer.echo(f"{location}: an interrupted run finished it", err=True)
                continue
            if num_records := saved.num_records(level):
                typer.echo(f"{location}: continues an interrupted run of {num_records:,} records", err=True)
            others = [tier for other, tier in tiers.items() if other is not level]
            with _shown(saved, level, str(location), quiet=quiet) as show:
                reports[str(location)] = await reindex_level(
                    catalog, tiers[level], level, clock=SYSTEM_CLOCK, manifests=others, progress=show
                )
            saved.finish(level)
        if not await catalog.finish_rebuild(token, deadline=Deadline.after(_CALL_S)):
            saved.clear()
            raise Unavailable(LOST_MORE)
    return reports


@contextmanager
def _shown(
    saved: SavedProgress, level: Level, location: str, *, quiet: bool
) -> Iterator[Callable[[ReindexReport], None]]:
    """A function that shows and saves the progress of one tier."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with progress_bar(*columns, quiet=quiet) as progress:
        bar = progress.add_task(f"{location}: listing", total=None)

        def show(report: ReindexReport) -> None:
            saved.save(level, report.num_records)
            amount = f"{counted(report.num_records, 'record')}, {bytes_text(report.num_bytes)}"
            progress.update(bar, description=f"{location}: {amount}")

        yield show


class SavedProgress:
    """The progress of a run, in a small file; each set of tiers has its own."""

    def __init__(self, folder: Path, locations: Locations) -> None:
        text = " ".join(str(location) for location in locations.values())
        self._path = folder / f"reindex-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        try:
            values = json.loads(read_regular(self._path))
        except (OSError, ValueError):
            values = {}
        self._values: dict[str, object] = values if isinstance(values, dict) else {}
        self._is_warned = False

    @property
    def token(self) -> bytes | None:
        """The catalog's token of the run that was interrupted; `None`: none was."""
        text = self._values.get("token")
        return text.encode("latin-1") if isinstance(text, str) else None

    def begin(self, token: bytes) -> None:
        self._write({"token": token.decode("latin-1")})

    def is_done(self, level: Level) -> bool:
        return self._values.get(f"{level.name}_done") is True

    def num_records(self, level: Level) -> int:
        """Records that were in the catalog when the run was interrupted."""
        number = self._values.get(level.name)
        return number if isinstance(number, int) else 0

    def save(self, level: Level, num_records: int) -> None:
        self._write({level.name: max(num_records, self.num_records(level))})

    def finish(self, level: Level) -> None:
        self._write({f"{level.name}_done": True})

    def clear(self) -> None:
        self._values = {}
        with suppress(OSError):  # then it was not written either
            self._path.unlink(missing_ok=True)

    def _write(self, values: dict[str, object]) -> None:
        self._values |= values
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._values))
            new.replace(self._path)
        except OSError as error:  # as in a container with a read-only file system
            if not self._is_warned:
                self._is_warned = True
                why = f"cannot save the progress in {self._path.parent}: {error.strerror}"
                typer.echo(f"{why}. An interrupted run would start over; name another folder with --state", err=True)


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
    for namespace in report.unknown_namespaces:
        typer.echo(f"  skipped, without a readable manifest: namespace {namespace}")
