"""`kvstore demo`: vLLM without a store, saving, and resuming in a new process; `make demo` installs what it needs."""

from __future__ import annotations

import typer

from kvstore.cli.source_tree import PASS_ALL, become

__all__ = ["demo"]

demo = typer.Typer(add_completion=False, add_help_option=False)


@demo.command("demo", context_settings=PASS_ALL)
def run(context: typer.Context) -> None:
    """Show that a fresh vLLM resumes what another one saved (source tree only; see --help)."""
    become("demo", context.args)
