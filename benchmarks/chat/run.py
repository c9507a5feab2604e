"""Runs the benches behind docs/results/chat.md, one after the other, and keeps each one's results here.

    python benchmarks/chat/run.py --data DATA [--only greedy,batch-4] [--runs runs/chat]

Each run goes on where it was stopped; one that is done is not made again. Settings were chosen from the validation
runs, of ours (`forerun/zoo/weights/smollm2/tuned.json`) and of peers (below). Leave the machine alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OURS = "ar,sd,cumulative,confidence,pacer,lookup,suffix,hybrid,ouroboros"
SAMPLED = "ar,sd,cumulative,pacer,lookup,suffix,hybrid"
HEADS = "ar,sd,cumulative,lyanna,pacer-lyanna,eagle,pacer-eagle"
LLAMA = "llama-cpp,llama-cpp-lookup/2/3"
THEIRS = "hf-ar,hf-lookup/5/3,hf-assisted/constant/3/0.4,hf-forward/ar,hf-forward/sd"
TEST = "{here}/test.jsonl,humaneval,gsm8k"
REPEATS = "{here}/../suffix/agent.jsonl,{here}/../suffix/edits.jsonl"
VALIDATION = "--dataset {here}/validation.jsonl --limit 12 --rounds 2"
KNOBS = {  # what forerun/zoo/weights/smollm2/tuned.json was chosen from: the best by median speedup
    "sd.gamma": "1,2,3,4,5,6",
    "cumulative.threshold": "0.2,0.3,0.4,0.5,0.6",
    "pacer.threshold": "0.4,0.5,0.6,0.7,0.8 --method-arg pacer.block=1",
    "lookup.gamma": "2,3,5,8",
    "hybrid.threshold": "1,2,3,6 --method-arg hybrid.other=cumulative",
    "ouroboros.gamma": "2,3,5",
    "lyanna.depth": "1,2,3,4",
    "eagle.depth": "1,2,3,4",
    "pacer-lyanna.block": "1,2,3",
    "pacer-eagle.block": "1,2",
}
# Of each run: what `forerun bench` is called with, beside what all are.
RUNS = {
    **{f"validation-{knob}": f"{VALIDATION} --tune {knob}={values}" for knob, values in KNOBS.items()},
    **{f"validation-1-{knob}": f"{VALIDATION} --tune {knob}={KNOBS[knob]} --temperature 1" for knob in list(KNOBS)[:5]},
    "greedy": f"--dataset {TEST} --limit 12 --rounds 3 --methods {OURS},{LLAMA}",
    "greedy-512": f"--dataset {TEST} --limit 8 --rounds 2 --max-new-tokens 512 --methods {OURS},{LLAMA}",
    "nucleus": f"--dataset {TEST} --limit 8 --rounds 2 --methods {SAMPLED} --temperature 0.7 --top-p 0.9",
    "temperature-1": f"--dataset {TEST} --limit 8 --rounds 2 --methods {SAMPLED} --temperature 1",
    "heads": f"--dataset {TEST} --limit 8 --rounds 2 --methods {HEADS}",
    # Batches with the guard, as everything but `forerun bench` decodes: many rows leave little to gain on a CPU.
    "batch-4": f"--dataset {TEST} --limit 12 --rounds 3 --batch 4 --guard --methods {OURS}",
    "batch-8": f"--dataset {TEST} --limit 16 --rounds 4 --batch 8 --guard --methods {OURS}",
    "batch-8-1": f"--dataset {TEST} --limit 16 --rounds 4 --batch 8 --guard --methods {SAMPLED} --temperature 1",
    "repeats": f"--dataset {REPEATS} --limit 50 --rounds 1 --methods {OURS}",
    "repeats-1": f"--dataset {REPEATS} --limit 50 --rounds 1 --methods {SAMPLED} --temperature 1",
    "repeats-8": f"--dataset {REPEATS} --limit 50 --rounds 2 --batch 8 --guard --methods {OURS}",
    "repeats-8-1": f"--dataset {REPEATS} --limit 50 --rounds 2 --batch 8 --guard --methods {SAMPLED} --temperature 1",
    "batch-16": f"--dataset {TEST} --limit 32 --rounds 4 --batch 16 --guard --methods {OURS}",
    "transformers": f"--dataset {TEST} --limit 4 --rounds 2 --methods ar,sd,{THEIRS}",
    "float32": f"--dataset {TEST} --limit 4 --rounds 2 --weights float32 --methods {OURS}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of HumanEval.jsonl.gz and gsm8k_test.jsonl")
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--runs", type=Path, default=Path("runs/chat"), help="folder of the runs' records")
    given = parser.parse_args()
    wanted = given.only.split(",")
    if unknown := sorted(set(wanted) - set(RUNS)):
        parser.error(f"--only: no runs {', '.join(unknown)}; there are {', '.join(RUNS)}")
    for name in wanted:
        out = given.runs / name
        options = RUNS[name].format(here=HERE).split()
        if "humaneval" in RUNS[name]:
            options += ["--data", given.data]
        common = ["--target", "smollm2", "--chat", "--stop-at-eos", "--out", str(out)]
        common += ["--resume"] * (out / "records.jsonl").is_file()
        done = subprocess.run([sys.executable, "-m", "forerun", "bench", *options, *common])
        if done.returncode:
            return done.returncode
        shutil.copy(out / "results.json", HERE / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
