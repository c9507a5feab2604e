"""The command line. Nothing here imports torch before the arguments are known to be good."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import bench, demo, generate, info, simulate, train, tune

app = typer.Typer(
    help="Faster decoding for Hugging Face causal language models, without changing a token of what they say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("simulate")(simulate.simulate)
app.command("tune")(tune.tune)
app.add_typer(train.app, name="train")

# The parser is typer's own in new versions and click's in old ones; typer exports only this class of it.
_UsageError: Any = typer.BadParameter.__mro__[1]


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


def main() -> None:
    """Runs the command line; a user's mistake is one line on stderr and exit status 2."""
    try:
        status = app(standalone_mode=False)
    except _UsageError as error:
        message = error.format_message()
        if not message:  # help was shown for want of a command
            sys.exit(0)
    except (ValueError, FileExistsError, PermissionError) as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        print("forerun: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        sys.exit(0)
    else:
        sys.exit(status if isinstance(status, int) else 0)
    print(f"forerun: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
