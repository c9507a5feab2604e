"""Time plain decoding by one thread and by more, alone and beside a busy loop on each core.

    python benchmarks/kernels/busy.py [MODEL] [--threads 2] [--rounds 8] [--out FILE.json]

Each number of threads has a process of its own, which keeps its model. They decode the same text in
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from forerun.bench.report import versions

DECODER = """
import sys, time
import torch
import forerun
torch.set_num_threads(int(sys.argv[2]))
decoder = forerun.load(sys.argv[1], method="ar", prefix_bytes=0)
for line in sys.stdin:
    started_at = time.perf_counter()
    result = decoder.generate("Once upon a time", max_new_tokens=int(line), temperature=0)
    print(len(result.tokens) / (time.perf_counter() - started_at), flush=True)
"""

LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def rate(decoder: subprocess.Popen[str], tokens: int) -> float:
    """Return the tokens/s of one output."""
    assert decoder.stdin is not None
    assert decoder.stdout is not None
    print(tokens, file=decoder.stdin, flush=True)
    return float(decoder.stdout.readline())


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def measure(decoders: dict[int, subprocess.Popen[str]], rounds: int, tokens: int) -> dict[str, Any]:
    """Return tokens/s by the number of threads, and ratios of most threads to one."""
    rates: dict[int, list[float]] = {threads: [] for threads in decoders}
    for _ in range(rounds):
        for threads, decoder in decoders.items():
            rates[threads].append(rate(decoder, tokens))
    most = max(rates)
    ratios = [many / one for many, one in zip(rates[most], rates[1], strict=True)]
    return {
        "tokens_per_s": {threads: round(median(some), 1) for threads, some in rates.items()},
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    decoders = {n: start(DECODER, args.model, str(n)) for n in (1, args.threads)}
    loops: list[subprocess.Popen[str]] = []
    results = {}
    try:
        for decoder in decoders.values():
            rate(decoder, args.tokens)
        results["alone"] = measure(decoders, args.rounds, args.tokens)
        print("alone:", json.dumps(results["alone"]), flush=True)
        loops = [start(LOOP, str(core)) for core in sorted(os.sched_getaffinity(0))]
        results["busy"] = measure(decoders, args.rounds, args.tokens)
        print("busy:", json.dumps(results["busy"]), flush=True)
    finally:
        end([*loops, *decoders.values()])
    if args.out is not None:
        record = {"results": results, "versions": versions()}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
