"""What the server costs: the same prompts through the bare engine in this process, and over HTTP, in turns.

    python -m benchmarks.serving.overhead --out FILE [--rows 1,16] [--rounds 10]

A round has both at each number of rows, one behind the other, with questions that neither has seen; which goes first
changes. `ratio` is the server's tokens/s over the engine's. Needs the packages locust and psutil. Clients run on the
same cores, and `client_cores` says what they took; their share of that is no work of the server's.
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

from benchmarks.serving.load import numbers
from benchmarks.serving.servers import (
    OURS,
    cpu_seconds,
    drive,
    end_on_signals,
    question,
    questions,
    started,
    system,
)
from benchmarks.serving.traffic import EngineServer, Job, figures
from benchmarks.serving.traffic import drive as drive_engine
from forerun.bench.report import provenance
from forerun.files import write_text

WARM = 10**6  # number of the first question of the warm-up
LEAST = (
    12  # requests of a round: with three of one row, first tokens and luck with drafts would decide
)


class Bare:
    """The engine in this process, set up as the server's is."""

    def __init__(self, name: str, threads: int, max_tokens: int) -> None:
        import torch

        from forerun.api.load import load
        from forerun.sampling.params import SamplingParams

        torch.set_num_threads(threads)
        self.decoder = load("smollm2", method=OURS[name][1] if OURS[name] else None)
        self.params = SamplingParams(max_new_tokens=max_tokens)

    def run(self, rows: int, first: int, count: int) -> dict[str, Any]:
        """Answers so many questions, `rows` at once."""
        from forerun.text.chat import chat_prompt

        jobs = []
        for number in range(first, first + count):
            text = question(number, questions())
            ids = chat_prompt(self.decoder.tokenizer, [{"role": "user", "content": text}])
            jobs.append(Job(tuple(ids), self.params.max_new_tokens, 0.0, 0))
        served = drive_engine(EngineServer(self.decoder, self.params), jobs, rows)
        found = figures(served)
        return {
            "tokens": int(found["tokens"]),
            "seconds": found["seconds"],
            "each": [len(one.tokens) for one in served],
        }


def over_http(
    url: str, pid: int, folder: Path, body: dict[str, Any], asked: argparse.Namespace, **own: int
) -> Any:
    """The same over HTTP; raises RuntimeError where a request failed. Its clock ends with the last answer."""
    before = cpu_seconds(pid)
    found = drive(
        url,
        body,
        folder / "http.json",
        asked.cores,
        lambda line: None,
        max_tokens=asked.max_tokens,
        **own,
    )
    done = found["requests"]
    if found["errors"]:
        raise RuntimeError(
            f"{found['errors']} requests failed: {[one['error'] for one in done if one['error']][:1]}"
        )
    seconds = max(one["end"] for one in done) - min(one["begin"] for one in done)
    return {
        "tokens": sum(one["usage"] for one in done),
        "seconds": seconds,
        "each": [one["usage"] for one in done],
        "client_cores": found["cpu"] / found["wall"],
        "server_cores": (cpu_seconds(pid) - before) / found["wall"],
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds with one number of rows."""
    ratios = [each["ratio"] for each in rounds]
    low, high = np.percentile(ratios, (25, 75))
    speeds = {
        side: median(one[side]["tokens"] / one[side]["seconds"] for one in rounds)
        for side in ("engine", "http")
    }
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
    asked = parser.parse_args()
    os.sched_setaffinity(0, asked.cores)
    wanted = system(asked.system, len(asked.cores), 1, asked.max_tokens, 0.0)
    rounds: dict[int, list[dict[str, Any]]] = {rows: [] for rows in asked.rows}
    next_question = 0
    with (
        TemporaryDirectory() as name,
        started(wanted, asked.cores, Path(name) / "server.log") as (process, url),
    ):
        folder = Path(name)
        bare = Bare(asked.system, len(asked.cores), asked.max_tokens)

        def run(side: str, rows: int, first: int, count: int) -> dict[str, Any]:
            if side == "engine":
                return bare.run(rows, first, count)
            own = {"clients": rows, "requests": count, "first": first}
            return over_http(url, process.pid, folder, wanted.body, asked, **own)

        for side in ("engine", "http"):
            run(side, max(asked.rows), WARM, max(asked.rows))
        for number in range(asked.rounds):
            for rows in asked.rows:
                count = max(LEAST, rows * asked.requests)
                order = ("engine", "http") if number % 2 else ("http", "engine")
                found = {side: run(side, rows, next_question, count) for side in order}
                next_question += count
                speeds = {side: one["tokens"] / one["seconds"] for side, one in found.items()}
                rounds[rows].append({**found, "ratio": speeds["http"] / speeds["engine"]})
                print(
                    f"round {number + 1}, {rows} rows: {rounds[rows][-1]['ratio']:.3f}", flush=True
                )
    given = {key: value for key, value in vars(asked).items() if key != "out"}
    shown = [
        "FILE" if at and sys.argv[at] == "--out" else each for at, each in enumerate(sys.argv[1:])
    ]
    result = {
        "rows": {str(rows): summary(found) | {"all": found} for rows, found in rounds.items()},
        "command": shlex.join(["python", "-m", "benchmarks.serving.overhead", *shown]),
        **provenance(given),
    }
    write_text(asked.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
