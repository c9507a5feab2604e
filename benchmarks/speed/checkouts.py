"""Two checkouts of forerun in turns, on the embedded pair: is one slower than the other?

    python benchmarks/speed/checkouts.py OLD NEW [--methods ar,sd] [--prompts 12] [--rows 1]
        [--rounds 2] [--tokens 128]

OLD and NEW are folders that hold the package. Each has its own process, which loads all methods
once. They take turns on every prompt, in an order that changes, so that a busy moment of the
machine does not always fall on the same one. The last line is one JSON object: for each method the
median over prompts of NEW's tokens/s over OLD's, and whether all outputs were equal.
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
    name, first = json.loads(line)
    batch = [prompts[(first + row) % count] for row in range(rows)]
    started_at = time.perf_counter()
    results = decoders[name].generate(batch, max_new_tokens=tokens, ignore_eos=True)
    seconds = time.perf_counter() - started_at
    print(json.dumps([seconds, [result.tokens for result in results]]), flush=True)
"""


class Worker:
    """A process with one of the checkouts.

    Attributes:
        file: where it imported forerun from.
    """

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
        """Return the seconds and outputs of a batch that begins with a prompt."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, prompt]) + "\n")
        self.process.stdin.flush()
        return self.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs=2, metavar="FOLDER")
    parser.add_argument("--methods", default="ar,sd,pacer-ouroboros,lyanna")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1, help="prompts that are decoded together")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    arguments = [args.methods, *map(str, (args.prompts, args.tokens, args.rows))]
    workers = [Worker(folder, arguments) for folder in args.folders]
    print(*(worker.file for worker in workers), sep="\n")
    ratios: dict[str, list[float]] = {}
    equal = True
    for turn in range(args.rounds):
        for prompt in range(args.prompts):
            for method in args.methods.split(","):
                order = (0, 1) if (prompt + turn) % 2 else (1, 0)
                runs = {number: workers[number].run(method, prompt) for number in order}
                old_seconds, old_outputs = runs[0]
                new_seconds, new_outputs = runs[1]
                equal = equal and old_outputs == new_outputs
                ratios.setdefault(method, []).append(old_seconds / new_seconds)
    speeds = {
        method: {"median": round(median(values), 4), "of": len(values)}
        for method, values in ratios.items()
    }
    results = {"new_over_old": speeds, "equal": equal, "tokens": args.tokens, "rows": args.rows}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
