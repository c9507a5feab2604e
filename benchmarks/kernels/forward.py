"""Time whole forwards of a model in few bits after 256 tokens, for each instruction set, beside llama.cpp.

    python benchmarks/kernels/forward.py MODEL... [--variants avx2,avx512vnni] [--llama PYTHON] [--out FILE.json]

MODEL is a GGUF file, or a name that `forerun fetch` knows. Variants run in processes of their own, in turns. `--llama`
is the Python of an environment with the package xllamacpp, which then decodes and reads prompts in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from forerun.bench.report import versions
from forerun.zoo import locate

TOKENS, PROMPT = (1, 2, 3, 4, 6, 8, 12, 16), 256

OURS = """
import json, sys, time
import forerun
from forerun.engine.draft import Draft
found = forerun.load(sys.argv[1], method="ar", prefix_bytes=0).target
tokens, repeats = json.loads(sys.argv[2]), int(sys.argv[3])
prompt = list(range(1000, 1000 + 256))
reading = []
for _ in range(3):
    model = found.fresh()
    begun = time.perf_counter()
    list(model.prefill(prompt, len(prompt)))
    reading.append(len(prompt) / (time.perf_counter() - begun))
model.join(0, len(prompt) + 32)
times = {}
for count in tokens:
    draft = Draft.chain(5, list(range(2000, 2000 + count - 1)))
    own = []
    for _ in range(repeats):
        begun = time.perf_counter()
        model.forward([0], [draft])
        own.append(1000 * (time.perf_counter() - begun))
    times[count] = own
print(json.dumps({"ms": times, "prompt": reading}))
"""

LLAMA = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_gpu_layers, params.n_parallel = sys.argv[1], 2048, 0, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(params)
asked = {"temperature": 0, "cache_prompt": False}
times = []
for _ in range(4):
    body = {"prompt": [list(range(1000, 1256))], "n_predict": 48, "ignore_eos": True}
    found = server.handle_completions(body | asked)
    found = found[0] if isinstance(found, list) else found
    times.append((found["timings"]["predicted_per_second"], found["timings"]["prompt_per_second"]))
print(json.dumps({"decode": [each[0] for each in times], "prompt": [each[1] for each in times]}))
"""


def run(command: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--variants", default="avx2,avxvnni,avx512vnni")
    parser.add_argument("--llama", help="Python with xllamacpp.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    for name in asked.models:
        path = str(locate(name, "target"))
        ms: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        rates: dict[str, list[float]] = defaultdict(list)
        for _ in range(asked.rounds):
            for variant in asked.variants.split(","):
                arguments = [path, json.dumps(TOKENS), str(asked.repeats)]
                environment = {"FORERUN_KERNELS": variant, "OMP_NUM_THREADS": str(asked.threads)}
                found = run([sys.executable, "-c", OURS, *arguments], **environment)
                for count, times in found["ms"].items():
                    ms[variant][count] += times
                rates[variant] += found["prompt"]
            if asked.llama:
                found = run([asked.llama, "-c", LLAMA, path, str(asked.threads)])
                rates["llama.cpp decoding"] += found["decode"]
                rates["llama.cpp"] += found["prompt"]
        own = {
            variant: {count: round(median(times), 2) for count, times in each.items()} for variant, each in ms.items()
        }
        results[Path(path).name] = {
            "ms": own,
            "ratios": {v: {n: round(t / each["1"], 2) for n, t in each.items()} for v, each in own.items()},
            "tokens_per_s": {each: round(1000 / times["1"], 1) for each, times in own.items()},
            "prompt_tokens_per_s": {
                each: round(median(found), 1) for each, found in rates.items() if "dec" not in each
            },
            "llama_cpp_tokens_per_s": round(median(rates["llama.cpp decoding"]), 1) if asked.llama else None,
        }
        print(json.dumps({Path(path).name: results[Path(path).name]}), flush=True)
    if asked.out is not None:
        arguments = {"models": asked.models, "rounds": asked.rounds, "repeats": asked.repeats, "threads": asked.threads}
        asked.out.write_text(
            json.dumps({"results": results, "arguments": arguments, "versions": versions()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
