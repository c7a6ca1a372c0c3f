"""The `kvstore` command: one verb per file, errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import typer

import kvstore
from kvstore.cli.doctor import doctor
from kvstore.cli.explain import explain
from kvstore.cli.gc import gc
from kvstore.cli.ls import ls
from kvstore.cli.migrate import app as migrate
from kvstore.cli.pin import pin, unpin
from kvstore.cli.quota import quota
from kvstore.cli.reindex import reindex
from kvstore.cli.rm import rm
from kvstore.cli.serve import serve
from kvstore.cli.show import show
from kvstore.cli.simulate import simulate
from kvstore.cli.status import status
from kvstore.cli.top import top
from kvstore.cli.verify import verify
from kvstore.cli.weights import weights
from kvstore.errors import InvalidRequest, KVStoreError

__all__ = ["app", "main"]

FAILURE, USAGE = 1, 2
# click's; taken from here because newer releases of typer carry click inside
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(name="kvstore", help="Keeps the KV-cache pages of inference engines.", no_args_is_help=True)
app.command()(doctor)
app.command()(explain)
app.command()(gc)
app.command()(ls)
app.command()(pin)
app.command()(quota)
app.command()(reindex)
app.command()(rm)
app.command()(serve)
app.command()(show)
app.command()(simulate)
app.command()(status)
app.command()(top)
app.command()(unpin)
app.command()(verify)
app.add_typer(migrate, name="migrate")
app.add_typer(weights, name="weights")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {kvstore.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the release."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a failure, 2 for a wrong call."""
    try:
        result = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except InvalidRequest as error:
        return _complain(error, USAGE)
    except KVStoreError as error:
        return _complain(error, FAILURE)
    except _UsageError as error:
        if not error.format_message():  # no verb at all: typer has shown the help
            return USAGE
        return _complain(f"{error.format_message()} (see `kvstore --help`)", USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", 130)
    except OSError as error:
        return _complain(error, FAILURE)
    except Exception as error:  # noqa: BLE001 - the command line's top: a bug is told in one line and asks for a report
        return _complain(f"a bug, please report it: {type(error).__name__}: {error}", FAILURE)


def _complain(error: object, status: int) -> int:
    print(f"kvstore: {error}", file=sys.stderr)
    return status
