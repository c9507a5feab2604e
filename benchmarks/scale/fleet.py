"""What `forerun simulate --fleet` says of a small load, beside servers that have it: smollm2, plain decoding.

    python benchmarks/scale/fleet.py OUT [--rate 1.0] [--requests 40] [--rows 8]

One replica and two: each is a server process with one thread on a core of its own; this script sends each request to
the replica with the fewest in flight, as the simulation does. Its own work goes to the first core. What forwards cost
is measured before, on one core, with nothing else running; what a step takes beside is the time a token of a request
alone beyond that. Prompts are random tokens, so that they share no prefix. OUT gets costs.json, trace.jsonl and
fleet.json. Times mean something on a quiet machine with two cores alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from servers import end_on_signals, started, system  # type: ignore[import-not-found]

from forerun.bench.arrivals import Arrival, read_trace
from forerun.bench.fleet import Figures, fleet, percentile
from forerun.bench.replica import Engines
from forerun.bench.report import provenance
from forerun.costs import Costs

VOCABULARY = (1000, 20000)  # ordinary tokens
ALONE = Arrival(0.0, 32, 64)


def trace_of(rate: float, requests: int, seed: int) -> list[Arrival]:
    random, at, found = Random(seed), 0.0, []
    for _ in range(requests):
        found.append(Arrival(round(at, 4), random.randint(16, 256), random.randint(16, 64)))
        at += random.expovariate(rate)
    return found


async def ask(client: httpx.AsyncClient, url: str, arrival: Arrival, seed: int) -> tuple[float, float]:
    """Seconds until the first token, and those of a token behind it."""
    random = Random(seed)
    prompt = [random.randint(*VOCABULARY) for _ in range(arrival.prompt)]
    body = {"prompt": prompt, "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True, "stream": True}
    begun, first, last = perf_counter(), None, 0.0
    async with client.stream("POST", url + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = perf_counter()
                first = first or last
    assert first is not None
    return first - begun, (last - first) / max(1, arrival.output - 1)


async def load(urls: list[str], trace: list[Arrival], seed: int) -> tuple[list[tuple[float, float]], float]:
    """What requests saw, in their order, and the seconds of all. Another seed is other prompts."""
    flying = dict.fromkeys(urls, 0)

    async def one(number: int, arrival: Arrival) -> tuple[float, float]:
        await asyncio.sleep(max(0.0, begun + arrival.seconds - perf_counter()))
        url = min(flying, key=lambda each: flying[each])
        flying[url] += 1
        try:
            return await ask(client, url, arrival, 10**6 * seed + number)
        finally:
            flying[url] -= 1

    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        begun = perf_counter()
        found = await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(trace)))
        return list(found), perf_counter() - begun


def measured(found: list[tuple[float, float]], seconds: float, trace: list[Arrival]) -> dict[str, Any]:
    first, token = ([1000 * each[place] for each in found] for place in (0, 1))
    return {
        "first_ms": (percentile(first, 50), percentile(first, 99)),
        "token_ms": (percentile(token, 50), percentile(token, 99)),
        "per_second": round(sum(arrival.output for arrival in trace) / seconds, 2),
    }


def beside(real: dict[str, Any], told: Figures) -> dict[str, Any]:
    """Measured, predicted, and how far off that is."""
    predicted = {key: asdict(told)[key] for key in real}
    pairs = [(real[key][at], predicted[key][at]) for key in ("first_ms", "token_ms") for at in (0, 1)]
    pairs.append((real["per_second"], predicted["per_second"]))
    errors = [round(said / was - 1, 3) for was, said in pairs]
    names = ("first_ms 50 %", "first_ms 99 %", "token_ms 50 %", "token_ms 99 %", "per_second")
    return {"measured": real, "predicted": predicted, "error": dict(zip(names, errors, strict=True))}


def costs_here(cores: list[int]) -> Costs:
    import torch

    import forerun
    from forerun.runtime.costs import forward_costs

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    target = forerun.load("smollm2", method="ar").target
    return Costs(forward_costs(target, (1, 2, 4, 8, 16, 32, 64, 128, 256)), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two replicas need two cores")
    end_on_signals()
    asked.out.mkdir(parents=True, exist_ok=True)
    costs = costs_here(cores[1:2])
    os.sched_setaffinity(0, cores[:1])
    (asked.out / "costs.json").write_text(json.dumps(asdict(costs)) + "\n")
    trace, path = trace_of(asked.rate, asked.requests, asked.seed), asked.out / "trace.jsonl"
    lines = [{"seconds": one.seconds, "prompt_tokens": one.prompt, "output_tokens": one.output} for one in trace]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_trace(path) == trace
    wanted = system("forerun-ar", 1, asked.rows, 64, 0.0, ("--max-rows", str(asked.rows)))
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        log, urls = asked.out / "server.log", list[str]()
        # The first replica has the core that is not this script's.
        for core in (cores[1], cores[0]):
            urls.append(stack.enter_context(started(wanted, [core], log))[1])
            for seed in (11, 12):  # the first one warms up
                ((_, alone),), _ = asyncio.run(load([urls[-1]], [ALONE], seed))
            if len(urls) == 1:
                step_ms = max(0.0, round(1000 * alone - costs.verify(1), 4))
                engines = Engines(costs, asked.rows, step_ms=step_ms)
            real = measured(*asyncio.run(load(urls, trace, len(urls))), trace)
            found[str(len(urls))] = beside(real, fleet(trace, engines, len(urls)))
    arguments = {key: value for key, value in vars(asked).items() if key != "out"}
    result = {"replicas": found, "step_ms": step_ms, "costs": asdict(costs)} | provenance(arguments)
    (asked.out / "fleet.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({count: each["error"] for count, each in found.items()}))


if __name__ == "__main__":
    main()
