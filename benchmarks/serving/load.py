"""forerun's server beside llama-cpp-python's and transformers', under the same chat load: smollm2's GGUF file, greedy.

    python -m benchmarks.serving.load --out FOLDER [--seconds 300] [--clients 1,4,16,64] [--rounds 1]

Needs the packages locust, psutil, llama-cpp-python[server] and transformers[serving]. A cell is one system under one
number of clients in one round. Each has a server of its own and a file in FOLDER/cells; those that are there are not
run again. FOLDER/load.json has them all.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.servers import (
    SYSTEMS,
    cpu_seconds,
    drive,
    end_on_signals,
    gauges,
    started,
    system,
)
from forerun.bench.report import provenance
from forerun.files import write_text

WARM = 4  # clients and requests of the warm-up, whose questions are asked by nobody else
OTHER = 10**6


def run_cell(
    name: str, clients: int, asked: argparse.Namespace, folder: Path, count: Any
) -> dict[str, Any]:
    """Starts a system's server, warms it up, and puts the load on it. `count`: the tokens of a text."""
    wanted = system(name, len(asked.cores), max(clients, WARM), asked.max_tokens, asked.temperature)
    log = folder / "server.log"
    shared = {"max_tokens": asked.max_tokens, "temperature": asked.temperature}
    with started(wanted, asked.cores, log) as (process, url):
        for quick in (True, False):
            own = {"clients": WARM, "requests": WARM, "first": OTHER} if quick else {}
            own = own or {"clients": clients, "seconds": asked.seconds}
            seen: list[dict[str, float]] = []
            over, before, spent = threading.Event(), os.getloadavg()[0], cpu_seconds(process.pid)
            watch = threading.Thread(target=_watch, args=(url, over, seen))
            if wanted.metrics and not quick:
                watch.start()
            try:
                kept = folder / ("warm-up.json" if quick else "requests.json")
                found = drive(
                    url, wanted.body, kept, asked.client_cores, lambda line: None, **shared, **own
                )
            finally:
                over.set()
                if watch.is_alive():
                    watch.join()
        server_cpu = (cpu_seconds(process.pid) - spent) / found["wall"]
    return {
        "system": name,
        "clients": clients,
        **figures(found, asked.seconds, count),
        "client_cores": found["cpu"] / found["wall"],  # cores that the load itself was busy on
        "server_cores": server_cpu,
        "load_before": before,
        "waiting": _middle(seen, "num_requests_waiting"),
        "running": _middle(seen, "num_requests_running"),
        "texts": {
            one["number"]: sha256(one["text"].encode()).hexdigest()[:8] for one in found["requests"]
        },
        "command": shlex.join(
            part.replace(str(Path.home()), "~") for part in ("python", *wanted.command[1:])
        ),
    }


def _watch(url: str, over: threading.Event, seen: list[dict[str, float]]) -> None:
    while not over.wait(2):
        seen.append(gauges(url))


def _middle(seen: list[dict[str, float]], name: str) -> dict[str, float] | None:
    values = [each[name] for each in seen if name in each]
    return {"mean": float(np.mean(values)), "max": max(values)} if values else None


def figures(found: dict[str, Any], seconds: float, count: Any) -> dict[str, Any]:
    """What clients saw. Tokens are counted in the texts, with one tokenizer for all systems; those of a text that came
    in part behind the end count in part."""
    good = [one for one in found["requests"] if not one["error"] and one["text"]]
    samples: dict[str, list[float]] = {
        "ttft_ms": [],
        "tpot_ms": [],
        "queue_ms": [],
        "request_s": [],
    }
    inside, tokens = 0.0, 0
    for one in good:
        number = count(one["text"])
        tokens += number
        inside += number * (1 - one["late"] / len(one["text"]))
        samples["ttft_ms"].append(1000 * (one["first"] - one["begin"]))
        samples["request_s"].append(one["end"] - one["begin"])
        if number > 1:
            samples["tpot_ms"].append(1000 * (one["last"] - one["first"]) / (number - 1))
        if one["queue_ms"] is not None:
            samples["queue_ms"].append(one["queue_ms"])
    told = [one for one in good if one["usage"]]
    result: dict[str, Any] = {
        "tokens_per_s": inside / seconds,
        "requests_per_s": sum(one["end"] <= seconds for one in good) / seconds,
        "requests": len(found["requests"]),
        "errors": found["errors"],
        "error": next((one["error"] for one in found["requests"] if one["error"]), None),
        "tokens": tokens,
        "told_over_counted": sum(one["usage"] for one in told) / max(1, tokens)
        if len(told) == len(good)
        else None,
        "wall": found["wall"],
    }
    for name, values in samples.items():
        for rank in (50, 99):
            result[f"{name}_p{rank}"] = float(np.percentile(values, rank)) if values else None
    return result


def gather(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells without texts, with the share of texts that are those of plain decoding at the same load."""
    plain = {
        (each["clients"], each["round"]): each["texts"]
        for each in cells
        if each["system"] == "forerun-ar"
    }
    result = []
    for each in cells:
        reference = plain.get((each["clients"], each["round"]), {})
        both = each["texts"].keys() & reference.keys()
        same = (
            sum(each["texts"][one] == reference[one] for one in both) / len(both) if both else None
        )
        result.append(
            {key: value for key, value in each.items() if key != "texts"} | {"same_text": same}
        )
    return result


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--cores", type=numbers, default=[0, 1], help="of the servers, a thread each"
    )
    parser.add_argument("--client-cores", type=numbers, help="of the load; the servers' by default")
    asked = parser.parse_args()
    asked.client_cores = asked.client_cores or asked.cores
    names = asked.systems.split(",")
    if not set(names) <= set(SYSTEMS):
        parser.error(f"--systems must be of {', '.join(SYSTEMS)}, not {asked.systems}")
    from forerun.api.loading import load_tokenizer
    from forerun.zoo import SMOLLM2

    tokenizer = load_tokenizer(SMOLLM2)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    same = ("seconds", "max_tokens", "temperature", "cores", "client_cores")
    how = {name: getattr(asked, name) for name in same}
    cells = asked.out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    for number in range(asked.rounds):
        for clients in asked.clients:
            for at in range(len(names)):  # each round begins with another system
                name = names[(at + number) % len(names)]
                path = cells / f"{name}-{clients}-{number}.json"
                if path.exists():
                    if json.loads(path.read_text())["how"] != how:
                        parser.error(f"{path} was made with other arguments: give another --out")
                    continue
                folder = asked.out / "raw" / path.stem
                folder.mkdir(parents=True, exist_ok=True)
                cell = run_cell(name, clients, asked, folder, count)
                kept = {"round": number, "how": how, **provenance({}), **cell}
                write_text(path, json.dumps(kept) + "\n")
                print(
                    f"round {number}, {clients} clients, {name}: {cell['tokens_per_s']:.1f} tokens/s",
                    flush=True,
                )
    all_cells = [json.loads(each.read_text()) for each in sorted(cells.glob("*.json"))]
    given = {key: value for key, value in vars(asked).items() if key != "out"}
    command = shlex.join(["python", "-m", "benchmarks.serving.load", *_shown(sys.argv[1:])])
    result = {"cells": gather(all_cells), **provenance(given), "command": command}
    write_text(asked.out / "load.json", json.dumps(result, indent=1) + "\n")
    print(asked.out / "load.json")


def _shown(arguments: list[str]) -> list[str]:
    """The arguments, without the path of a folder of this machine."""
    return [
        "FOLDER" if at and arguments[at - 1] == "--out" else each
        for at, each in enumerate(arguments)
    ]


if __name__ == "__main__":
    main()
