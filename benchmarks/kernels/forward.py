"""Time whole forwards of a model in few bits, by the length of the text before them.

    python benchmarks/kernels/forward.py MODEL... [--context 512,2048,8192]
        [--variants avx2,avx512vnni] [--llama] [--before CHECKOUT] [--no-whole] [--rounds 2]
        [--out FILE.json]

MODEL is a GGUF file, or a name that `forerun fetch` knows. For each length there are

- ms of forwards of 1, 2, 4 and 8 tokens after that many, with keys and values that are copies of
  one token's, because their values do not change the time;
- prompt tokens/s "after": of CHUNK tokens after that many;
- prompt tokens/s "whole": of a prompt of that many tokens, read from its beginning in chunks of
  CHUNK tokens.

`--llama` has llama.cpp in its best build (`npm install node-llama-cpp`) do the same in the same
rounds: it reads the prompt, then CHUNK tokens more, then decodes token by token. `--before` is
another checkout of forerun with its library built; it takes turns with this one, and "over_before"
is the median over rounds of the ratio of both times. Each instruction set, checkout and program
runs in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this checkout is measured

from forerun.bench.report import provenance
from forerun.csrc.library import variant
from forerun.zoo import ModelSource

Facts = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TOKENS = (1, 2, 4, 8)  # new tokens of a forward
CHUNK = 512  # tokens of a prompt chunk
CHUNKS = 3  # that are timed after each length
PEER = "llama.cpp"
PEER_SPARE = 64  # positions of llama.cpp's context beyond those that are filled
PEER_STEP = 256  # the size of its context is a multiple of this

OURS = """
import json, sys, time
import torch
import forerun
from forerun.backends.costs import after
from forerun.bench.report import versions
from forerun.engine.draft import Draft
asked = json.loads(sys.argv[1])
target = forerun.load(asked["model"], method="ar", prefix_bytes=0).target
chunk = [1000 + place % 5000 for place in range(asked["chunk"])]
def timed(call):
    started_at = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started_at)
def forwards(model, count):
    draft = Draft.chain(5, list(range(2000, 2000 + count - 1)))
    times = [timed(lambda: model.forward([0], [draft])) for _ in range(asked["repeats"] + 1)]
    return times[1:]  # the first follows one of another size
def chunks(model, context):
    times = []
    for _ in range(asked["chunks"] + 1):
        times.append(timed(lambda: model.extend([0], [chunk])))
        model.crop([0], [context])
    return times[1:]  # the first makes room
with torch.inference_mode():
    facts = {}
    for context in asked["contexts"]:
        model = after(target, context)
        times = {"ms": {count: forwards(model, count) for count in asked["tokens"]}}
        times["after_ms"] = chunks(model, context)
        if asked["whole"]:
            prompt, reader = [1000 + place % 5000 for place in range(context)], target.fresh()
            times["whole_ms"] = [timed(lambda: list(reader.prefill(prompt, asked["chunk"])))]
        facts[context] = times
print(json.dumps({"contexts": facts, "versions": versions()}))
"""


def answers(output: str) -> list[Facts]:
    """Return the JSON objects among the lines of an output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def time_ours(question: Facts, checkout: Path, kernels: str, threads: int) -> Facts:
    """Time the forwards of a checkout by an instruction set."""
    environment = os.environ | {
        "FORERUN_KERNELS": kernels,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(checkout),
    }
    command = [sys.executable, "-c", OURS, json.dumps(question)]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{sys.executable} failed: {done.stderr.strip()[-2000:]}")
    return answers(done.stdout)[-1]


def time_llama(question: Facts, threads: int) -> Facts:
    """Time the forwards of llama.cpp."""
    script = ROOT / "benchmarks" / "peers" / "llama.mjs"
    node = shutil.which("node")
    if node is None:
        raise SystemExit("llama.cpp runs in Node.js here, and there is no node")
    positions = max(question["contexts"]) + question["chunk"] + question["repeats"] + PEER_SPARE
    length = -(-positions // PEER_STEP) * PEER_STEP
    lines: list[Facts] = [{"target": question["model"], "length": length, "threads": threads}]
    lines += [question | {"timed": context} for context in question["contexts"]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    command = [node, str(script)]
    done = subprocess.run(command, input=text, cwd=script.parent, capture_output=True, text=True)
    said = answers(done.stdout)
    errors = [answer["error"] for answer in said if "error" in answer]
    if errors or len(said) != len(lines):
        raise SystemExit(
            f"llama.cpp failed: {errors[0] if errors else done.stderr.strip()[-2000:]}"
        )
    package = ROOT / "node_modules/node-llama-cpp/package.json"
    return {
        "contexts": dict(zip(map(str, question["contexts"]), said[1:], strict=True)),
        "versions": {
            "node-llama-cpp": json.loads(package.read_text())["version"],
            "processor": said[0]["processor"],
        },
    }


def summary(rounds: list[Facts], question: Facts) -> Facts:
    """Return the medians over all rounds, and their ratios.

    The ratios say how much longer forwards of more tokens take, and those after longer texts.
    """
    figures: Facts = {}
    for context in map(str, question["contexts"]):
        times = [facts["contexts"][context] for facts in rounds]
        ms = median_ms(times)
        row = {"ms": ms, "over_1": {count: round(ms[count] / ms["1"], 2) for count in ms}}
        for name, tokens in (("after", question["chunk"]), ("whole", int(context))):
            chunks = [taken for each in times for taken in each.get(f"{name}_ms", ())]
            if chunks:
                row[f"prompt_tokens_per_s_{name}"] = round(1000 * tokens / median(chunks), 1)
        figures[context] = row
    first = figures[str(question["contexts"][0])]["ms"]["1"]
    for row in figures.values():
        row["1_over_first_context"] = round(row["ms"]["1"] / first, 2)
    return figures


def median_ms(times: list[Facts]) -> dict[str, float]:
    """Return the median milliseconds of a forward, by its number of tokens."""
    by_count: dict[str, list[float]] = defaultdict(list)
    for facts in times:
        for count, taken in facts["ms"].items():
            by_count[count] += taken
    return {count: round(median(taken), 2) for count, taken in by_count.items()}


def over(rounds: list[Facts], others: list[Facts], question: Facts) -> Facts:
    """Return the median over rounds of the ratio of these times to the others'."""
    figures: Facts = {}
    for context in map(str, question["contexts"]):
        pairs = [
            (facts["contexts"][context], other["contexts"][context])
            for facts, other in zip(rounds, others, strict=True)
        ]
        times, other_times = pairs[0]
        row = {}
        for count in times["ms"]:
            if count in other_times["ms"]:
                ratios = [median(a["ms"][count]) / median(b["ms"][count]) for a, b in pairs]
                row[count] = round(median(ratios), 3)
        for name in ("after_ms", "whole_ms"):
            if name in times:
                ratios = [median(a[name]) / median(b[name]) for a, b in pairs]
                row[f"prompt_{name.removesuffix('_ms')}"] = round(median(ratios), 3)
        figures[context] = row
    return figures


def measure(model: str, args: argparse.Namespace) -> Facts:
    """Return the figures of a model, by instruction set, checkout and program."""
    source = ModelSource.parse(model, "target")
    question = {
        "model": str(source.gguf or source.location),
        "contexts": [int(length) for length in args.context.split(",")],
        "tokens": TOKENS,
        "repeats": args.repeats,
        "chunk": CHUNK,
        "chunks": CHUNKS,
        "whole": args.whole,
    }
    rounds = run_rounds(model, question, args)
    figures: Facts = {}
    for label, some in rounds.items():
        figures[label] = {"contexts": summary(some, question), "versions": some[0]["versions"]}
        if label == PEER:
            continue
        before = f"{label} before"
        if before in rounds:
            figures[label]["over_before"] = over(some, rounds[before], question)
        if PEER in rounds:
            figures[label][f"over_{PEER}"] = over(some, rounds[PEER], question)
    return figures


def run_rounds(model: str, question: Facts, args: argparse.Namespace) -> dict[str, list[Facts]]:
    """Return the times of each round, by instruction set, checkout and program."""
    rounds: dict[str, list[Facts]] = defaultdict(list)

    def tell(number: int, label: str) -> None:
        print(f"{model}, round {number + 1}: {label}", file=sys.stderr, flush=True)

    for number in range(args.rounds):
        for name in args.variants.split(","):
            checkouts = [(name, ROOT)]
            if args.before:
                checkouts.append((f"{name} before", args.before))
            # The checkouts change places, so that neither is always the first.
            for label, checkout in reversed(checkouts) if number % 2 else checkouts:
                rounds[label].append(time_ours(question, checkout, name, args.threads))
                tell(number, label)
        if args.llama:
            rounds[PEER].append(time_llama(question, args.threads))
            tell(number, PEER)
    return rounds


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument(
        "--context", default="256", help="tokens before the forwards, as in 512,2048,8192"
    )
    parser.add_argument(
        "--variants", default=variant(), help="instruction sets, as in avx2,avx512vnni"
    )
    parser.add_argument("--llama", action="store_true", help="llama.cpp too, by node-llama-cpp")
    parser.add_argument("--before", type=Path, help="another checkout of forerun, to run in turns")
    parser.add_argument(
        "--whole",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read whole prompts too",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.before is not None:
        args.before = args.before.resolve()
    return args


def main() -> None:
    args = parsed()
    results = {}
    for model in args.models:
        name = Path(model).name
        results[name] = measure(model, args)
        print(json.dumps({name: results[name]}), flush=True)
    if args.out is not None:
        names = ("context", "variants", "llama", "whole", "rounds", "repeats", "threads")
        arguments = {name: getattr(args, name) for name in names}
        arguments |= {"models": list(results), "before": bool(args.before)}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"results": results, **provenance(arguments)}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
