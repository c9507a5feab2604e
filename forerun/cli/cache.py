"""`forerun cache`: what forerun keeps on this machine, and removing it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from forerun.cli.common import help_text, shown_size
from forerun.cli.options import JsonOption
from forerun.files import home
from forerun.zoo.cache import Entry, entries, remove

app = typer.Typer(
    help="List or remove what forerun keeps on this machine: models, and measured costs.",
    no_args_is_help=True,
)


def listing(as_json: JsonOption = False) -> None:
    """List what forerun keeps, with sizes.

    The folder is ~/.cache/forerun unless FORERUN_HOME names another one.
    """
    kept = entries()
    if as_json:
        print(json.dumps({"folder": str(home()), "entries": [_facts(entry) for entry in kept]}))
        return
    _print(kept)


def rm(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names as `forerun cache ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
) -> None:
    """Remove models or measured costs.

    Prints what was removed. Nothing that forerun did not make itself is touched.
    """
    if everything == bool(names):
        raise ValueError("give names as `forerun cache ls` shows them, or --all")
    removed = remove([entry.name for entry in entries()] if everything else names or [])
    for entry in removed:
        print(f"removed {entry.name}: {shown_size(entry.bytes)}")
    if not removed:
        print("there was nothing to remove")


def _facts(entry: Entry) -> dict[str, str | int | bool]:
    """Return an entry for JSON."""
    return {
        "name": entry.name,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "whole": entry.is_whole,
    }


def _print(kept: list[Entry]) -> None:
    """Print entries, a line each, with the sum of their sizes."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(soft_wrap=True, highlight=False)
    if not kept:
        console.print(f"{home()} holds nothing; `forerun fetch qwen-coder` downloads a model")
        return
    table = Table("", Column(justify="right"), "", show_header=False, box=None)
    for entry in kept:
        note = f"{entry.note}; {entry.advice}" if entry.advice else entry.note
        table.add_row(entry.name, shown_size(entry.bytes), note)
    console.print(table)
    total = shown_size(sum(entry.bytes for entry in kept))
    console.print(f"{total} in {home()}; `forerun cache rm NAME` removes")


app.command("ls", help=help_text(listing))(listing)
app.command("rm", help=help_text(rm))(rm)
