"""The `kvstore` command: its verbs, exit statuses, and errors as one line each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperGroup

import kvstore
from kvstore.errors import InvalidRequest, KVStoreError

__all__ = ["app", "main"]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130
# click's `UsageError`; taken from typer, since newer releases bundle click
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

_MODULES = {"bench": "programs", "demo": "programs", "gc": "rm", "unpin": "pin"}
VERBS = [
    "bench",
    "demo",
    "doctor",
    "explain",
    "gc",
    "jobs",
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
"""Each is a function, or a `Typer`, in the module of its name or in the one that `_MODULES` gives."""


class _Verbs(TyperGroup):
    """Imports a verb only when it is called or described: health probes run `kvstore status` every few seconds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)  # their names, to suggest one for a mistyped verb

    def list_commands(self, ctx: Any) -> list[str]:
        return VERBS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        verb = getattr(import_module(f"kvstore.cli.{_MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        if not isinstance(verb, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(verb)
            verb = alone
        command = typer.main.get_command(verb)
        command.name = cmd_name
        for one in (command, *getattr(command, "commands", {}).values()):
            one.get_params = _plain_flags(one.get_params)
        return command

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params)(ctx)


def _plain_flags(get_params: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The parameters of a command; help shows no type behind those that take no value."""

    def plain(ctx: Any) -> Any:
        params = get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    return plain


app = typer.Typer(
    name="kvstore",
    cls=_Verbs,
    help="Keeps the KV-cache pages of inference engines.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    """Run one command; returns the exit status: 0, 1 for a failure, 2 for a wrong call, 130 interrupted."""
    try:
        result = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        if result == INTERRUPTED:  # typer returns it for Ctrl-C, without a message
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except KVStoreError as error:
        return _fail(error.sentence(), USAGE if isinstance(error, InvalidRequest) else FAILURE)
    except _UsageError as error:
        if not error.format_message():  # no verb at all: typer has shown the help
            return USAGE
        return _fail(f"{error.format_message()} (see `{_called(error)} --help`)", USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except OSError as error:
        return _fail(error, FAILURE)
    except Exception as error:  # noqa: BLE001 - the command line's top: a bug is reported in one line
        return _fail(f"a bug, please report it: {type(error).__name__}: {error}", FAILURE)


def _called(error: Any) -> str:
    """The verb that a usage error concerns, as it is typed."""
    names = []
    context = error.ctx
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(["kvstore", *reversed(names)])


def _fail(message: object, status: int) -> int:
    print(f"kvstore: {message}", file=sys.stderr)
    return status
