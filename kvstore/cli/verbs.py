"""The verbs of the `kvstore` command, exit statuses, and errors as one line each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperGroup

import kvstore
from kvstore.cli.main import INTERRUPTED
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.runtime.wrong_values import expectation, shown

FAILURE, USAGE = 1, 2
# click's `UsageError`; taken from typer, since newer releases bundle click
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

_EXTRA = re.compile(r"got unexpected extra argument(?:s|\(s\))? \((.*)\)")
"""How click says that there are too many."""
VERBS = {verb: verb for verb in ("doctor", "explain", "jobs", "ls", "migrate", "reindex", "rm", "serve", "show")}
VERBS |= {verb: verb for verb in ("simulate", "status", "top", "verify")}
VERBS |= {"bench": "programs", "demo": "programs", "gc": "rm"}
VERBS |= {"pin": "orders", "quota": "orders", "unpin": "orders", "weights": "orders"}
"""The module of each; in it a verb is a function, or a `Typer`, of its name."""


class _Verbs(TyperGroup):
    """Imports a verb only when it is called or described: health probes run `kvstore status` every few seconds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)  # their names, to suggest one for a mistyped verb

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        verb = getattr(import_module(f"kvstore.cli.{VERBS[cmd_name]}"), cmd_name)
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


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for a failure, 2 for a wrong call.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(args=None if arguments is None else given, standalone_mode=False)
        if result == INTERRUPTED:  # typer returns it for Ctrl-C, without a message
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except KVStoreError as error:
        return _fail(error.sentence(), USAGE if isinstance(error, InvalidRequest) else FAILURE)
    except _UsageError as error:
        if not error.format_message():  # no verb at all: typer has shown the help
            return USAGE
        return _fail(_wrong_call(error, given), USAGE)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except OSError as error:
        return _fail(error, FAILURE)
    except Exception as error:  # noqa: BLE001 - the command line's top: a bug is reported in one line
        return _fail(f"a bug, please report it: {type(error).__name__}: {error}", FAILURE)


def _wrong_call(error: Any, arguments: Sequence[str]) -> str:
    """A usage error with one next step: the nearest name that exists, else the help of the verb."""
    text = error.format_message().rstrip(".")
    text = text[:1].lower() + text[1:]
    param, problems = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if param is not None and problems is not None:  # of pydantic, with which typer parses values
        problem = problems()[0]
        text = f"{_typed(param, arguments)}: {expectation(problem)}, got {shown(problem['input'])}"
    elif param is not None and not error.message:
        text = f"{_typed(param, arguments)} is missing"
    elif extra := _EXTRA.fullmatch(text):
        text = f"expected nothing more, got {extra[1]}"
    has_step = "Did you mean" in text or "Possible options" in text
    return text if has_step else f"{text} (see `{_called(error, arguments)} --help`)"


def _typed(param: Any, arguments: Sequence[str]) -> str:
    """A flag as it was typed, or an argument as the help shows it."""
    if not param.opts[0].startswith("-"):
        return str(param.name).upper()
    typed = {argument.partition("=")[0] for argument in arguments}
    return next((flag for flag in param.opts if flag in typed), str(param.opts[0]))


def _called(error: Any, arguments: Sequence[str]) -> str:
    """The verb that a usage error concerns, as it is typed."""
    names: list[str] = []
    context = error.ctx
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    if error.ctx is None:  # a flag without its value
        names = [argument for argument in arguments if argument in VERBS][:1]
    return " ".join(["kvstore", *reversed(names)])


def _fail(message: object, status: int) -> int:
    print(f"kvstore: {message}", file=sys.stderr)
    return status
