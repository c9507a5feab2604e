"""Two checkouts of forerun in turns, on the embedded pair: is one slower than the other?

    python benchmarks/speed/checkouts.py OLD NEW [--methods ar,sd] [--prompts 12] [--rows 1] [--rounds 2] [--tokens 128]

OLD and NEW are folders that hold the package. Each gets a process of its own, which loads all methods once. They take
turns on every prompt, in an order that changes, so that a busy moment of the machine does not fall on one of them. The
last line is one JSON object: for each method the median over prompts of NEW's tokens/s over OLD's, and whether all
outputs were equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median
from typing import Any

WORKER = """
import json, sys, time
import forerun
try:
    from forerun.train.corpus import held_out_prompts
except ImportError:  # until November 2026
    from forerun.zoo.corpus import held_out_prompts
methods, count, tokens, rows = sys.argv[1].split(","), *map(int, sys.argv[2:])
decoders = {name: forerun.load(method=name, guard=False, prefix_bytes=0) for name in methods}
prompts = held_out_prompts(next(iter(decoders.values())).tokenizer, "test", count=count)
for decoder in decoders.values():
    decoder.generate(prompts[-1], max_new_tokens=32)
print(json.dumps(forerun.__file__), flush=True)
for line in sys.stdin:
    name, at = json.loads(line)
    begun = time.perf_counter()
    results = decoders[name].generate(
        [prompts[(at + row) % count] for row in range(rows)], max_new_tokens=tokens, ignore_eos=True
    )
    seconds = time.perf_counter() - begun
    print(json.dumps([seconds, [result.tokens for result in results]]), flush=True)
"""


class Worker:
    """A process with one of the checkouts."""

    def __init__(self, folder: str, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.file = self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, method: str, prompt: int) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, prompt]) + "\n")
        self.process.stdin.flush()
        return self.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2, metavar="FOLDER")
    parser.add_argument("--methods", default="ar,sd,pacer-ouroboros,lyanna")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1, help="Prompts that are decoded together.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    arguments = [asked.methods, *map(str, (asked.prompts, asked.tokens, asked.rows))]
    workers = [Worker(folder, arguments) for folder in asked.folders]
    print(*(worker.file for worker in workers), sep="\n")
    ratios: dict[str, list[float]] = {}
    equal = True
    for turn in range(asked.rounds):
        for prompt in range(asked.prompts):
            for method in asked.methods.split(","):
                order = (0, 1) if (prompt + turn) % 2 else (1, 0)
                found = {which: workers[which].run(method, prompt) for which in order}
                equal = equal and found[0][1] == found[1][1]
                ratios.setdefault(method, []).append(found[0][0] / found[1][0])
    speeds = {
        method: {"median": round(median(own), 4), "of": len(own)} for method, own in ratios.items()
    }
    print(
        json.dumps(
            {"new_over_old": speeds, "equal": equal, "tokens": asked.tokens, "rows": asked.rows}
        )
    )


if __name__ == "__main__":
    main()
