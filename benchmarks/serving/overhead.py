"""What the server costs: the same prompts through the bare engine, and over HTTP, in turns.

    python -m benchmarks.serving.overhead --out FILE [--rows 1,16] [--rounds 10]

The engine is in this process. A round has both at each number of rows, one after the other, with
questions that neither has seen; which goes first changes. `ratio` is the server's tokens/s over the
engine's. It needs the packages locust and psutil. Clients run on the same cores; `client_cores`
says what they took, which is no cost of the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.serving.servers import (
    OURS,
    Service,
    cpu_seconds,
    end_on_signals,
    numbers,
    question,
    questions,
    run_clients,
    shown,
    started,
    system,
)
from benchmarks.serving.traffic import EngineServer, Job, drive, figures
from forerun.bench.report import provenance
from forerun.files import write_text
from forerun.zoo import SMOLLM2

Result = dict[str, Any]

WARM_UP_FIRST = 10**6  # number of the first question of the warm-up
# Requests of a round, at least: with three of one row, first tokens and luck with drafts would
# decide.
LEAST_REQUESTS = 12
SIDES = ("engine", "http")


class BareEngine:
    """The engine in this process, set up as the server's is."""

    def __init__(self, name: str, threads: int, max_tokens: int) -> None:
        import torch

        from forerun.api.load import load
        from forerun.sampling.params import SamplingParams

        torch.set_num_threads(threads)
        self.decoder = load("smollm2", method=OURS[name][1] if OURS[name] else None)
        self.params = SamplingParams(max_new_tokens=max_tokens)

    def run(self, rows: int, first: int, count: int) -> Result:
        """Answer so many questions, `rows` at once."""
        from forerun.text.chat import chat_prompt

        jobs = []
        for number in range(first, first + count):
            text = question(number, questions())
            ids = chat_prompt(self.decoder.tokenizer, [{"role": "user", "content": text}])
            jobs.append(Job(tuple(ids), self.params.max_new_tokens, 0.0, 0))
        served = drive(EngineServer(self.decoder, self.params), jobs, rows)
        row = figures(served)
        return {
            "tokens": int(row["tokens"]),
            "seconds": row["seconds"],
            "each": [len(request.tokens) for request in served],
        }


class HttpServer:
    """A server of forerun's, and clients that ask it."""

    def __init__(self, url: str, pid: int, folder: Path, options: argparse.Namespace) -> None:
        self.url = url
        self.pid = pid
        self.folder = folder
        self.options = options
        self.body = wanted_system(options).body

    def run(self, rows: int, first: int, count: int) -> Result:
        """Answer so many questions, `rows` at once. The clock ends with the last answer.

        Raises:
            RuntimeError: a request failed.
        """
        before = cpu_seconds(self.pid)
        results = run_clients(
            self.url,
            self.body,
            self.folder / "http.json",
            self.options.cores,
            max_tokens=self.options.max_tokens,
            clients=rows,
            requests=count,
            first=first,
        )
        requests = results["requests"]
        if results["errors"]:
            errors = [request["error"] for request in requests if request["error"]]
            raise RuntimeError(f"{results['errors']} requests failed: {errors[:1]}")
        begin = min(request["begin"] for request in requests)
        tokens = [request["usage"] for request in requests]
        return {
            "tokens": sum(tokens),
            "seconds": max(request["end"] for request in requests) - begin,
            "each": tokens,
            "client_cores": results["cpu"] / results["wall"],
            "server_cores": (cpu_seconds(self.pid) - before) / results["wall"],
        }


def wanted_system(options: argparse.Namespace) -> Any:
    service = Service(SMOLLM2, len(options.cores), 1, options.max_tokens)
    return system(options.system, service)


def summary(rounds: list[Result]) -> Result:
    """Return the figures of the rounds with one number of rows."""
    ratios = [one["ratio"] for one in rounds]
    low, high = np.percentile(ratios, (25, 75))
    speeds = {}
    for side in SIDES:
        speeds[side] = median(one[side]["tokens"] / one[side]["seconds"] for one in rounds)
    return {
        "rounds": len(rounds),
        "ratio": median(ratios),
        "ratio_p25": float(low),
        "ratio_p75": float(high),
        "engine_tokens_per_s": speeds["engine"],
        "http_tokens_per_s": speeds["http"],
        "client_cores": median(one["http"]["client_cores"] for one in rounds),
        "same_lengths": all(one["engine"]["each"] == one["http"]["each"] for one in rounds),
    }


def take_turns(
    engine: BareEngine, server: HttpServer, options: argparse.Namespace
) -> dict[int, list[Result]]:
    """Return the results of all rounds, by the number of rows."""
    sides = {"engine": engine, "http": server}
    for side in sides.values():
        side.run(max(options.rows), WARM_UP_FIRST, max(options.rows))
    rounds: dict[int, list[Result]] = {rows: [] for rows in options.rows}
    next_question = 0
    for number in range(options.rounds):
        for rows in options.rows:
            count = max(LEAST_REQUESTS, rows * options.requests)
            order = SIDES if number % 2 else SIDES[::-1]
            results: Result = {}
            for name in order:
                results[name] = sides[name].run(rows, next_question, count)
            next_question += count
            speeds = {name: one["tokens"] / one["seconds"] for name, one in results.items()}
            ratio = speeds["http"] / speeds["engine"]
            rounds[rows].append(results | {"ratio": ratio})
            print(f"round {number + 1}, {rows} rows: {ratio:.3f}", flush=True)
    return rounds


def main() -> None:
    end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=numbers, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=3, help="of a round, for each row")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--system", default="forerun", choices=OURS)
    parser.add_argument("--cores", type=numbers, default=[0, 1])
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    with TemporaryDirectory() as name:
        folder = Path(name)
        wanted = wanted_system(options)
        with started(wanted, options.cores, folder / "server.log") as (process, url):
            engine = BareEngine(options.system, len(options.cores), options.max_tokens)
            server = HttpServer(url, process.pid, folder, options)
            rounds = take_turns(engine, server, options)
    arguments = {key: value for key, value in vars(options).items() if key != "out"}
    command = ["python", "-m", "benchmarks.serving.overhead", *shown(sys.argv[1:], "FILE")]
    record = {
        "rows": {str(rows): summary(some) | {"all": some} for rows, some in rounds.items()},
        "command": shlex.join(command),
        **provenance(arguments),
    }
    write_text(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
