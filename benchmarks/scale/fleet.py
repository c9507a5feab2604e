"""What `forerun simulate --fleet` says of a small load, beside servers that have it: smollm2, plain decoding.

    python benchmarks/scale/fleet.py OUT [--rounds 8] [--rate 1.0] [--requests 30] [--rows 8]

Two replicas: each is a server process with one thread on a core of its own. This script sends each request to the
replica with the fewest in flight, as the simulation does. Its own work goes to the first core. Each round has a trace
of its own, which one replica gets and then both, every second round the other way round. What forwards cost is
measured before, on one core, with nothing else running; what a step takes beside is the time a token of a request
alone beyond that. Prompts are random tokens, so that they share no prefix.

OUT must be empty or absent: a run takes about ten minutes, and is not resumed. It gets costs.json, trace-N.jsonl of
each round, runs.jsonl as they end, and fleet.json. Times mean something on a quiet machine with two cores alone.
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
from statistics import median
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
ALONE, TIMES = Arrival(0.0, 32, 64), 5  # a request alone, so many times


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


def measured(found: list[tuple[float, float]], seconds: float, trace: list[Arrival]) -> dict[str, float]:
    first, token = ([1000 * each[place] for each in found] for place in (0, 1))
    per_second = round(sum(arrival.output for arrival in trace) / seconds, 2)
    return named(
        (percentile(first, 50), percentile(first, 99)), (percentile(token, 50), percentile(token, 99)), per_second
    )


def predicted(told: Figures) -> dict[str, float]:
    return named(told.first_ms, told.token_ms, told.per_second)


def named(first: tuple[float, float], token: tuple[float, float], per_second: float) -> dict[str, float]:
    names = ("first_ms 50 %", "first_ms 99 %", "token_ms 50 %", "token_ms 99 %", "per_second")
    return dict(zip(names, (*first, *token, per_second), strict=True))


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each figure the medians over rounds, and how far off predictions are: median, least and most."""
    found = {}
    for name in runs[0]["measured"]:
        real, told = ([each[kind][name] for each in runs] for kind in ("measured", "predicted"))
        errors = [said / was - 1 for was, said in zip(real, told, strict=True)]
        found[name] = {
            "measured": round(median(real), 3),
            "predicted": round(median(told), 3),
            "error": [round(each, 3) for each in (median(errors), min(errors), max(errors))],
        }
    return found


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
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=30, help="of a round")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two replicas need two cores")
    if asked.out.exists() and any(asked.out.iterdir()):
        raise SystemExit(f"{asked.out} is not empty: a run begins anew")
    end_on_signals()
    asked.out.mkdir(parents=True, exist_ok=True)
    costs = costs_here(cores[1:2])
    os.sched_setaffinity(0, cores[:1])
    (asked.out / "costs.json").write_text(json.dumps(asdict(costs)) + "\n")
    wanted = system("forerun-ar", 1, asked.rows, 64, 0.0, ("--max-rows", str(asked.rows)))
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack, (asked.out / "runs.jsonl").open("w") as file:
        log, urls = asked.out / "server.log", list[str]()
        # The first replica has the core that is not this script's.
        for core in (cores[1], cores[0]):
            urls.append(stack.enter_context(started(wanted, [core], log))[1])
        alone = []
        for url in urls:
            for number in range(1 + TIMES):  # the first one warms up
                ((_, each),), _ = asyncio.run(load([url], [ALONE], 1000 + number))
                alone += [each] if number and url == urls[0] else []
        step_ms = max(0.0, round(1000 * median(alone) - costs.verify(1), 4))
        engines = Engines(costs, asked.rows, step_ms=step_ms)
        for number in range(asked.rounds):
            trace, path = trace_of(asked.rate, asked.requests, asked.seed + number), asked.out / f"trace-{number}.jsonl"
            lines = [
                {"seconds": one.seconds, "prompt_tokens": one.prompt, "output_tokens": one.output} for one in trace
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            assert read_trace(path) == trace
            for count in (1, 2) if number % 2 == 0 else (2, 1):
                real = measured(*asyncio.run(load(urls[:count], trace, 10 * number + count)), trace)
                told = predicted(fleet(trace, engines, count))
                runs.append({"round": number, "replicas": count, "measured": real, "predicted": told})
                print(json.dumps(runs[-1]), file=file, flush=True)
    found = {str(count): summary([each for each in runs if each["replicas"] == count]) for count in (1, 2)}
    arguments = {key: value for key, value in vars(asked).items() if key != "out"}
    result = {"replicas": found, "runs": runs, "step_ms": step_ms, "costs": asdict(costs)} | provenance(arguments)
    (asked.out / "fleet.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
