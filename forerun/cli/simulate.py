"""`forerun simulate`: what a recorded run would be like at other costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.roofline import GPUS, read_costs


def simulate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `forerun bench --out`.")],
    costs: Annotated[
        str | None,
        typer.Option(
            help=f"FILE.json of milliseconds, or a roofline as h100x8:llama-3-70b:llama-160m, of {', '.join(GPUS)}."
        ),
    ] = None,
    learn: Annotated[
        Path | None,
        typer.Option(help="Without --costs: another run, to learn from it what takes time beside forwards."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Compute a run's speedups from its steps. With --costs: those on another machine. Without: beside the measured
    ones, for prompts from which nothing was learnt.

    Methods that go by costs act otherwise at others: record the run with `forerun bench --costs` of the same table.
    """
    table = read_costs(costs) if costs is not None else None
    if table is not None and learn is not None:
        raise ValueError("--learn is of no use with --costs: give one of them")
    from forerun.bench.simulate import check, read_run, simulated

    recorded = read_run(run)
    if table is None:
        found = check(recorded, read_run(learn) if learn is not None else None)
        columns = {"measured": "measured", "predicted": "predicted", "error": "error"}
    else:
        kept = ("speedup", "speedup_p10", "speedup_p90", "tau")
        datasets = {
            dataset: {name: {key: each[key] for key in kept} for name, each in methods.items()}
            for dataset, methods in simulated(recorded, table).items()
        }
        went_by = {"went_by": recorded.given or "what forwards cost where it was recorded"}
        found = {"datasets": datasets, "costs": costs} | went_by
        columns = {"speedup": "speedup", "speedup_p10": "10 %", "speedup_p90": "90 %", "tau": "tau"}
    if as_json:
        from forerun.bench.report import provenance

        arguments = {"run": run.resolve().name, "costs": Path(costs).name if costs is not None else None}
        arguments |= {"learn": learn.resolve().name if learn is not None else None}
        print(json.dumps(found | {"recorded": recorded.source} | provenance(arguments)))
        return
    _show(found, columns)


def _show(found: dict[str, Any], columns: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for dataset, methods in found["datasets"].items():
        table = Table(title=dataset)
        table.add_column("method")
        for title in columns.values():
            table.add_column(title, justify="right")
        for name, each in methods.items():
            table.add_row(name, *(f"{each[key]:+.1%}" if key == "error" else f"{each[key]:.2f}" for key in columns))
        console.print(table)
    if "went_by" in found:
        console.print(f"at the costs of {found['costs']}; methods that reckon went by {found['went_by']}")
