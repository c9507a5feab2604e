"""`forerun bench`: methods side by side on the same prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.api.choose import shipped
from forerun.bench.datasets import STDLIB, Prompt, read_files
from forerun.bench.plan import Plan, Runner, RunnerOf, parse_methods
from forerun.cli import options
from forerun.cli.common import quiet
from forerun.cli.options import (
    LoadOptions,
    MaxNewTokensOption,
    TemperatureOption,
    TopPOption,
    grouped,
)
from forerun.methods import METHODS
from forerun.zoo import EMBEDDED, own_draft


@grouped
def bench(
    methods: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; ar always runs.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STDLIB)} or FILE.jsonl, also .gz.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first prompts of each dataset.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Prompts are messages, rendered by the target's chat template."
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 2,
    max_new_tokens: MaxNewTokensOption = 128,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records.jsonl and results.json.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="Hub id, folder or GGUF file; the embedded one by default.")
    ] = EMBEDDED,
    method_arg: Annotated[
        list[str] | None, typer.Option(help="As in sd.gamma=6; repeatable.")
    ] = None,
    tune: Annotated[
        str | None, typer.Option(help="Find the best value, as in sd.gamma=2,3,4.")
    ] = None,
    temperature: TemperatureOption = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Of sampling: row i of round r uses seed + 1000 r + i.")
    ] = 0,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the standard library's prompts.")
    ] = 128,
    top_p: TopPOption = 1.0,
    head: Annotated[
        list[str] | None,
        typer.Option(help="Folder of the target's head: of lyanna, eagle or EAGLE-3; repeatable."),
    ] = None,
    pre_verifier: options.PreVerifierOption = None,
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="Leave drafts out while they do not pay.")
    ] = False,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End at the end token.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that --out holds, if any.")
    ] = False,
    *,
    loading: LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Measure methods in turns on the same prompts, in one process. Lists may be given with commas.

    Settings that are not given are those that come with the target.
    """
    given = locals()
    plan, files = planned(given | vars(loading))
    results = measured(plan, files, out, resume)
    if as_json:
        print(json.dumps(results))
    else:
        show(results, out)


def planned(
    given: dict[str, Any], runner_of: RunnerOf | None = None, **more: Any
) -> tuple[Plan, dict[str, list[Prompt]]]:
    """Return the plan of the command's options, by their names, and the prompts of its files. Raises ValueError.

    `runner_of` gives what runs under other names than those of our methods; `more` are other fields of the plan.
    """
    target, draft = (
        given["target"],
        given["draft"] if given["draft"] is not None else own_draft(given["target"]),
    )
    tuned = shipped(target, draft).get("sampling" if given["temperature"] else "greedy", {})
    methods = parse_methods(
        split(given["methods"]), given["method_arg"] or [], given["tune"], tuned, runner_of
    )
    # "auto" is a draft's method here: the kind of a head is known later.
    has = draft is not None, False, None
    methods = {
        n: each if isinstance(each, Runner) else each.resolve_defaults(*has)
        for n, each in methods.items()
    }
    chosen = {each.name: given[each.name] for each in fields(Plan) if each.name in given} | more
    chosen |= {"head": tuple(given["head"] or ()), "draft": draft}
    datasets = tuple(split(given["dataset"])) or ("stdlib-test",)
    plan = Plan(**chosen | {"methods": methods, "datasets": datasets})
    files = read_files(plan.datasets, plan.limit)
    quiet(plan.threads)
    return plan, files


def measured(
    plan: Plan, files: dict[str, list[Prompt]], out: Path | None, resume: bool = False
) -> dict[str, Any]:
    """Return the results of the plan; show progress on a terminal."""
    if resume and out is None:
        raise ValueError("--resume needs --out, the folder of the run that was stopped")
    from forerun.bench.measure import bench as run

    results = run(plan, files, out, resume=resume, say=progress, tell=tell)
    progress("")
    return results


def show(results: dict[str, Any], out: Path | None) -> None:
    """Print a table for each dataset, and one of all if there are several."""
    from rich.console import Console
    from rich.table import Table

    from forerun.bench.report import COLUMNS, row, sections

    console = Console(width=None if sys.stdout.isatty() else 140)
    for title, methods in sections(results):
        table = Table(title=title)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "method" else "right")
        for name, method in methods.items():
            table.add_row(*row(name, method))
        console.print(table)
    if "tuned" in results:
        console.print(f"best by median speedup: {json.dumps(results['tuned'])}")
    if out is not None:
        console.print(f"records and results are in {out}", soft_wrap=True)


def split(values: list[str] | None) -> list[str]:
    """Return the values of an option that may be repeated and takes several, with commas between them."""
    return [part for value in values or [] for part in value.split(",") if part]


def progress(line: str) -> None:
    """Print a line on a terminal in place of the last one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Print a line that stays, in place of one of progress."""
    progress("")
    print(line, file=sys.stderr, flush=True)
