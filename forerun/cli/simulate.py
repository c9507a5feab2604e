"""`forerun simulate`: what a recorded run would be like at other costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.roofline import GPUS, read_costs
from forerun.cli.fleet import plan_fleet


def simulate(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run of `forerun bench --out`.")] = None,
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
    fleet: Annotated[
        Path | None,
        typer.Option(help="Instead of a run: arrivals as JSON lines, or a server's log of --log-json (docs/scale.md)."),
    ] = None,
    first_ms: Annotated[float, typer.Option(help="--fleet: 99 % of first tokens come within.")] = 1000.0,
    token_ms: Annotated[float, typer.Option(help="--fleet: 99 % of requests have a mean time a token within.")] = 100.0,
    replicas: Annotated[int | None, typer.Option(help="--fleet: what so many do, in place of a target.")] = None,
    rows: Annotated[int | None, typer.Option(help="--fleet: of a replica; default: 1, 2, 4 .. 64 are tried.")] = None,
    kv: Annotated[int | None, typer.Option(help="--fleet: positions that a replica's KV has room for.")] = None,
    gamma: Annotated[
        int, typer.Option(help="--fleet: tokens drafted a step; drafts cost nothing where the table has none.")
    ] = 0,
    tau: Annotated[float | None, typer.Option(help="--fleet: tokens a step; default: the trace's own, else 1.")] = None,
    step_ms: Annotated[float, typer.Option(help="--fleet: of a step beyond its forwards.")] = 0.0,
    load: Annotated[float, typer.Option(help="--fleet: so many times the trace's requests a second.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Compute a run's speedups from its steps. With --costs: those on another machine. Without: beside the measured
    ones, for prompts from which nothing was learnt.

    Methods that go by costs act otherwise at others: record the run with `forerun bench --costs` of the same table.

    With --fleet: how many replicas, rows and positions of KV recorded arrivals need.
    """
    if (run is None) == (fleet is None):
        raise ValueError("give a run's folder or --fleet TRACE, one of them")
    if fleet is not None:
        if learn is not None:
            raise ValueError("--learn is for a run, not for --fleet")
        plan_fleet(
            fleet,
            costs=costs,
            first_ms=first_ms,
            token_ms=token_ms,
            replicas=replicas,
            rows=rows,
            kv=kv,
            gamma=gamma,
            tau=tau,
            step_ms=step_ms,
            load=load,
            as_json=as_json,
        )
        return
    assert run is not None
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
