"""The `kvstore` command: one verb per file, errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperGroup

import kvstore
from kvstore.errors import InvalidRequest, KVStoreError

__all__ = ["app", "main"]

FAILURE, USAGE = 1, 2
# click's; taken from here because newer releases of typer carry click inside
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

_MODULES = {"unpin": "pin"}
_VERBS = [
    "doctor",
    "explain",
    "gc",
    "ls",
    "migrate",
    "pin",
    "quota",
    "reindex",
    "rm",
    "serve",
    "show",
    "simulate",
    "status",
    "top",
    "unpin",
    "verify",
    "weights",
]
"""Each is a function, or a `Typer` with verbs of its own, in the module of that name or of that in `_MODULES`."""


class _Verbs(TyperGroup):
    """Imports a verb when it is called or described: a probe that asks for the status every few seconds would import
    all the others each time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(_VERBS)  # their names, for what is mistyped

    def list_commands(self, ctx: Any) -> list[str]:
        return _VERBS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _VERBS:
            return None
        verb = getattr(import_module(f"kvstore.cli.{_MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        if not isinstance(verb, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(verb)
            verb = alone
        command = typer.main.get_command(verb)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="kvstore", cls=_Verbs, help="Keeps the KV-cache pages of inference engines.", no_args_is_help=True
)


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
