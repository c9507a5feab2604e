"""A run under load: methods in turns on the same requests, closed loops and open ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from forerun.api import Decoder
from forerun.bench.batching import BatchingServer
from forerun.bench.choose import BATCHING, STATIC
from forerun.bench.datasets import Prompt
from forerun.bench.decoders import load_decoders
from forerun.bench.load import EngineServer, Load, Served, Server, drive, figures, jobs_of, middle
from forerun.bench.measure import WARM_UP, turned
from forerun.bench.models import load_peers, load_prompts
from forerun.bench.pages import load_markdown
from forerun.bench.peers import Peers
from forerun.bench.plan import Plan
from forerun.bench.records import first_difference
from forerun.bench.report import provenance
from forerun.bench.session import claimed
from forerun.files import write_text

STATIC_ROWS = 16  # requests of a static batch


def serve(
    plan: Plan,
    files: dict[str, list[Prompt]],
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures the plan's loads and returns the results; with `out` they are also there as files.

    Raises ValueError as `forerun.bench.session.bench` does, and where there are fewer prompts than requests: phrases of
    a prompt that comes again would know its answer.
    """
    datasets, tokenizer = load_prompts(plan, files)
    prompts = [prompt.tokens or () for rows in datasets.values() for prompt in rows]
    if len(prompts) < plan.requests:
        raise ValueError(f"--requests {plan.requests} are more than the {len(prompts)} prompts, which come once each")
    facts = claimed(plan, datasets, out)
    peers = load_peers(plan)
    decoders, *_ = load_decoders(plan, tokenizer, out)
    longest = max(map(len, prompts)) + plan.lengths[1]

    def server(name: str) -> Any:
        return _server(plan, name, decoders, peers, longest)

    loads = [*(Load(clients=each) for each in plan.clients), *(Load(rate=each) for each in plan.rate)]
    warm = plan.lengths if plan.graphs else (1, min(WARM_UP, plan.lengths[1]))
    rows = min(plan.requests, max(plan.clients, default=8))
    for name in plan.methods:
        with server(name) as each:
            drive(each, jobs_of(Load(clients=rows), prompts, rows, warm, plan.seed), rows)
    found: dict[Load, dict[str, list[list[Served]]]] = {load: {name: [] for name in plan.methods} for load in loads}
    for number in range(plan.rounds):
        for index, load in enumerate(loads):
            jobs = jobs_of(load, prompts, plan.requests, plan.lengths, plan.seed + 1000 * number)
            for name in turned(list(plan.methods), number, index):
                with server(name) as each:
                    found[load][name].append(drive(each, jobs, load.clients))
                say(f"round {number + 1} of {plan.rounds}, {load.kind} {load.size}: {name}")
    results = _results(plan, facts, found)
    if out is not None:
        from forerun.bench.plots import plot_rows

        pictures = [f"rows-{load.kind}-{load.size}.png" for load in loads]
        for load, picture in zip(loads, pictures, strict=True):
            plot_rows({name: rounds[-1] for name, rounds in found[load].items()}, out / picture)
        lines = [
            json.dumps({load.kind: load.size, "method": name, "round": number, "requests": [*map(asdict, served)]})
            for load, methods in found.items()
            for name, rounds in methods.items()
            for number, served in enumerate(rounds)
        ]
        write_text(out / "records.jsonl", "".join(f"{line}\n" for line in lines))
        write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
        write_text(out / "report.md", load_markdown(results, plan.command(), pictures))
    return results


@contextmanager
def _server(plan: Plan, name: str, decoders: dict[str, Decoder], peers: Peers | None, longest: int) -> Iterator[Server]:
    if name != BATCHING:
        yield EngineServer(decoders[name], plan.params(), STATIC_ROWS if name.startswith(STATIC) else None)
        return
    assert peers is not None
    server = BatchingServer(peers, plan.rows, longest)
    try:
        yield server
    finally:
        server.close()


def _results(
    plan: Plan, facts: dict[str, dict[str, Any]], found: dict[Load, dict[str, list[list[Served]]]]
) -> dict[str, Any]:
    """What results.json holds: {kind: {size: figures}} of the first method of ours that is named, then of all."""
    methods: dict[str, dict[str, Any]] = {name: {} for name in plan.methods}
    for load, each in found.items():
        for name, rounds in each.items():
            methods[name].setdefault(load.kind, {})[load.size] = _compared(rounds, each, not plan.temperature)
    ours = [name for name, method in plan.methods.items() if method is not None and not name.startswith(STATIC)]
    chief = next((name for name in ours if name != "ar"), "ar")
    first = {
        kind: {size: {"method": chief} | each for size, each in sizes.items()} for kind, sizes in methods[chief].items()
    }
    return first | {
        "methods": methods,
        "prompts": facts,
        **provenance(plan.arguments()),
    }


def _compared(rounds: list[list[Served]], others: dict[str, list[list[Served]]], greedy: bool) -> dict[str, Any]:
    """A method's figures under one load, its tokens/s over each other method's, and where its greedy output differs
    from that of `ar`."""
    own = [figures(served) for served in rounds]
    over = {
        name: round(median(a["tokens_per_s"] / figures(b)["tokens_per_s"] for a, b in zip(own, other, strict=True)), 4)
        for name, other in others.items()
    }
    found: dict[str, Any] = middle(own) | {"over": over}
    if greedy:
        pairs = [pair for a, b in zip(rounds, others["ar"], strict=True) for pair in zip(a, b, strict=True)]
        parted = [first_difference(one.tokens, reference.tokens) for one, reference in pairs]
        found["exact_match"] = round(parted.count(None) / len(parted), 4)
        found["differences"] = [
            {"request": at % len(rounds[0]), "position": each["at"]} for at, each in enumerate(parted) if each
        ]
    return found
