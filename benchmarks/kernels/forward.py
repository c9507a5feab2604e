"""Time whole forwards of a model in few bits, by the length of the text before them and by instruction set.

    python benchmarks/kernels/forward.py MODEL... [--context 512,2048,8192] [--variants avx2,avx512vnni] [--llama]
        [--before CHECKOUT] [--no-whole] [--rounds 2] [--out FILE.json]

MODEL is a GGUF file, or a name that `forerun fetch` knows. For each length there are

- ms of forwards of 1, 2, 4 and 8 tokens after that many, with keys and values that are copies of one token's, because
  what they are does not change the time;
- prompt tokens/s "after": of CHUNK tokens after that many;
- prompt tokens/s "whole": of a prompt of that many tokens, read from its beginning in chunks of CHUNK tokens.

`--llama` has llama.cpp in its best build (`npm install node-llama-cpp`) do the same in the same turns: it reads the
prompt, then CHUNK tokens more, then decodes token by token. `--before` is another checkout of forerun with its library
built; it runs in turns with this one, and "over_before" is the median over rounds of the ratio of both times. Each
instruction set, checkout and program runs in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this checkout is measured

from forerun.bench.report import versions  # noqa: E402
from forerun.csrc.library import variant  # noqa: E402
from forerun.zoo import locate  # noqa: E402
from forerun.zoo.gguf_file import find  # noqa: E402

TOKENS, CHUNK, CHUNKS = (
    (1, 2, 4, 8),
    512,
    3,
)  # new tokens of a forward; tokens and number of prompt chunks
PEER = "llama.cpp"
Found = dict[str, Any]

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
    begun = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun)
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
    found = {}
    for context in asked["contexts"]:
        model = after(target, context)
        own = {"ms": {count: forwards(model, count) for count in asked["tokens"]}}
        own["after_ms"] = chunks(model, context)
        if asked["whole"]:
            prompt, reader = [1000 + place % 5000 for place in range(context)], target.fresh()
            own["whole_ms"] = [timed(lambda: list(reader.prefill(prompt, asked["chunk"])))]
        found[context] = own
print(json.dumps({"contexts": found, "versions": versions()}))
"""


def run(command: list[str], cwd: Path, **environment: str) -> Found:
    """Run a program; return the JSON of its last line."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: Found = json.loads(lines[-1])
    return found


def ours(asked: Found, checkout: Path, name: str, threads: int) -> Found:
    """Time the forwards of a checkout by an instruction set."""
    environment = {
        "FORERUN_KERNELS": name,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(checkout),
    }
    return run([sys.executable, "-c", OURS, json.dumps(asked)], checkout, **environment)


def theirs(asked: Found, threads: int) -> Found:
    """Time llama.cpp's."""
    script = ROOT / "benchmarks" / "peers" / "llama.mjs"
    node = shutil.which("node")
    if node is None:
        raise SystemExit("llama.cpp runs in Node.js here, and there is no node")
    longest = max(asked["contexts"]) + asked["chunk"] + asked["repeats"] + 64
    lines = [{"target": asked["model"], "length": -(-longest // 256) * 256, "threads": threads}]
    lines += [asked | {"timed": context} for context in asked["contexts"]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(
        [node, str(script)], input=text, cwd=script.parent, capture_output=True, text=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = next((each["error"] for each in answers if "error" in each), None)
    if failed is not None or len(answers) != len(lines):
        raise SystemExit(f"llama.cpp failed: {failed or done.stderr.strip()[-2000:]}")
    package = ROOT / "node_modules/node-llama-cpp/package.json"
    told = {
        "node-llama-cpp": json.loads(package.read_text())["version"],
        "processor": answers[0]["processor"],
    }
    return {
        "contexts": dict(zip(map(str, asked["contexts"]), answers[1:], strict=True)),
        "versions": told,
    }


def summary(turns: list[Found], asked: Found) -> Found:
    """Return the medians over all turns, and how much longer forwards of more tokens and after longer texts take."""
    found: Found = {}
    for context in map(str, asked["contexts"]):
        own = [turn["contexts"][context] for turn in turns]
        times: dict[str, list[float]] = defaultdict(list)
        for each in own:
            for count, taken in each["ms"].items():
                times[count] += taken
        ms = {count: round(median(taken), 2) for count, taken in times.items()}
        found[context] = {
            "ms": ms,
            "over_1": {count: round(taken / ms["1"], 2) for count, taken in ms.items()},
        }
        for name, tokens in (("after", asked["chunk"]), ("whole", int(context))):
            taken = [each for part in own for each in part.get(f"{name}_ms", ())]
            if taken:
                found[context][f"prompt_tokens_per_s_{name}"] = round(
                    1000 * tokens / median(taken), 1
                )
    first = found[str(asked["contexts"][0])]["ms"]["1"]
    for each in found.values():
        each["1_over_first_context"] = round(each["ms"]["1"] / first, 2)
    return found


def over(turns: list[Found], others: list[Found], asked: Found) -> Found:
    """Return the median over rounds of the ratio of these times to the others' in the same round."""
    found: Found = {}
    for context in map(str, asked["contexts"]):
        pairs = [
            (turn["contexts"][context], other["contexts"][context])
            for turn, other in zip(turns, others, strict=True)
        ]
        counts = [count for count in pairs[0][0]["ms"] if count in pairs[0][1]["ms"]]
        found[context] = {
            count: round(
                median(
                    median(own["ms"][count]) / median(other["ms"][count]) for own, other in pairs
                ),
                3,
            )
            for count in counts
        }
        for name in ("after", "whole"):
            if f"{name}_ms" in pairs[0][0]:
                ratios = [
                    median(own[f"{name}_ms"]) / median(other[f"{name}_ms"]) for own, other in pairs
                ]
                found[context][f"prompt_{name}"] = round(median(ratios), 3)
    return found


def measure(model: str, given: argparse.Namespace) -> Found:
    """Return the figures of a model."""
    file = find(locate(model, "target"))
    asked = {
        "model": str(file or locate(model, "target")),
        "contexts": [int(each) for each in given.context.split(",")],
        **{
            "tokens": TOKENS,
            "repeats": given.repeats,
            "chunk": CHUNK,
            "chunks": CHUNKS,
            "whole": given.whole,
        },
    }
    turns: dict[str, list[Found]] = defaultdict(list)
    for number in range(given.rounds):
        for name in given.variants.split(","):
            checkouts = [(name, ROOT)] + (
                [(f"{name} before", given.before)] if given.before else []
            )
            for label, checkout in checkouts[
                :: -1 if number % 2 else 1
            ]:  # neither is always the first
                turns[label].append(ours(asked, checkout, name, given.threads))
                print(f"{model}, round {number + 1}: {label}", file=sys.stderr, flush=True)
        if given.llama:
            turns[PEER].append(theirs(asked, given.threads))
            print(f"{model}, round {number + 1}: {PEER}", file=sys.stderr, flush=True)
    found: Found = {label: {"contexts": summary(own, asked)} for label, own in turns.items()}
    for label, own in turns.items():
        found[label]["versions"] = own[0]["versions"]
        if label == PEER:
            continue
        if f"{label} before" in turns:
            found[label]["over_before"] = over(own, turns[f"{label} before"], asked)
        if PEER in turns:
            found[label][f"over_{PEER}"] = over(own, turns[PEER], asked)
    return found


def main() -> None:
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
    given = parser.parse_args()
    if given.before is not None:
        given.before = given.before.resolve()
    results = {}
    for model in given.models:
        name = Path(model).name
        results[name] = measure(model, given)
        print(json.dumps({name: results[name]}), flush=True)
    names = ("context", "variants", "llama", "whole", "rounds", "repeats", "threads")
    told = {each: getattr(given, each) for each in names} | {
        "models": list(results),
        "before": bool(given.before),
    }
    if given.out is not None:
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        whole = {"results": results, "arguments": told, "versions": versions(), "date": date}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
