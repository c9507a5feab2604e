"""How the benchmarks run as commands: a user's mistake is one line and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer


def run(command: Callable[..., None]) -> None:
    """Run a command with the options of its signature, as `forerun` runs its own."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except ValueError as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
