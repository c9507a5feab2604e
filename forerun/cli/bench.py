"""`forerun bench`: methods side by side on the same prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.api.choose import shipped
from forerun.bench.datasets import STDLIB, Prompt, read_files
from forerun.bench.plan import Plan, Runner, RunnerOf, parse_methods
from forerun.cli.common import quiet
from forerun.cli.options import (
    JsonOption,
    LoadOptions,
    MaxNewTokensOption,
    PreVerifierOption,
    TemperatureOption,
    TopPOption,
    grouped,
)
from forerun.methods import METHODS, Method
from forerun.zoo import EMBEDDED, own_draft

DEFAULT_DATASETS = ("stdlib-test",)
WIDTH_WITHOUT_TERMINAL = 140  # columns of the tables in a file or a pipe


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, on which prompts, and how often."""

    methods: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                f"Methods to measure: {', '.join(METHODS)}, or package.module:Class. "
                "ar always runs."
            )
        ),
    ] = None
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Prompts: {', '.join(STDLIB)}, or FILE.jsonl, which may be compressed as .gz."
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take only this many prompts of each dataset.")
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Render the prompts as messages, by the target's chat template."
        ),
    ] = False
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 2
    max_new_tokens: MaxNewTokensOption = 128
    out: Annotated[Path | None, typer.Option(help="Folder for records.jsonl and results.json.")] = (
        None
    )
    target: Annotated[
        str,
        typer.Option(
            help="Hub id, folder or GGUF file of the target model. Default: the embedded model."
        ),
    ] = EMBEDDED
    method_arg: Annotated[
        list[str] | None,
        typer.Option(help="A setting of a method, for example sd.gamma=6. May be repeated."),
    ] = None
    tune: Annotated[
        str | None,
        typer.Option(help="Find the best value of a setting, for example sd.gamma=2,3,4."),
    ] = None
    temperature: TemperatureOption = 0.0
    batch: Annotated[int, typer.Option(min=1, help="How many prompts are decoded together.")] = 1
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed of sampling: row i of round r is sampled with seed + 1000 r + i."
        ),
    ] = 0
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the prompts from the standard library.")
    ] = 128
    top_p: TopPOption = 1.0
    head: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Folder of the target's head, of the kind lyanna, eagle or EAGLE-3. "
                "May be repeated."
            )
        ),
    ] = None
    pre_verifier: PreVerifierOption = None
    guard: Annotated[
        bool,
        typer.Option("--guard/--no-guard", help="Stop drafting while drafts do not pay."),
    ] = False
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End an output at the end token.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder of --out, if any.")
    ] = False


@grouped
def bench(measuring: BenchOptions, *, loading: LoadOptions, as_json: JsonOption = False) -> None:
    """Measure methods in turns on the same prompts, in one process.

    --methods and --dataset take several values with commas between them. Settings that are not
    given are those that ship with the target.
    """
    plan, files = planned(vars(measuring) | vars(loading))
    results = measured(plan, files, measuring.out, measuring.resume)
    if as_json:
        print(json.dumps(results))
    else:
        show(results, measuring.out)


def planned(
    given: Mapping[str, Any], runner_of: RunnerOf | None = None, **more: Any
) -> tuple[Plan, dict[str, list[Prompt]]]:
    """Return the plan of the command's options, and the prompts of its files.

    Args:
        given: the options by their names.
        runner_of: makes what runs under a name that no method of ours has.
        **more: other fields of the plan.

    Raises:
        ValueError: an option has a bad value, or they do not fit together.
    """
    target = given["target"]
    draft = given["draft"]
    if draft is None:
        draft = own_draft(target)
    mode = "sampling" if given["temperature"] else "greedy"
    parsed = parse_methods(
        split(given["methods"]),
        given["method_arg"] or [],
        given["tune"],
        shipped(target, draft).get(mode, {}),
        runner_of,
    )
    chosen = {field.name: given[field.name] for field in fields(Plan) if field.name in given}
    chosen |= more
    chosen |= {
        "head": tuple(given["head"] or ()),
        "draft": draft,
        "methods": _resolved(parsed, has_draft=draft is not None),
        "datasets": tuple(split(given["dataset"])) or DEFAULT_DATASETS,
    }
    plan = Plan(**chosen)
    files = read_files(plan.datasets, plan.limit)
    quiet(plan.threads)
    return plan, files


def _resolved(
    methods: Mapping[str, Method | Runner], has_draft: bool
) -> dict[str, Method | Runner]:
    """Return methods in which no setting is "auto".

    Heads are left out of this choice, because the kind of a head is known only later.
    """
    resolved: dict[str, Method | Runner] = {}
    for name, method in methods.items():
        if isinstance(method, Runner):
            resolved[name] = method
        else:
            resolved[name] = method.resolve_defaults(has_draft, False, None)
    return resolved


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
    """Print a table for each dataset, and one of all datasets if there are several."""
    from rich.console import Console
    from rich.table import Table

    from forerun.bench.report import COLUMNS, row, sections

    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
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
    """Return the values of a repeatable option, each of which may hold several with commas."""
    return [part for value in values or [] for part in value.split(",") if part]


def progress(line: str) -> None:
    """Print a line on a terminal in place of the last one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Print a line that stays, in place of the line of progress."""
    progress("")
    print(line, file=sys.stderr, flush=True)
