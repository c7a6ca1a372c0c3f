"""`kvstore migrate`: move stored records to the current encryption keys, while services keep running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from kvstore.catalog.entry import Level
from kvstore.cli.options import AsJson, Config, TokenFile, parse_size, quieted
from kvstore.cli.printing import bytes_text, print_table, progress_bar, table_of
from kvstore.cli.service import ServiceUrl, check_store, store_in_use
from kvstore.compose import open_catalog, open_tier
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.manifest import STORE_VERSION_PLACE, check_store_version
from kvstore.format.names import ROOT
from kvstore.settings import Settings
from kvstore.store.encryption.key_ring import KeyRing, watch_keys
from kvstore.store.upkeep.verification import ByteRate
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import FileLocation, NoTier, RedisLocation
from migrations.copying import NOT_MIGRATED, Progress
from migrations.journal import Phase, State
from migrations.runner import Runner
from migrations.steps import KeyStep
from migrations.store import soon

T = TypeVar("T")

INCOMPLETE = 3
_LEASE_S = 30.0

migrate = typer.Typer(
    add_completion=False,
    help="Move stored records to the current encryption keys: plan, run, finish. Services keep running.",
    no_args_is_help=True,
)

Rate = Annotated[str, typer.Option(help="Most bytes to copy per second, like 100MiB.")]


@asynccontextmanager
async def open_runner(
    settings: Settings,
    *,
    progress: Progress,
    rate: ByteRate | None = None,
    lease_s: float = _LEASE_S,
) -> AsyncIterator[Runner]:
    """A runner on the store of these settings.

    Raises:
        InvalidRequest: No keys, or no tier that keeps the lease and the catalog.
        Unavailable: A tier cannot be reached, or a service owns the directory.
        UnsupportedFormat: A newer release has migrated a tier.
    """
    ring = _ring(settings)
    async with AsyncExitStack() as stack:
        tiers = await _open_tiers(settings, stack)
        catalog = await stack.enter_async_context(open_catalog(settings))
        ownership = catalog.ownership(lease_s)
        yield Runner(KeyStep(ring), tiers, catalog, ownership, lease_s=lease_s, rate=rate, progress=progress)


@migrate.command()
def status(config: Config = None, url: ServiceUrl = "", token_file: TokenFile = None, json_: AsJson = False) -> int:
    """Show the latest migration and its progress. Reads no record."""
    state = _run(_settings(config, url, token_file), Runner.state)
    if json_:
        typer.echo(json.dumps({"migration": _as_json(state) if state is not None else None}))
    elif state is None:
        typer.echo("no migration was ever started")
    else:
        _show(state)
    return 0


@migrate.command()
def plan(config: Config = None, url: ServiceUrl = "", token_file: TokenFile = None, json_: AsJson = False) -> int:
    """Show what a run would process: records and bytes by tier and tenant. Changes nothing and reads no record."""
    rows = [asdict(row) for row in _run(_settings(config, url, token_file), Runner.plan)]
    if json_:
        typer.echo(json.dumps({"step": KeyStep.name, "plan": rows}))
        return 0
    if not rows:
        typer.echo("nothing to do: no tenant with records has a second key (see docs/encryption.md)")
        return 0
    numbers = ("namespaces", "records", "bytes", "copied already")
    table = table_of(KeyStep.text, "tier", "tenant", *numbers, right=numbers)
    for row in rows:
        amounts = [f"{row[name]:,}" for name in ("namespaces", "num_records", "num_copied")]
        amounts.insert(2, bytes_text(row["num_bytes"]))
        table.add_row(escape(str(row["tier"])), escape(str(row["tenant"]) or "(none)"), *amounts)
    print_table(table)
    typer.echo("next: kvstore migrate run")
    return 0


@migrate.command()
def run(
    config: Config = None,
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    rate: Rate = "100MiB",
    json_: AsJson = False,
) -> int:
    """Copy each record with an earlier key to a new one with the current key, and compare the two. Removes nothing.

    After an interruption run it again, on any node: it continues. Exit status: 0 done, 3 some records were not copied,
    1 a tier failed or another run is active, 2 a wrong call, 130 interrupted.
    """
    return _work(_byte_rate(rate), _settings(config, url, token_file), json_, call=Runner.copy, word="copying")


@migrate.command()
def finish(
    config: Config = None,
    url: ServiceUrl = "",
    token_file: TokenFile = None,
    rate: Rate = "100MiB",
    json_: AsJson = False,
) -> int:
    """Copy records saved since, then remove each old record that has a new one. Then the old key can be deleted.

    Exit status: as for run; 3 also if some old records were not removed.
    """
    return _work(_byte_rate(rate), _settings(config, url, token_file), json_, call=Runner.finish, word="finishing")


@migrate.command()
def abort(config: Config = None, url: ServiceUrl = "", token_file: TokenFile = None, json_: AsJson = False) -> int:
    """Cancel the migration. The new records that it made stay in use; nothing is removed."""
    return _work(None, _settings(config, url, token_file), json_, call=Runner.abort, word="aborting")


def _byte_rate(text: str) -> ByteRate:
    return ByteRate(parse_size(text, "--rate", least_bytes=1, unit="MiB"))


def _work(
    rate: ByteRate | None,
    settings: Settings,
    json_: bool,
    *,
    call: Callable[[Runner], Awaitable[State]],
    word: str,
) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with progress_bar(*columns, quiet=json_) as bar:
        task = bar.add_task(f"{word}: listing", total=None)

        def show(progress: Progress) -> None:
            counts = ", ".join(f"{number:,} {name}" for name, number in sorted(progress.totals.items()))
            done = progress.totals.total() - progress.totals["removed"] - progress.totals["kept"]
            bar.update(task, description=f"{word}: {counts}", total=progress.num_expected or None, completed=done)

        state = _run(settings, call, rate=rate, progress=Progress(show))
    typer.echo(json.dumps({"migration": _as_json(state)})) if json_ else _show(state)
    return INCOMPLETE if any(state.totals.get(name) for name in NOT_MIGRATED) else 0


def _run(
    settings: Settings,
    call: Callable[[Runner], Awaitable[T]],
    *,
    rate: ByteRate | None = None,
    progress: Progress | None = None,
) -> T:
    """Call a method of a runner."""

    async def run() -> T:
        async with open_runner(settings, rate=rate, progress=progress or Progress()) as runner:
            return await call(runner)

    with quieted():
        return asyncio.run(run())


def _settings(config: Path | None, url: str, token_file: Path | None) -> Settings:
    """The settings of the running service, or those here; printed on standard error."""
    store = store_in_use(url, token_file, config)
    check_store(store, url)
    for name in ("hot", "cold", "encryption_keys"):
        if (why := store.obstacle(name)) is not None:
            raise InvalidRequest(f"cannot use {name} from here: {why}")
    typer.echo(f"store: {store}", err=True)
    return store.settings


async def _open_tiers(settings: Settings, stack: AsyncExitStack) -> dict[Level, Tier]:
    if not isinstance(settings.hot, RedisLocation) and not isinstance(settings.cold, FileLocation):
        raise InvalidRequest(
            "a migration needs Redis as hot (for its lease and the catalog) or a directory as cold; the settings have "
            f"hot {settings.hot} and cold {settings.cold}"
        )
    tiers: dict[Level, Tier] = {}
    for level, location in ((Level.HOT, settings.hot), (Level.COLD, settings.cold)):
        if isinstance(location, FileLocation) and not (location.path / ROOT).is_dir():  # else a mistyped one is created
            raise Unavailable("there are no records: check the path", path=location.path)
        if not isinstance(location, NoTier):
            tier = await stack.enter_async_context(open_tier(location, settings, is_owner=True))
            check_store_version(await tier.get_manifest(STORE_VERSION_PLACE, deadline=soon()), tier.name)
            tiers[level] = tier
    return tiers


def _ring(settings: Settings) -> KeyRing:
    if settings.encryption_keys is None:
        raise InvalidRequest(
            "there is nothing to migrate without keys: set encryption_keys (KVSTORE_ENCRYPTION_KEYS) to the services' "
            "key file"
        )
    return watch_keys(settings.encryption_keys).value


def _as_json(state: State) -> dict[str, object]:
    return {**state.model_dump(mode="json"), "next": _NEXT[state.phase]}


_NEXT = {
    Phase.COPYING: "kvstore migrate run: continues where it was interrupted",
    Phase.COPIED: "kvstore migrate finish: removes the old records",
    Phase.REMOVING: "kvstore migrate finish: continues where it was interrupted",
    Phase.DONE: "take the earlier keys out of encryption_keys",
    Phase.ABORTED: "kvstore migrate run: starts over",
}


def _show(state: State) -> None:
    table = table_of(f"step {state.step}: {state.phase.value}", "records", "number", right=("number",))
    for name, number in sorted(state.totals.items()):
        table.add_row(name, f"{number:,}")
    print_table(table)
    for tenant, target in sorted(state.targets.items()):
        typer.echo(f"tenant {tenant or '(none)'}: to key {target.split(':')[0]}")
    typer.echo(f"next: {_NEXT[state.phase]}")
