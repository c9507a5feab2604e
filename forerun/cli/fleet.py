"""`forerun simulate --fleet`: how many replicas a recorded load needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from forerun.bench.arrivals import read_trace
from forerun.bench.fleet import ROWS, Figures, as_object, cheapest, fleet, plan
from forerun.bench.replica import Engines
from forerun.bench.roofline import read_costs


def plan_fleet(
    trace: Path,
    *,
    costs: str | None,
    first_ms: float,
    token_ms: float,
    replicas: int | None,
    rows: int | None,
    kv: int | None,
    gamma: int,
    tau: float | None,
    step_ms: float,
    load: float,
    as_json: bool,
) -> None:
    """Prints the fewest replicas for a target, by rows; with `replicas` what these do."""
    if costs is None:
        raise ValueError("--fleet needs --costs: what a forward takes on a replica's machine")
    table = read_costs(costs)
    arrivals = read_trace(trace, load)
    if tau is not None:
        arrivals = [replace(each, tau=None) for each in arrivals]
    sizes = ROWS if rows is None else (rows,)
    engines = [Engines(table, each, kv, gamma, tau or 1.0, step_ms) for each in sizes]
    found: list[tuple[Engines, Figures | None]]
    if replicas is not None:
        found = [(each, fleet(arrivals, each, replicas)) for each in engines]
    else:
        found = list(plan(arrivals, engines, first_ms, token_ms))
    best = cheapest(found) if replicas is None else None
    if as_json:
        target = {"first_ms": first_ms, "token_ms": token_ms} if replicas is None else None
        shown = {"requests": len(arrivals), "costs": Path(costs).name, "load": load, "target": target}
        plans = {"plans": [as_object(*each) for each in found], "best": as_object(*best) if best is not None else None}
        print(json.dumps(shown | plans))
        return
    _show(found)
    if replicas is None:
        asked = f"99 % of first tokens within {first_ms:g} ms, of mean times a token within {token_ms:g} ms"
        if best is None:
            print(f"no number of replicas keeps {asked}")
            return
        each, its = best
        print(f"{its.replicas} replicas of {each.rows} rows, {its.kv} positions of KV each, keep {asked}")


def _show(found: list[tuple[Engines, Figures | None]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    times = ("first 50 %", "99 %", "token 50 %", "99 %")
    for title in ("rows", "replicas", *times, "used", "KV", "busy", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for engines, its in found:
        if its is None:
            table.add_row(str(engines.rows), "never", *[""] * 8)
            continue
        waits = [f"{value:.0f}" for value in its.first_ms] + [f"{value:.1f}" for value in its.token_ms]
        sizes = [str(its.rows), str(its.kv), f"{its.busy:.0%}", f"{its.per_second:.0f}"]
        table.add_row(str(engines.rows), str(its.replicas), *waits, *sizes)
    Console(highlight=False, soft_wrap=True).print(table)
    print("ms to the first token and ms a token behind it; rows used and positions of KV are the most of a replica")
