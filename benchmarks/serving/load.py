"""forerun's server beside two others under the same chat load.

    python -m benchmarks.serving.load --out FOLDER [--seconds 300] [--clients 1,4,16,64]
        [--rounds 1] [--target smollm2]

The others are those of llama.cpp and transformers; all serve the target's GGUF file, greedily by
default. It needs the packages locust, psutil and transformers[serving], and llama.cpp's program
llama-server, built for this processor. A cell is one system under one number of clients in one
round. Each cell has its own server and its own file in FOLDER/cells; those that exist are not run
again. FOLDER/load.json has them all.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.servers import (
    SYSTEMS,
    Service,
    cpu_seconds,
    end_on_signals,
    gauges,
    numbers,
    run_clients,
    shown,
    started,
    system,
)
from forerun.bench.report import provenance
from forerun.files import write_text
from forerun.zoo import SMOLLM2

Cell = dict[str, Any]

WARM_UP = 4  # clients and requests of the warm-up
WARM_UP_FIRST = 10**6  # number of its first question, so that nobody else asks its questions
WATCH_SECONDS = 2  # between two looks at a server's figures


def run_cell(
    name: str,
    clients: int,
    options: argparse.Namespace,
    folder: Path,
    count: Callable[[str], int],
) -> Cell:
    """Start a system's server, warm it up, and put the load on it.

    Args:
        name: one of SYSTEMS.
        clients: how many ask at once.
        options: those of the command.
        folder: gets the logs and the clients' results.
        count: returns the number of tokens of a text.
    """
    rows = max(clients, WARM_UP)
    service = Service(
        options.target,
        len(options.cores),
        rows,
        options.max_tokens,
        options.temperature,
    )
    wanted = system(name, service)
    common = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    seen: list[dict[str, float]] = []
    with started(wanted, options.cores, folder / "server.log") as (process, url):
        warm_up = {"clients": WARM_UP, "requests": WARM_UP, "first": WARM_UP_FIRST}
        run_clients(
            url,
            wanted.body,
            folder / "warm-up.json",
            options.client_cores,
            **common,
            **warm_up,
        )
        load_before = os.getloadavg()[0]
        cpu_before = cpu_seconds(process.pid)
        with watched(url, seen) if wanted.metrics else unwatched():
            results = run_clients(
                url,
                wanted.body,
                folder / "requests.json",
                options.client_cores,
                **common,
                clients=clients,
                seconds=options.seconds,
            )
        server_cpu = cpu_seconds(process.pid) - cpu_before
    requests = results["requests"]
    command = (Path(wanted.command[0]).name, *wanted.command[1:])
    return {
        "system": name,
        "clients": clients,
        **figures(results, options.seconds, count),
        "client_cores": results["cpu"] / results["wall"],  # cores on which the load was busy
        "server_cores": server_cpu / results["wall"],
        "load_before": load_before,
        "waiting": _mean_and_most(seen, "num_requests_waiting"),
        "running": _mean_and_most(seen, "num_requests_running"),
        "texts": {request["number"]: _digest(request["text"]) for request in requests},
        "command": shlex.join(word.replace(str(Path.home()), "~") for word in command),
    }


@contextmanager
def watched(url: str, seen: list[dict[str, float]]) -> Iterator[None]:
    """Add a server's figures to `seen` now and then while the block runs."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_SECONDS):
            seen.append(gauges(url))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def unwatched() -> Iterator[None]:
    yield


def _mean_and_most(seen: list[dict[str, float]], name: str) -> dict[str, float] | None:
    values = [gauge[name] for gauge in seen if name in gauge]
    return {"mean": float(np.mean(values)), "max": max(values)} if values else None


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def figures(results: Cell, seconds: float, count: Callable[[str], int]) -> Cell:
    """Return the figures that clients saw.

    Tokens are counted in the texts, with one tokenizer for all systems. A text that came in part
    after the end counts in part.
    """
    requests = results["requests"]
    good = [request for request in requests if not request["error"] and request["text"]]
    counts = [count(request["text"]) for request in good]
    in_time = 0.0
    for request, tokens in zip(good, counts, strict=True):
        in_time += tokens * (1 - request["late"] / len(request["text"]))
    told = [request["usage"] for request in good if request["usage"]]
    all_told = len(told) == len(good)
    row: Cell = {
        "tokens_per_s": in_time / seconds,
        "requests_per_s": sum(request["end"] <= seconds for request in good) / seconds,
        "requests": len(requests),
        "errors": results["errors"],
        "error": next((request["error"] for request in requests if request["error"]), None),
        "tokens": sum(counts),
        "told_over_counted": sum(told) / max(1, sum(counts)) if all_told else None,
        "wall": results["wall"],
    }
    for name, values in _samples(good, counts).items():
        for rank in (50, 95, 99):
            row[f"{name}_p{rank}"] = float(np.percentile(values, rank)) if values else None
    return row


def _samples(requests: list[Cell], counts: list[int]) -> dict[str, list[float]]:
    """Return the times of all requests; `counts` are their tokens."""
    samples: dict[str, list[float]] = {
        "ttft_ms": [],
        "tpot_ms": [],
        "queue_ms": [],
        "request_s": [],
    }
    for request, tokens in zip(requests, counts, strict=True):
        samples["ttft_ms"].append(1000 * (request["first"] - request["begin"]))
        samples["request_s"].append(request["end"] - request["begin"])
        if tokens > 1:
            rest = request["last"] - request["first"]
            samples["tpot_ms"].append(1000 * rest / (tokens - 1))
        if request["queue_ms"] is not None:
            samples["queue_ms"].append(request["queue_ms"])
    return samples


def gather(cells: list[Cell]) -> list[Cell]:
    """Return the cells without their texts.

    They get the share of texts that are those of plain decoding at the same load.
    """
    plain = {}
    for cell in cells:
        if cell["system"] == "forerun-ar":
            plain[cell["clients"], cell["round"]] = cell["texts"]
    rows = []
    for cell in cells:
        reference = plain.get((cell["clients"], cell["round"]), {})
        texts = cell["texts"]
        both = texts.keys() & reference.keys()
        same = sum(texts[number] == reference[number] for number in both)
        row = {key: value for key, value in cell.items() if key != "texts"}
        rows.append(row | {"same_text": same / len(both) if both else None})
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--target", default=SMOLLM2)
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--cores", type=numbers, default=[0, 1], help="of the servers, a thread each"
    )
    parser.add_argument("--client-cores", type=numbers, help="of the load; the servers' by default")
    options = parser.parse_args()
    options.client_cores = options.client_cores or options.cores
    if not set(options.systems.split(",")) <= set(SYSTEMS):
        parser.error(f"--systems must be of {', '.join(SYSTEMS)}, not {options.systems}")
    return options


def token_counter(target: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text with the target's tokenizer."""
    from forerun.api.loading import load_tokenizer

    tokenizer = load_tokenizer(target)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def run_missing(options: argparse.Namespace) -> None:
    """Run the cells that are missing. Raises SystemExit for cells of other options."""
    names = options.systems.split(",")
    count = token_counter(options.target)
    same = ("target", "seconds", "max_tokens", "temperature", "cores", "client_cores")
    how = {name: getattr(options, name) for name in same}
    for number in range(options.rounds):
        first = number % len(names)
        for clients in options.clients:
            for name in names[first:] + names[:first]:  # each round begins with another system
                path = options.out / "cells" / f"{name}-{clients}-{number}.json"
                if path.exists():
                    if json.loads(path.read_text())["how"] != how:
                        raise SystemExit(f"{path} was made with other options: give another --out")
                    continue
                folder = options.out / "raw" / path.stem
                folder.mkdir(parents=True, exist_ok=True)
                cell = run_cell(name, clients, options, folder, count)
                record = {"round": number, "how": how, **provenance({}), **cell}
                write_text(path, json.dumps(record) + "\n")
                print(
                    f"round {number}, {clients} clients, {name}: {cell['tokens_per_s']:.1f} "
                    "tokens/s",
                    flush=True,
                )


def main() -> None:
    end_on_signals()
    options = parsed()
    cells = options.out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    run_missing(options)
    all_cells = [json.loads(path.read_text()) for path in sorted(cells.glob("*.json"))]
    arguments = {key: value for key, value in vars(options).items() if key != "out"}
    command = ["python", "-m", "benchmarks.serving.load", *shown(sys.argv[1:], "FOLDER")]
    record = {
        "cells": gather(all_cells),
        **provenance(arguments),
        "command": shlex.join(command),
    }
    write_text(options.out / "load.json", json.dumps(record, indent=1) + "\n")
    print(options.out / "load.json")


if __name__ == "__main__":
    main()
