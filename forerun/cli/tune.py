"""`forerun tune`: the fastest method for a pair of models on this machine, kept for later runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.datasets import read_files
from forerun.bench.plan import Plan
from forerun.cli import options
from forerun.cli.common import quiet, say
from forerun.methods import default_method, method
from forerun.zoo import EMBEDDED, own_draft

PROMPTS, NEW_TOKENS = 24, 128  # the most that are decoded
FEW = 20  # prompts, below which a warning comes


@options.grouped
def tune(
    target: options.TargetOption = EMBEDDED,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = 1.0,
    data: Annotated[
        Path | None, typer.Option(help="Prompts of yours, a .jsonl file as for bench; held-out Python code by default.")
    ] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds that it may take.")] = 150.0,
    pre_verifier: options.PreVerifierOption = None,
    head: options.HeadOption = None,
    *,
    loading: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Measure what forwards cost here, choose method and settings on validation prompts, and keep them in a profile.

    Later runs with the same models, device, dtype and threads use it by default: for greedy decoding what was tuned
    with temperature 0, for sampling what was tuned with any other.
    """
    draft = loading.draft if loading.draft is not None else own_draft(target)
    if data is not None and data.suffix != ".jsonl":
        raise ValueError(f"--data takes a .jsonl file with a prompt a line, not '{data}'")
    if pre_verifier is not None and draft is None:
        raise ValueError("--pre-verifier needs a draft: give --draft")
    name = default_method(draft is not None)
    plan = Plan(
        **vars(loading) | {"draft": draft},
        methods={name: method(name)},
        datasets=(str(data) if data is not None else "stdlib-validation",),
        target=target,
        temperature=temperature,
        top_p=top_p,
        pre_verifier=pre_verifier,
        head=(str(head),) if head is not None else (),
        max_new_tokens=NEW_TOKENS,
        limit=PROMPTS,
    )
    files = read_files(plan.datasets, None, PROMPTS)
    if data is None and target != EMBEDDED and not as_json:
        say("no --data: choosing on the standard library's source; prompts like yours would fit better")
    if data is not None and (count := len(files[str(data)])) < FEW and not as_json:
        say(f"{data} has {count} prompts: with fewer than {FEW} the choice may be that of chance")
    quiet(loading.threads)
    from forerun.bench.tune import tune as run

    found = run(plan, files, budget=budget, say=(lambda line: None) if as_json else say)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(title="speedup over plain decoding")
    table.add_column("method")
    table.add_column("median", justify="right")
    measured = found["measured"]
    best: dict[str, str] = {}  # of each method; those of the last turn come first
    for name in measured:
        best.setdefault(name.partition(" ")[0], name)
    for name in best.values():
        table.add_row(name, f"{measured[name]:.2f}x")
    console.print(table)
    settings = ", ".join(f"{key}={value}" for key, value in found["settings"].items())
    console.print(
        f"{found['method']}{f' with {settings}' if settings else ''}: {found['measured_speedup']:.2f}x "
        f"as measured, in {found['seconds']:.0f} s"
    )
    console.print(f"later runs with these models use it; kept in {found['profile']}")
