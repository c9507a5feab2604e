"""`forerun batch`: a file of requests, answered into a folder."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.common import quiet, say
from forerun.cli.options import MaxRowsOption, ServingOptions, check_packages, grouped
from forerun.sampling.params import SamplingParams

EVERY = 10.0  # seconds between two lines about the progress, where stderr is no terminal
KINDS = ("answered", "refused", "bad_lines", "failed")


@grouped
def batch(
    input: Annotated[
        Path,
        typer.Argument(metavar="IN.jsonl", help="OpenAI's batch format, or prompts: one a line."),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder of the answers; a killed job goes on in its own."
        ),
    ],
    serving: ServingOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="For lines without max_tokens. Default: 1024 for chats, 16 for prompts."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="For lines without one. Default: 1, as OpenAI's.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="For lines without a seed, with the line's number added: repeatable sampling."
        ),
    ] = None,
    max_rows: MaxRowsOption = 32,
) -> None:
    """Answer a file of requests. Killed and run again, it goes on where it was. See docs/batch.md."""
    check_packages("forerun batch", "serve", "fastapi", "prometheus_client")
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams(**given)
    defaults = {
        "max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()
    }
    method = serving.chosen_method(serving.model)
    options = serving.for_load()
    from forerun.scale.batch_file import scan
    from forerun.scale.batch_folder import Folder

    # A job goes on with the options only that decided its answers so far.
    job = options | {"target": serving.model, "model_name": serving.name, **sampling}
    job["method"] = None if method is None else {"name": method.name, **asdict(method)}
    for name in ("device", "trust_remote_code", "kv_memory", "prompt_cache", "prompt_cache_bytes"):
        del job[name]
    source = scan(input)
    folder = Folder(out, source, job)
    try:
        if folder.done:
            say(f"{len(folder.done)} of {len(source.numbers)} lines have their record already")
        seconds = 0.0
        if not folder.ended:
            quiet()
            import asyncio

            from tqdm import tqdm

            from forerun.scale import batch_local
            from forerun.server import worker

            make = partial(
                worker.loaded,
                serving.model,
                method,
                options | {"max_rows": max_rows},
                serving.threads,
            )
            lines = source.lines(set(folder.done), defaults)
            pause = 0.1 if sys.stderr.isatty() else EVERY
            with tqdm(
                total=len(source.numbers),
                initial=len(folder.done),
                unit=" lines",
                mininterval=pause,
            ) as bar:
                seconds = asyncio.run(
                    batch_local.run(make, serving.name, max_rows, lines, folder, bar.update)
                )
            if not folder.ended:
                raise ValueError(
                    f"{input} is no plain file, or was changed meanwhile; what is answered is kept"
                )
        _show(folder.summarise(seconds), out)
    finally:
        folder.close()
    if folder.failed:
        say(f"{len(folder.failed)} lines failed; run the same command again to ask them again")
        raise typer.Exit(1)


def _show(summary: dict[str, Any], out: Path) -> None:
    run = summary["last_run"]
    counts = ", ".join(f"{summary[kind]} {kind.partition('_')[0]}" for kind in KINDS)
    print(f"{summary['lines']} lines: {counts}")
    tokens = f"{summary['prompt_tokens']} prompt tokens, {summary['completion_tokens']} new tokens"
    print(f"{tokens}, tau {summary['tau']:.2f}")
    if run["seconds"]:
        speed = run["completion_tokens"] / run["seconds"]
        print(
            f"this run: {run['answered']} answers in {run['seconds']:.1f} s, {speed:.1f} tokens/s"
        )
    print(f"{out}/records.jsonl, {out}/summary.json")
