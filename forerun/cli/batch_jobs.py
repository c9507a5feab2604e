"""`forerun batch`: a file of requests, whose answers go into a folder."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.common import quiet, say
from forerun.cli.options import MaxRowsOption, ServingOptions, check_packages, grouped
from forerun.methods import Method
from forerun.sampling.params import SamplingParams

if TYPE_CHECKING:
    from forerun.api.decoder import Decoder
    from forerun.scale.batch_file import BadLine, Line
    from forerun.scale.batch_folder import Folder

# Seconds between two updates of the progress bar.
TERMINAL_UPDATE = 0.1
LOG_UPDATE = 10.0  # where stderr is no terminal, and every update is a new line
# The counts of a job in its summary, with the words that we print for them.
COUNTS = {"answered": "answered", "refused": "refused", "bad_lines": "bad", "failed": "failed"}
# Options that may change when a job is continued, because they do not decide its answers.
NOT_IN_JOB = ("device", "trust_remote_code", "kv_memory", "prompt_cache", "prompt_cache_bytes")


@grouped
def batch(
    input: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="The requests, one JSON object per line: in OpenAI's batch format, or prompts.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Folder for the answers. With the folder of an interrupted job, it continues.",
        ),
    ],
    serving: ServingOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="For lines without max_tokens. Default: 1024 for chats and 16 for prompts."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="For lines without a temperature. Default: 1, as in OpenAI's API."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help=(
                "Makes sampling repeatable. A line without a seed gets this number plus the number "
                "of the line."
            )
        ),
    ] = None,
    max_rows: MaxRowsOption = 32,
) -> None:
    """Answer a file of requests. See docs/guide/batch.md.

    If the job is interrupted, run the same command again: it continues with the remaining lines.
    """
    check_packages("forerun batch", "serve", "fastapi", "prometheus_client")
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams(**given)  # checks the values
    method = serving.chosen_method(serving.model)
    job = _job_settings(serving, method) | sampling
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")  # as bodies of requests name it
    from forerun.scale.batch_file import scan
    from forerun.scale.batch_folder import Folder

    source = scan(input)
    folder = Folder(out, source, job)
    try:
        if folder.done:
            say(
                f"{len(folder.done)} of {len(source.numbers)} lines have a record from earlier runs"
            )
        seconds = 0.0
        if not folder.ended:
            make = _decoder_maker(serving, method, max_rows)
            lines = source.lines(set(folder.done), given)
            seconds = _answer(lines, folder, len(source.numbers), make, serving.name, max_rows)
            if not folder.ended:
                raise ValueError(
                    f"{input} is no plain file, or it changed while it was read. The answers so "
                    "far are kept; a changed input needs a folder of its own"
                )
        _show(folder.summarise(seconds), out)
    finally:
        folder.close()
    if folder.failed:
        say(f"{len(folder.failed)} lines failed; run the same command again to retry them")
        raise typer.Exit(1)


def _job_settings(serving: ServingOptions, method: Method | None) -> dict[str, Any]:
    """Return the options that decide the answers, which must be the same when a job continues."""
    options = serving.for_load() | {"target": serving.model, "model_name": serving.name}
    for name in NOT_IN_JOB:
        del options[name]
    options["method"] = None if method is None else {"name": method.name, **asdict(method)}
    return options


def _decoder_maker(
    serving: ServingOptions, method: Method | None, max_rows: int
) -> Callable[[], Decoder]:
    """Return what loads the decoder, in the thread that computes."""
    quiet()
    from forerun.server.worker import loaded

    options = serving.for_load() | {"max_rows": max_rows}
    return partial(loaded, serving.model, method, options, serving.threads)


def _answer(
    lines: Iterator[Line | BadLine],
    folder: Folder,
    total: int,
    make: Callable[[], Decoder],
    name: str,
    max_rows: int,
) -> float:
    """Answer the remaining ones of `total` lines; return the seconds that took, without loading."""
    import asyncio

    from tqdm import tqdm

    from forerun.scale import batch_local

    interval = TERMINAL_UPDATE if sys.stderr.isatty() else LOG_UPDATE
    with (
        tqdm(
            total=total, initial=len(folder.done), unit=" lines", mininterval=interval
        ) as progress,
        _before_sigterm(progress.close),  # so that its line ends
    ):
        return asyncio.run(batch_local.run(make, name, max_rows, lines, folder, progress.update))


@contextmanager
def _before_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Have a function called when SIGTERM comes, before the command's own handler."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        call()
        handler(number, frame)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _show(summary: dict[str, Any], out: Path) -> None:
    """Print the summary of a job, and where its files are."""
    run = summary["last_run"]
    counts = ", ".join(f"{summary[kind]} {words}" for kind, words in COUNTS.items())
    print(f"{summary['lines']} lines: {counts}")
    tokens = f"{summary['prompt_tokens']} prompt tokens, {summary['completion_tokens']} new tokens"
    print(f"{tokens}, tau {summary['tau']:.2f}")
    if run["seconds"]:
        speed = run["completion_tokens"] / run["seconds"]
        print(
            f"this run: {run['answered']} answers in {run['seconds']:.1f} s, {speed:.1f} tokens/s"
        )
    print(f"{out}/records.jsonl, {out}/summary.json")
