"""`forerun batch`: a file of requests, answered into a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from forerun.cli.common import absolute, absolute_options, best_target, check_ray, needs, quiet, say, shown_name
from forerun.cli.options import (
    BestTargetOption,
    DecodeOptions,
    KvMemoryOption,
    MaxRowsOption,
    ModelNameOption,
    RayOption,
    grouped,
)
from forerun.sampling.params import SamplingParams

EVERY = 10.0  # seconds between two lines about the progress, if stderr is no terminal
# Options that decide what is answered: a job goes on with the same ones only.
DECIDING = (
    "draft",
    "pre_verifier",
    "head",
    "guard",
    "dtype",
    "weights",
    "draft_weights",
    "draft_vocabulary",
    "draft_tokens",
)


@grouped
def batch(
    input: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI's batch format, or prompts: one a line.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the answers; that of a killed job goes on.")],
    target: BestTargetOption = None,
    model_name: ModelNameOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of lines without max_tokens; else 1024 of chats, 16 of prompts.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of lines without one; else 1, as OpenAI's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of lines without one, with the line's number added: repeatable sampling.")
    ] = None,
    max_rows: MaxRowsOption = 32,
    kv_memory: KvMemoryOption = None,
    *,
    decoding: DecodeOptions,
    ray: RayOption = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Engines on the cluster; one a node by default.")] = None,
) -> None:
    """Answer a file of requests. Killed and run again, it goes on where it was. See docs/batch.md."""
    needs("forerun batch", serve=["fastapi", "prometheus_client"], ray=["ray"] if ray else [])
    check_ray(ray, actors=actors)
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams(**given)
    defaults = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
    model = best_target(target)
    method = decoding.chosen_method(model)
    options = absolute_options(decoding.for_load() | {"max_rows": max_rows, "kv_memory": kv_memory})
    from forerun.scale.batch_file import scan
    from forerun.scale.batch_folder import Folder

    shown = shown_name(model, model_name)
    job = {name: options[name] for name in DECIDING} | {"target": absolute(model), "model_name": shown, **sampling}
    job["method"] = None if method is None else {"name": method.name, **asdict(method)}
    source = scan(input)
    folder = Folder(out, source, job)
    try:
        if folder.done:
            say(f"{len(folder.done)} of {len(source.numbers)} lines have their record already")
        seconds = 0.0
        if not folder.ended:
            quiet()
            from forerun.server.worker import Loader

            loader = Loader(absolute(model), method, options, decoding.threads)
            lines = source.lines(set(folder.done), defaults)
            with _progress(folder, len(source.numbers)):
                seconds = _run(loader, shown, max_rows, lines, folder, ray, actors)
        _show(folder.summarise(seconds), out)
    finally:
        folder.close()
    if folder.failed:
        again = "run the same command again to ask them again"
        say(f"{len(folder.failed)} lines failed ({out}/failed.jsonl); {again}")
        raise typer.Exit(1)


def _run(
    loader: Any, shown: str, max_rows: int, lines: Iterator[Any], folder: Any, address: str | None, actors: int | None
) -> float:
    """Answer the lines with one engine here, or on a cluster; return the seconds."""
    if address is None:
        import asyncio

        from forerun.scale import batch_local

        return asyncio.run(batch_local.run(loader, shown, max_rows, lines, folder))
    from forerun.scale import batch_ray
    from forerun.scale.cluster import cluster

    with cluster(address, 256 * 2**20):
        return batch_ray.run(loader, shown, max_rows, lines, folder, actors)


@contextmanager
def _progress(folder: Any, total: int) -> Iterator[None]:
    """Show a bar on a terminal, a line now and then elsewhere."""
    begun = last = perf_counter()

    def figures() -> str:
        speed = folder.new.completion_tokens / max(1e-9, perf_counter() - begun)
        wrong = folder.counts.records - folder.counts.answered
        return f"{speed:.0f} tokens/s" + (f", {wrong} errors" if wrong else "")

    def print_line() -> None:
        nonlocal last
        if perf_counter() - last > EVERY:
            last = perf_counter()
            say(f"{folder.counts.records} of {total} lines, {figures()}")

    if not sys.stderr.isatty():
        folder.on_record = print_line
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=total, completed=folder.counts.records)
        folder.on_record = lambda: bar.update(task, completed=folder.counts.records, description=figures())
        yield


def _show(summary: dict[str, Any], out: Path) -> None:
    run, lines = summary["last_run"], summary["lines"]
    kinds = {"answered": "answered", "refused": "refused", "bad_lines": "bad", "failed": "failed"}
    print(f"{lines} lines: " + ", ".join(f"{summary[name]} {shown}" for name, shown in kinds.items()))
    tokens = f"{summary['prompt_tokens']} prompt tokens, {summary['completion_tokens']} new tokens"
    print(f"{tokens}, tau {summary['tau']:.2f}")
    if run["seconds"]:
        print(f"this run: {run['records']} lines in {run['seconds']:.1f} s, {run['tokens_per_second']:.1f} tokens/s")
    print(f"{out}/part-*.jsonl, {out}/summary.json")
