"""Our proposer for vLLM beside vLLM's own drafts.

    python benchmarks/peers/vllm_bench.py --target FOLDER [--draft FOLDER] --out FILE.json

It measures accepted tokens a draft, tokens/s, and whether outputs equal plain decoding. It runs in
an environment that has vLLM. Each engine has a process of its own. All are started and warmed up
first, and an engine that waits takes no time. Then come rounds: each has prompts of its own, which
all engines answer one after the other, and each round begins with another engine. No engine sees a
prompt twice, because some draft from earlier answers. Speedups are ratios to plain decoding in the
same round.

FILE.json must not exist yet, because a run is not resumed. Beside it lies FILE.log, the log of the
engines. Seven engines of a model of 135M take about 14 GB of memory.
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a file

from forerun.bench.report import provenance

Answers = dict[str, Any]

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "speed" / "chat" / "validation.jsonl"
WARM = [{"role": "user", "content": "Say hello to Anna, Ben and Carla, each in a line of its own."}]
MARK = "RESULT"  # before a line that is an answer; other lines of stdout are the engine's log


def cases(draft: str | None, tokens: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each engine by its name."""

    def ours(**options: Any) -> dict[str, Any]:
        path = "forerun.integrations.vllm.Proposer"
        speculative = {"method": "custom_class", "model": path, "num_speculative_tokens": tokens}
        return {"speculative_config": speculative, "additional_config": {"forerun": options}}

    def theirs(**options: Any) -> dict[str, Any]:
        return {"speculative_config": {"num_speculative_tokens": tokens, **options}}

    settings = {
        "plain": {},
        "vllm ngram": theirs(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3),
        "forerun suffix": ours(method="suffix"),
    }
    if draft is not None:
        settings["vllm draft_model"] = theirs(method="draft_model", model=draft)
        settings["forerun sd"] = ours(method="sd", gamma=tokens, draft=draft)
        settings["forerun cumulative"] = ours(method="cumulative", draft=draft)
    return settings


def prompts_of(path: Path, count: int) -> list[list[dict[str, str]]]:
    """Return conversations from the first lines of a file, which have `messages` or a `prompt`."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()][:count]
    return [line.get("messages") or [{"role": "user", "content": line["prompt"]}] for line in lines]


def run_engine(settings: dict[str, Any]) -> None:
    """Run one engine in this process.

    It reads lines of JSON with conversations, and writes a line with the answers for each.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        settings["target"],
        dtype=settings["dtype"],
        enforce_eager=True,
        max_model_len=settings["context"],
        max_num_seqs=settings["rows"],
        disable_log_stats=False,
        **settings["settings"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=settings["max_tokens"])

    def counts() -> dict[str, int]:
        counters = {}
        for metric in engine.get_metrics():
            if "spec_decode" in metric.name and hasattr(metric, "value"):
                counters[metric.name.removeprefix("vllm:spec_decode_")] = metric.value
        return counters

    engine.chat([WARM], sampling, use_tqdm=False)
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        before = counts()
        started_at = perf_counter()
        outputs = engine.chat(json.loads(line), sampling, use_tqdm=False)
        seconds = perf_counter() - started_at
        after = counts()
        answers = {
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "counts": {name: after[name] - before.get(name, 0) for name in after},
        }
        print(MARK + json.dumps(answers), flush=True)


def threads() -> str:
    """Return the number of threads of an engine."""
    return os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


class Engine:
    """The process of an engine."""

    def __init__(self, settings: dict[str, Any], log: TextIO) -> None:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment |= {"OMP_NUM_THREADS": threads(), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--one", json.dumps(settings)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self.log = log

    def answer(self) -> Answers:
        """Return the next answer. Raises EOFError if the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
            self.log.write(line)
        raise EOFError

    def ask(self, conversations: list[Any]) -> Answers:
        """Return the answers to some conversations."""
        assert self.process.stdin is not None
        print(json.dumps(conversations), file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Bench:
    """Engines that take turns.

    Attributes:
        engines: those that have started, by name.
        rounds: the answers of each engine, round by round.
        failed: what went wrong with the others.
    """

    def __init__(self, log: TextIO) -> None:
        self.log = log
        self.engines: dict[str, Engine] = {}
        self.rounds: dict[str, list[Answers]] = {}
        self.failed: dict[str, str] = {}

    def start(self, chosen: dict[str, dict[str, Any]], common: Answers, stack: ExitStack) -> None:
        """Start the engines; `stack` ends them. Raises SystemExit if `plain` does not start."""
        for name, settings in chosen.items():
            engine = Engine(common | {"settings": settings}, self.log)
            stack.callback(engine.end)
            try:
                engine.answer()
                self.engines[name] = engine
                self.rounds[name] = []
            except EOFError:
                self.failed[name] = f"it did not start: see {Path(self.log.name).name}"
            print(name, self.failed.get(name, "is ready"), flush=True)
        self.require_plain()

    def run_round(self, number: int, conversations: list[Any]) -> None:
        """Let all engines answer; each round begins with another one."""
        names = list(self.engines)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            try:
                if name not in self.failed:
                    self.rounds[name].append(self.engines[name].ask(conversations))
            except (EOFError, BrokenPipeError):
                log_name = Path(self.log.name).name
                self.failed[name] = f"it died in round {number + 1}: see {log_name}"

    def require_plain(self) -> None:
        if "plain" in self.failed:
            raise SystemExit(f"plain: {self.failed['plain']}")

    def summaries(self) -> list[dict[str, Any]]:
        """Return the figures of each engine that did not fail."""
        plain = self.rounds["plain"]
        return [
            summary(name, rounds, plain)
            for name, rounds in self.rounds.items()
            if name not in self.failed
        ]


def outputs_of(rounds: list[Answers]) -> list[list[int]]:
    return [tokens for answers in rounds for tokens in answers["tokens"]]


def rates_of(rounds: list[Answers]) -> list[float]:
    return [sum(map(len, answers["tokens"])) / answers["seconds"] for answers in rounds]


def count_of(rounds: list[Answers], name: str) -> int:
    return sum(answers["counts"].get(name, 0) for answers in rounds)


def summary(name: str, rounds: list[Answers], plain: list[Answers]) -> dict[str, Any]:
    """Return the figures of an engine's rounds beside those of plain decoding."""
    outputs = outputs_of(rounds)
    expected = outputs_of(plain)
    equal = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
    rates = rates_of(rounds)
    ratios = [rate / other for rate, other in zip(rates, rates_of(plain), strict=True)]
    tokens = sum(map(len, outputs))
    drafts = count_of(rounds, "num_drafts")
    accepted = count_of(rounds, "num_accepted_tokens")
    return {
        "name": name,
        "measurements": len(rounds),
        "tokens_per_second": round(median(rates), 2),
        "speedup": [round(ratio, 3) for ratio in (median(ratios), min(ratios), max(ratios))],
        "tokens": tokens,
        "drafts": drafts,
        "drafted": count_of(rounds, "num_draft_tokens"),
        "accepted_per_draft": round(accepted / drafts, 3) if drafts else None,
        "accepted_share_of_tokens": round(accepted / tokens, 3),
        "equal": f"{equal} of {len(outputs)}",
        "rounds": [
            {"seconds": answers["seconds"], "counts": answers["counts"]} for answers in rounds
        ],
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", required=True, help="a Hugging Face folder with a chat template"
    )
    parser.add_argument("--draft", help="a Hugging Face folder with the same tokenizer")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
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
    return parser.parse_args()


def main() -> None:
    args = parsed()
    conversations = prompts_of(args.prompts, args.rounds * args.count)
    if len(conversations) < args.rounds * args.count:
        raise SystemExit(
            f"{args.prompts} has {len(conversations)} prompts; {args.rounds} rounds need "
            f"{args.count} each"
        )
    if args.out.exists():
        raise SystemExit(f"{args.out} is there already: a run begins anew")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    common = {name: getattr(args, name) for name in ("target", "rows", "max_tokens")}
    common |= {name: getattr(args, name) for name in ("context", "dtype")}
    chosen = cases(args.draft, args.speculative_tokens)
    if args.only:
        wanted = {"plain", *args.only}
        chosen = {name: settings for name, settings in chosen.items() if name in wanted}
    with ExitStack() as stack:
        log = stack.enter_context(args.out.with_suffix(".log").open("w"))
        bench = Bench(log)
        bench.start(chosen, common, stack)
        for number in range(args.rounds):
            start = number * args.count
            bench.run_round(number, conversations[start : start + args.count])
            print(f"round {number + 1} of {args.rounds}", flush=True)
    bench.require_plain()
    arguments = {key: value for key, value in vars(args).items() if key != "out"}
    for key in ("target", "draft", "prompts"):
        if arguments[key] is not None:
            arguments[key] = Path(arguments[key]).name
    result = provenance(arguments | {"threads": int(threads())})
    result["versions"] |= {"vllm": version(args.package), "numpy": version("numpy")}
    result |= {"engines": bench.summaries(), "failed": bench.failed}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["engines"]:
        print(json.dumps({key: value for key, value in row.items() if key != "rounds"}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_engine(json.loads(sys.argv[2]))
    else:
        main()
