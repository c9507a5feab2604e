"""`forerun batch`: a file of requests, answered into a folder."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from forerun.cli import common
from forerun.cli.chosen import chosen_method
from forerun.cli.common import load_options, quiet
from forerun.params import SamplingParams

EVERY = 10.0  # seconds between two lines about the progress, where stderr is no terminal


def batch(
    input: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI's batch format, or prompts: one a line.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the answers; that of a killed job goes on.")],
    target: common.BestTargetOption = None,
    draft: common.DraftOption = None,
    method: common.MethodOption = None,
    gamma: common.GammaOption = None,
    method_arg: common.MethodArgOption = None,
    pre_verifier: common.PreVerifierOption = None,
    head: common.HeadOption = None,
    model_name: common.ModelNameOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of lines that say no max_tokens; else 1024 of chats, 16 of prompts.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of lines that say none; else 1, as OpenAI's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of lines that say none, with the line's number added: repeatable sampling.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Sequences decoded at once, by each engine.")] = 32,
    kv_memory: Annotated[int | None, typer.Option(min=1, help="Bytes for keys and values of the target.")] = None,
    guard: common.GuardOption = None,
    dtype: common.DtypeOption = None,
    weights: common.WeightsOption = None,
    draft_weights: common.DraftWeightsOption = None,
    draft_vocabulary: common.DraftVocabularyOption = None,
    device: common.DeviceOption = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with, of each engine.")] = None,
    trust_remote_code: common.TrustOption = False,
    ray: common.RayOption = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Engines on the cluster; one a node by default.")] = None,
) -> None:
    """Answer a file of requests. Killed and run again, it goes on where it was. See docs/batch.md."""
    common.needs("forerun batch", serve=["fastapi", "prometheus_client"], ray=["ray", "pyarrow"] if ray else [])
    common.check_ray(ray, actors=actors)
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    SamplingParams(**{name: value for name, value in sampling.items() if value is not None})  # type: ignore[arg-type]
    defaults = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in sampling.items()}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    name = common.best_target(target)
    settings, is_named = chosen_method(name, draft, method, gamma, method_arg, pre_verifier, head)
    options = common.whole_options(load_options(locals()))
    from forerun.scale.batch_file import scan
    from forerun.scale.batch_folder import Folder

    shown = common.shown_name(name, model_name)
    chosen = settings if is_named else None
    decides = ("draft", "pre_verifier", "head", "guard", "dtype", "weights", "draft_weights", "draft_vocabulary")
    job = {key: options[key] for key in decides} | {"target": common.whole(name), "model_name": shown, **sampling}
    job["method"] = None if chosen is None else {"name": chosen.name, **asdict(chosen)}
    source = scan(input)
    folder = Folder(out, source, job)
    try:
        told = len(folder.done)
        if told:
            print(f"forerun: {told} of {len(source)} lines have their record already", file=sys.stderr)
        if folder.ended:
            seconds = 0.0
        else:
            how = common.whole(name), chosen, options, threads
            seconds = _run(how, shown, max_rows, ray, actors, source, folder, defaults)
        _show(folder.summarise(seconds), out)
    finally:
        folder.close()
    if folder.failed:
        again = "run the same command again to ask them again"
        print(f"forerun: {len(folder.failed)} lines failed ({out}/failed.jsonl); {again}", file=sys.stderr)
        raise typer.Exit(1)


def _run(
    how: tuple[str, Any, dict[str, Any], int | None],
    shown: str,
    max_rows: int,
    address: str | None,
    actors: int | None,
    source: Any,
    folder: Any,
    defaults: dict[str, Any],
) -> float:
    def lines() -> Iterator[Any]:
        return iter(source.lines(folder.done | folder.failed, defaults))

    quiet()
    from forerun.server.loader import Loader

    loader = Loader(*how)
    if address is None:
        from forerun.scale import batch_local

        with _progress(folder, len(source)) as on_record:
            return asyncio.run(batch_local.run(loader, shown, max_rows, lines(), folder, on_record))
    from forerun.scale import batch_ray
    from forerun.scale.cluster import cluster

    with cluster(address, 256 * 2**20), _progress(folder, len(source)) as on_record:
        return batch_ray.run(loader, shown, max_rows, lines, folder, on_record, actors)


@contextmanager
def _progress(folder: Any, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line now and then elsewhere. What is yielded is to be called behind each record."""
    begun = perf_counter()

    def figures() -> str:
        speed = folder.new.completion_tokens / max(1e-9, perf_counter() - begun)
        wrong = folder.counts.records - folder.counts.answered
        return f"{speed:.0f} tokens/s" + (f", {wrong} errors" if wrong else "")

    if not sys.stderr.isatty():
        last = begun

        def tell() -> None:
            nonlocal last
            if perf_counter() - last > EVERY:
                last = perf_counter()
                print(f"forerun: {folder.counts.records} of {total} lines, {figures()}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=total, completed=folder.counts.records)
        yield lambda: bar.update(task, completed=folder.counts.records, description=figures())


def _show(summary: dict[str, Any], out: Path) -> None:
    run, lines = summary["last_run"], summary["lines"]
    kinds = {"answered": "answered", "refused": "refused", "bad_lines": "bad", "failed": "failed"}
    print(f"{lines} lines: " + ", ".join(f"{summary[name]} {shown}" for name, shown in kinds.items()))
    tokens = f"{summary['prompt_tokens']} prompt tokens, {summary['completion_tokens']} new tokens"
    print(f"{tokens}, tau {summary['tau']:.2f}")
    if run["seconds"]:
        print(f"this run: {run['records']} lines in {run['seconds']:.1f} s, {run['tokens_per_second']:.1f} tokens/s")
    print(f"{out}/part-*.jsonl, {out}/summary.json")
