"""All commands. Nothing here imports torch before the arguments are known to be good."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import batch_jobs, bench, chat, demo, fetch, generate, info, serve, train, tune

app = typer.Typer(
    help="Faster decoding for Hugging Face causal language models, without changing a token of their output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("batch")(batch_jobs.batch)
app.command("bench")(bench.bench)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("fetch")(fetch.fetch)
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("serve")(serve.serve)
app.command("tune")(tune.tune)
app.add_typer(train.app, name="train")

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
