"""Runs the benches behind docs/results (chat, embedded and qwen-coder), and keeps results.

    python benchmarks/run.py --data DATA [--only chat/greedy,qwen-coder/long] [--runs runs]

A run that is done is not repeated. One that was stopped goes on, or is refused if its code or
options have changed: then delete its folder in `runs`. The settings of ours (`tuned.json` in
forerun/zoo/weights) and of peers (below) were chosen from the validation runs. Leave the machine
alone meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "speed"  # of prompts and results
HUMANEVAL = "HumanEval.jsonl.gz"
GSM8K = "gsm8k_test.jsonl"
LOOKUP = "benchmarks.baselines.lookup:Lookup"

Runs = dict[str, str]  # options of `benchmarks.peers.bench` by the name of the run


def bench(dataset: str, methods: str, limit: int, rounds: int = 1, more: str = "") -> str:
    """Return the options of a run.

    Args:
        dataset: files, where {here} and {data} are folders.
        methods: as of --methods.
        limit: prompts of each dataset.
        rounds: how often everything is measured.
        more: other options.
    """
    return f"--dataset {dataset} --limit {limit} --rounds {rounds} --methods {methods} {more}"


def tuned(prefix: str, search: str, settings: dict[str, str]) -> Runs:
    """Return runs that compare the values of settings, each at the others' defaults."""
    return {f"{prefix}-{name}": f"{search} --tune {name}={v}" for name, v in settings.items()}


def joined(names: Iterable[str]) -> str:
    return ",".join(names)


# smollm2, a chat model.

CHAT_OURS = f"ar,sd,cumulative,confidence,pacer,{LOOKUP},suffix,hybrid,ouroboros"
CHAT_FEW = "ar,sd,cumulative,pacer,suffix,hybrid"
CHAT_SAMPLED = f"ar,sd,cumulative,pacer,{LOOKUP},suffix,hybrid"
CHAT_HEADS = "ar,sd,cumulative,lyanna,pacer-lyanna,eagle,pacer-eagle"
CHAT_HF = "hf-ar,hf-lookup/5/3,hf-assisted/constant/3/0.4,hf-forward/ar,hf-forward/sd"
CHAT_HF_SEARCH = (
    "hf-lookup/2/3,hf-lookup/3/3,hf-lookup/5/3,"
    "hf-assisted/2/0.4,hf-assisted/3/0.4,hf-assisted/heuristic/3"
)
CHAT_OWN = "{here}/chat/test.jsonl"
CHAT_TEST = f"{CHAT_OWN},{{data}}/{HUMANEVAL},{{data}}/{GSM8K}"
CHAT_VALIDATION = "{here}/chat/validation.jsonl"
CHAT_SEARCH = f"--dataset {CHAT_VALIDATION} --limit 24 --rounds 1"
REPEATS = "{here}/repeats/agent.jsonl,{here}/repeats/edits.jsonl"
NUCLEUS = "--temperature 0.7 --top-p 0.9"
WARM = "--temperature 1"
# forerun/zoo/weights/smollm2/tuned.json was chosen from these, by median speedup; where that is
# noise, in the middle.
CHAT_SETTINGS = {
    "sd.gamma": "2,3,4,5,6",
    "cumulative.threshold": "0.2,0.3,0.4,0.5,0.6",
    "pacer.threshold": "0.4,0.5,0.6,0.7,0.8 --method-arg pacer.block=1",
    f"{LOOKUP}.gamma": "1,2,3,5",
    "hybrid.other": joined(f"cumulative:threshold={value}" for value in (0.2, 0.3, 0.4, 0.5)),
    "hybrid.threshold": "1,2,3,6 --method-arg hybrid.other=cumulative:threshold=0.4",
    "ouroboros.gamma": "1,2,3",
    "lyanna.depth": "1,2,3,4,6",
    "eagle.depth": "1,2,3,4",
    "pacer-lyanna.block": "2,3,4,6",
    "pacer-eagle.block": "1,2",
}
CHAT_WARM_SETTINGS = {
    "sd.gamma": "1,2,3,4",
    "cumulative.threshold": "0.3,0.4,0.5,0.6,0.7",
    "pacer.threshold": "0.5,0.6,0.7,0.8 --method-arg pacer.block=1",
    f"{LOOKUP}.gamma": "2,3,5",
    "hybrid.other": "cumulative:threshold=0.4,cumulative:threshold=0.6,sd:gamma=1,sd:gamma=2",
    "hybrid.threshold": "1,2,3,6 --method-arg hybrid.other=sd:gamma=2",
}
CHAT_HEAD_SETTINGS = (
    "cumulative:threshold=0.4,pacer-lyanna:block=3,lyanna:depth=2,pacer-lyanna:block=2"
)
CHAT: Runs = {
    **tuned("validation", CHAT_SEARCH, CHAT_SETTINGS),
    **tuned("validation-1", f"{CHAT_SEARCH} {WARM}", CHAT_WARM_SETTINGS),
    "validation-hybrid.other-heads": f"{CHAT_SEARCH} --tune hybrid.other={CHAT_HEAD_SETTINGS}",
    # transformers decodes in float32, at a tenth of our speed, so prompts are few.
    "validation-peers": bench(CHAT_VALIDATION, f"ar,{CHAT_HF_SEARCH}", 8),
    # The default methods were chosen from these two, with the settings found before.
    "validation-default": f"{CHAT_SEARCH} --methods {CHAT_FEW}",
    "validation-1-default": f"{CHAT_SEARCH} --methods {CHAT_FEW} {WARM}",
    "greedy": bench(CHAT_TEST, f"{CHAT_OURS},llama-cpp,llama-cpp-lookup/2/3", 12, 3),
    "greedy-xeon": bench(CHAT_TEST, f"{CHAT_FEW},llama-cpp", 12),
    "greedy-avx2": bench(CHAT_TEST, CHAT_FEW, 12),
    "greedy-512": bench(CHAT_TEST, CHAT_OURS, 8, 1, "--max-new-tokens 512"),
    "nucleus": bench(CHAT_TEST, CHAT_SAMPLED, 12, 3, NUCLEUS),
    "temperature-1": bench(CHAT_TEST, CHAT_SAMPLED, 12, 3, WARM),
    "heads": bench(CHAT_TEST, CHAT_HEADS, 12, 2),
    # Batches with the guard, which is on by default outside of benches, because many rows leave
    # little to gain on a CPU.
    "batch-4": bench(CHAT_TEST, CHAT_OURS, 12, 3, "--batch 4 --guard"),
    "batch-8": bench(CHAT_TEST, CHAT_OURS, 16, 4, "--batch 8 --guard"),
    "batch-8-1": bench(CHAT_TEST, CHAT_SAMPLED, 16, 4, f"--batch 8 --guard {WARM}"),
    "batch-16": bench(CHAT_TEST, CHAT_OURS, 32, 4, "--batch 16 --guard"),
    "repeats": bench(REPEATS, CHAT_OURS, 50),
    "repeats-1": bench(REPEATS, CHAT_SAMPLED, 50, 1, WARM),
    "repeats-8": bench(REPEATS, CHAT_OURS, 50, 2, "--batch 8 --guard"),
    "repeats-8-1": bench(REPEATS, CHAT_SAMPLED, 50, 2, f"--batch 8 --guard {WARM}"),
    # These are slow, so they have the model's own prompts alone.
    "transformers": bench(CHAT_OWN, f"ar,sd,{CHAT_HF}", 8),
    "float32": bench(CHAT_OWN, CHAT_OURS, 8, 1, "--weights float32"),
}

# The embedded pair.

EMBEDDED_TEST = f"stdlib-test,{{data}}/{HUMANEVAL}"
EMBEDDED_OURS = f"{CHAT_OURS},pacer-ouroboros,lyanna,pacer-lyanna"
EMBEDDED_FORWARDS = "hf-ar,hf-forward/ar,hf-forward/sd"
# The best settings on validation prompts, where runs need others than those that come with the
# pair.
EMBEDDED_GREEDY = (
    "--method-arg sd.gamma=8 --method-arg cumulative.threshold=0.05 --method-arg ouroboros.gamma=8"
)
EMBEDDED_512 = (
    "--method-arg sd.gamma=10 --method-arg cumulative.threshold=0.05 --method-arg ouroboros.gamma=8"
)
EMBEDDED_WARM = "--method-arg sd.gamma=5 --method-arg cumulative.threshold=0.3"
EMBEDDED_HF = "hf-lookup/20/3,hf-assisted/heuristic/5"
EMBEDDED_WARM_HF = "hf-lookup/5/2,hf-assisted/5/0"
EMBEDDED_SEARCH = "--dataset stdlib-validation --limit 12 --rounds 1"
EMBEDDED_SETTINGS = {
    "sd.gamma": "2,3,4,5,6,8,10",
    "cumulative.threshold": "0.05,0.12,0.2,0.3",
    "confidence.threshold": "0.2,0.3,0.4,0.5",
    f"{LOOKUP}.gamma": "4,8,12,16",
    "hybrid.threshold": "1,3,6",
    "ouroboros.gamma": "4,6,8,10",
    "lyanna.depth": "2,4,6,8",
}
EMBEDDED_512_SETTINGS = {name: EMBEDDED_SETTINGS[name] for name in ("sd.gamma", "ouroboros.gamma")}
EMBEDDED_WARM_SETTINGS = {"sd.gamma": "1,2,3,4,5", "cumulative.threshold": "0.2,0.3,0.4,0.5"}
LOOKUPS = joined(f"hf-lookup/{tokens}/{ngram}" for tokens in (5, 10, 20) for ngram in (2, 3))
ASSISTED = joined(
    f"hf-assisted/{way}" for way in ("3/0.4", "5/0.4", "8/0.4", "5/0", "heuristic/5", "20/0.4")
)
EMBEDDED_PEERS = f"{EMBEDDED_FORWARDS},{EMBEDDED_HF} {EMBEDDED_GREEDY}"
EMBEDDED_WARM_PEERS = f"{EMBEDDED_FORWARDS},{EMBEDDED_WARM_HF} {EMBEDDED_WARM}"
EMBEDDED: Runs = {
    **tuned("validation", EMBEDDED_SEARCH, EMBEDDED_SETTINGS),
    **tuned("validation-512", f"{EMBEDDED_SEARCH} --max-new-tokens 512", EMBEDDED_512_SETTINGS),
    **tuned("validation-1", f"{EMBEDDED_SEARCH} {WARM}", EMBEDDED_WARM_SETTINGS),
    "validation-peers": f"{EMBEDDED_SEARCH} --methods ar,{LOOKUPS},{ASSISTED}",
    "validation-1-peers": f"{EMBEDDED_SEARCH} {WARM} --methods ar,{LOOKUPS},{ASSISTED}",
    "greedy": bench(EMBEDDED_TEST, f"{EMBEDDED_OURS},{EMBEDDED_PEERS}", 12),
    "greedy-512": bench(EMBEDDED_TEST, EMBEDDED_OURS, 8, 1, f"--max-new-tokens 512 {EMBEDDED_512}"),
    "temperature-1": bench(EMBEDDED_TEST, f"{EMBEDDED_OURS},{EMBEDDED_WARM_PEERS}", 10, 1, WARM),
    "batch-4": bench(EMBEDDED_TEST, EMBEDDED_OURS, 32, 1, "--batch 4"),
    "batch-16": bench(EMBEDDED_TEST, EMBEDDED_OURS, 32, 4, "--batch 16"),
}

# Qwen2.5-Coder 1.5B with its 0.5B. A step takes ten times as long as smollm2's, so prompts are few.

QWEN_OWN = "{here}/qwen-coder/test.jsonl"
QWEN_HUMANEVAL = f"{{data}}/{HUMANEVAL}"
QWEN_TEST = f"{QWEN_OWN},{QWEN_HUMANEVAL}"
QWEN_SEARCH = "--dataset {here}/qwen-coder/validation.jsonl --limit 8 --rounds 1"
QWEN_OURS = "ar,sd,cumulative,pacer,pacer-ouroboros,lyanna,pacer-lyanna,suffix,hybrid"
QWEN_SAMPLED = "ar,sd,cumulative,pacer,pacer-lyanna,suffix,hybrid"
QWEN_AVX2 = "ar,sd,pacer,pacer-lyanna,suffix,hybrid"
QWEN_BATCHES = "ar,pacer,pacer-lyanna,suffix,hybrid"  # eight calls of each
QWEN_HF = "hf-ar,hf-assisted/heuristic/5,hf-assisted/constant/3/0.4"
QWEN_BLOCKS = joined(f"pacer-lyanna:{way}" for way in ("block=6", "width=2", "width=3"))
QWEN_SETTINGS = {
    "sd.gamma": "1,2,3,4",
    "cumulative.threshold": "0.5,0.6,0.7,0.8",
    "hybrid.other": f"pacer,{QWEN_BLOCKS}",
    "ouroboros.gamma": "2,3,4",
    "lyanna.depth": "2,3,4,6",
    "pacer-lyanna.block": "1,2,3,6",
    "pacer-lyanna.reuse": "off,free",
}
QWEN_WARM_SETTINGS = {
    name: QWEN_SETTINGS[name] for name in ("sd.gamma", "cumulative.threshold", "hybrid.other")
}


def llama_drafts(tokens: Iterable[int], confidences: Iterable[float]) -> list[str]:
    """Return llama.cpp with its draft model, with all combinations of settings."""
    confidences = list(confidences)
    return [f"llama-cpp-draft/{count}/{least}" for count in tokens for least in confidences]


def llama_lookups(tokens: Iterable[int]) -> list[str]:
    """Return llama.cpp with its prompt lookup, after phrases of two and of three tokens."""
    return [f"llama-cpp-lookup/{count}/{ngram}" for count in tokens for ngram in (2, 3)]


QWEN_LLAMA_SEARCH = joined(
    ["llama-cpp", *llama_drafts((1, 2, 3), (0.6, 0.9)), *llama_lookups((2, 3, 5))]
)
# The best of each kind on validation prompts.
QWEN_LLAMA = "llama-cpp,llama-cpp-draft/1/0.6,llama-cpp-lookup/2/2"

# By length of the prompt (`benchmarks/speed/long_prompts.py`). llama.cpp's drafts run in fewer
# rounds, because each reads the prompt anew.
LONG_OURS = "ar,suffix,lyanna,hybrid"
LONG_PEERS = "ar,hybrid,llama-cpp,llama-cpp-draft/3/0.75,llama-cpp-draft/3/0,llama-cpp-lookup/2/2"
LONG_SEARCH = joined(["ar", *llama_drafts((2, 3, 8), (0.75, 0)), *llama_lookups((2, 5))])


def long_run(name: str, new: int, methods: str, more: str) -> str:
    """Return the options of a run on `qwen-coder/long-NAME.jsonl.gz` with so many new tokens."""
    dataset = f"{{here}}/qwen-coder/long-{name}.jsonl.gz"
    return f"--dataset {dataset} --max-new-tokens {new} --methods {methods} {more}"


LONG_FEW = "--limit 2 --rounds 1"
LONG: Runs = {
    "long/1000": long_run("1000", 256, f"{LONG_OURS},llama-cpp", "--rounds 2"),
    "long/4000": long_run("4000", 384, f"{LONG_OURS},llama-cpp", "--rounds 2"),
    "long/16000": long_run("16000", 128, f"{LONG_OURS},llama-cpp", "--rounds 1"),
    "long/known": long_run("known", 384, LONG_OURS, "--rounds 2"),
    "long/1000-peers": long_run("1000", 256, LONG_PEERS, LONG_FEW),
    "long/4000-peers": long_run("4000", 384, LONG_PEERS, LONG_FEW),
    "long/16000-peers": long_run("16000", 64, LONG_PEERS, LONG_FEW),
    "long/known-peers": long_run("known", 384, LONG_PEERS, LONG_FEW),
    "long/4000-avx2": long_run("4000", 384, f"{LONG_OURS},llama-cpp", LONG_FEW),
}
QWEN: Runs = {
    **tuned("validation", QWEN_SEARCH, QWEN_SETTINGS),
    **tuned("validation-1", f"{QWEN_SEARCH} {WARM}", QWEN_WARM_SETTINGS),
    "validation-hot": f"{QWEN_SEARCH} --limit 6 --draft-vocabulary 0 --tune sd.gamma=2,3,4",
    "validation-peers": (
        f"{QWEN_SEARCH} --limit 3 --max-new-tokens 64 --methods ar,{QWEN_LLAMA_SEARCH}"
    ),
    "validation-drafts": f"{QWEN_SEARCH} --limit 4 --methods {LONG_SEARCH}",
    "greedy": bench(QWEN_TEST, f"{QWEN_OURS},llama-cpp", 8),
    "rounds": bench(QWEN_HUMANEVAL, "ar,lyanna,pacer-lyanna,hybrid", 8, 3),
    "greedy-avx2": bench(QWEN_HUMANEVAL, QWEN_AVX2, 8),
    "own-avx2": bench(QWEN_OWN, QWEN_BATCHES, 8),
    "peers": bench(QWEN_HUMANEVAL, f"ar,suffix,hybrid,{QWEN_LLAMA}", 4),
    "nucleus": bench(QWEN_TEST, QWEN_SAMPLED, 8, 1, NUCLEUS),
    "temperature-1": bench(QWEN_TEST, QWEN_SAMPLED, 8, 1, WARM),
    "repeats": bench(REPEATS, QWEN_SAMPLED, 8),
    "batch-4": bench(QWEN_HUMANEVAL, QWEN_BATCHES, 32, 1, "--batch 4 --guard"),
    "batch-16": bench(
        QWEN_HUMANEVAL, QWEN_BATCHES, 64, 1, "--batch 16 --guard --max-new-tokens 64"
    ),
    "transformers": bench(QWEN_HUMANEVAL, f"ar,sd,{QWEN_HF}", 2, 1, "--max-new-tokens 64"),
    **LONG,
}


def paged(page: str, runs: Runs, common: str = "") -> Runs:
    """Return the runs of a page by their full names, with the options that all of them have."""
    return {f"{page}/{name}": f"{options} {common}" for name, options in runs.items()}


RUNS: Runs = {
    **paged("chat", CHAT, "--target smollm2 --chat --stop-at-eos"),
    **paged("embedded", EMBEDDED),
    **paged("qwen-coder", QWEN, "--target qwen-coder --chat --stop-at-eos"),
}


def selected(only: str) -> list[str]:
    """Return the names of runs that a user asks for. Raises ValueError for an unknown one."""
    names = []
    for part in only.split(","):
        matching = [name for name in RUNS if name == part or name.startswith(f"{part}/")]
        if not matching:
            raise ValueError(f"no run {part!r}; there are {', '.join(RUNS)}")
        names += matching
    return names


def run(name: str, runs: Path, data: Path | None) -> int:
    """Make a run, keep its results, and return the status of the process."""
    out = runs / name
    folders = {"here": HERE, "data": data and data.resolve()}
    options = [part.format(**folders) for part in RUNS[name].split()]
    command = [sys.executable, "-m", "benchmarks.peers.bench", *options]
    command += ["--out", str(out.resolve()), "--resume"]
    kernels = {"FORERUN_KERNELS": "avx2"} if name.endswith("avx2") else {}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | kernels)
    if done.returncode == 0:
        # Datasets get the names that pages give them.
        results = (out / "results.json").read_text()
        results = results.replace(HUMANEVAL, "humaneval").replace(GSM8K, "gsm8k")
        kept = HERE / f"{name}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(results)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help=f"folder of {HUMANEVAL} and {GSM8K}; qwen-coder/long needs neither",
    )
    parser.add_argument(
        "--only",
        default="chat,embedded,qwen-coder",
        help="runs, for example chat/greedy; chat or qwen-coder/long stands for all below it",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of the runs' records"
    )
    args = parser.parse_args()
    try:
        names = selected(args.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if args.data is None and any("{data}" in RUNS[name] for name in names):
        parser.error(f"--data: these runs need the folder of {HUMANEVAL} and {GSM8K}")
    for name in names:
        if not (args.runs / name / "results.json").is_file():
            status = run(name, args.runs, args.data)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
