"""Are outputs with drafts those of plain decoding, and have many tokens the bits of single ones?

    python benchmarks/quality/equality.py [--target NAME:METHOD,.. ...] [--tokens 48] [--threads 2]
        [--out JSON]
    python benchmarks/quality/equality.py --exhaustive [--target NAME ...]
        [--share 0.01 | --seconds 600] [--seed 0]
    python benchmarks/quality/equality.py --engine 3000 [--target NAME ...] [--seed 0]

Without options greedy chats are compared, token for token, on real models. Each target is loaded
with each method, the guard off; "default" is the method that `forerun.load` chooses.

--exhaustive compares all bits of logits, keys and values of forwards of 1 to 64 tokens, of trees,
prompt chunks and ragged batches with those of decoding one by one. It runs every instruction set of
this machine and 1 to 3 threads, after lengths around multiples of 8, 16, 32, 64 and 256 up to 2,100
(`benchmarks.quality.forward_bits`). All cases take weeks: --share and --seconds take a part of
them, spread over the whole. --start continues where another run with the same seed ended.

--engine runs so many short outputs in engines whose drafters, lengths, pauses and requests are
drawn at random (`benchmarks.quality.random_engines`). Both end with status 1 at the first
difference, and say how to run it again alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a file too

import forerun
from benchmarks.quality.forward_bits import (
    KINDS,
    LONGEST,
    Cases,
    Check,
    DifferenceError,
    reference_of,
)
from benchmarks.quality.questions import measured
from benchmarks.quality.random_engines import run_by_chance
from forerun.bench.report import provenance
from forerun.csrc.library import variants
from forerun.engine.stats import summarise
from forerun.methods import Method, Parts, method

Results = dict[str, Any]

QUESTIONS = (
    "Write a Python function that reverses a linked list.",
    "What does `git rebase` do?",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\n"
    "Make this faster.",
    "Explain the difference between a list and a tuple, with an example.",
    "Write a SQL query for the three customers who paid most in 2025.",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
)
CHAT_TARGETS = ("qwen-coder:sd,suffix,default", "qwen-coder-draft:suffix,default")
EXHAUSTIVE_TARGETS = ("smollm2", "qwen-coder")
ENGINE_TARGETS = ("embedded",)
PROGRESS_SECONDS = 5.0  # between two lines of progress


def tell(line: str) -> None:
    print(line, flush=True)


class Progress:
    """Tells a line of progress now and then."""

    def __init__(self) -> None:
        self.said_at = perf_counter()

    def __call__(self, line: str) -> None:
        if perf_counter() - self.said_at > PROGRESS_SECONDS:
            self.said_at = perf_counter()
            tell(line)


def compare_chats(args: argparse.Namespace) -> Results:
    """Compare greedy chats of every target and method with plain ones."""
    targets: dict[str, Results] = {}
    for given in args.target or CHAT_TARGETS:
        target, _, methods = given.rpartition(":")
        results = targets.setdefault(target, {})
        expected = None
        for name in methods.split(","):
            decoder = forerun.load(target, method=None if name == "default" else name, guard=False)
            if expected is None:
                plain = chats(decoder.replace(method="ar"), args.tokens)
                expected = [answer.tokens for answer in plain]
            answers = chats(decoder, args.tokens)
            steps = [step for answer in answers for step in answer.steps]
            pairs = zip(answers, expected, strict=True)
            results[name] = {
                "method": decoder.method.name,
                "equal": sum(answer.tokens == tokens for answer, tokens in pairs),
                "chats": len(answers),
                "tau": round(summarise(steps, 1.0).tau, 3),
            }
            tell(f"{target} {name} {results[name]}")
    return record(args, targets)


def chats(decoder: forerun.Decoder, tokens: int) -> list[Any]:
    """Return greedy answers to all questions."""
    return [
        decoder.chat([{"role": "user", "content": text}], max_new_tokens=tokens)
        for text in QUESTIONS
    ]


def compare_bits(args: argparse.Namespace) -> Results:
    """Run cases of every target, up to the first difference."""
    targets: dict[str, Results] = {}
    for name in args.target or EXHAUSTIVE_TARGETS:
        model = forerun.load(name, method="ar", prefix_bytes=0).target
        kinds = args.kinds.split(",")
        cases = Cases(args.longest, args.seed, kinds=kinds, of_variants=kernels(args))
        check = Check(model, reference_of(model, args.longest, args.seed, tell))
        results = run_cases(name, check, cases, args)
        targets[name] = results
        end = "equal in all bits" if results["difference"] is None else "DIFFERENT"
        tell(
            f"{name}: {results['cases']} of {len(cases)} cases, {results['rows']} rows of logits "
            f"and {results['entries']} positions of keys and values compared: {end}"
        )
        if results["difference"] is not None:
            break
    return record(args, targets)


def run_cases(name: str, check: Check, cases: Cases, args: argparse.Namespace) -> Results:
    """Run the cases that the options ask for; return how many, and the first difference."""
    progress = Progress()
    started_at = perf_counter()
    end = len(cases)
    if args.share is not None:
        end = min(end, args.start + max(1, round(args.share * len(cases))))
    number = args.start
    difference = None
    while number < end and (args.seconds is None or perf_counter() - started_at < args.seconds):
        try:
            check.run(cases[number], args.seed)
        except DifferenceError as error:
            difference = str(error)
            tell(f"{difference}\nagain: {options_of_case(name, number, args)}")
            break
        number += 1
        progress(f"{name}: case {number} of {end}, {check.rows} rows; go on with --start {number}")
    return {
        "cases": number - args.start,
        "next": number,
        "rows": check.rows,
        "entries": check.entries,
        "of": len(cases),
        "seconds": round(perf_counter() - started_at),
        "difference": difference,
    }


def options_of_case(name: str, number: int, args: argparse.Namespace) -> str:
    """Return the options that run one case again."""
    kernel_option = f" --variants {args.variants}" if args.variants else ""
    return (
        f"--exhaustive --target {name} --longest {args.longest} --kinds {args.kinds}"
        f"{kernel_option} --seed {args.seed} --start {number}"
    )


def compare_engines(args: argparse.Namespace) -> Results:
    """Run engines with every target; return the counts of each."""
    targets: dict[str, Results] = {}
    for name in args.target or ENGINE_TARGETS:
        targets[name] = run_engines(name, args)
    return record(args, targets)


def run_engines(name: str, args: argparse.Namespace) -> Results:
    """Run engines with one target, up to the first difference."""
    parts, methods = parts_of(name)
    tell(f"{name}: beside {', '.join(some.name for some in methods)}")
    progress = Progress()
    try:
        counts = run_by_chance(
            parts,
            methods,
            args.engine,
            args.seed,
            first=args.start,
            kernels=quick_kernels(args),
            say=lambda line: progress(f"{name}: {line}"),
        )
    except DifferenceError as error:
        tell(f"{error}\nwith --engine {args.engine} --target {name} --seed {args.seed}")
        return {"difference": str(error)}
    tell(f"{name}: {counts}: equal")
    return vars(counts) | {"difference": None}


def kernels(args: argparse.Namespace) -> list[str]:
    """Return the instruction sets that were asked for, or all."""
    return args.variants.split(",") if args.variants else list(variants())


def quick_kernels(args: argparse.Namespace) -> list[str]:
    """Return the instruction sets that engines run.

    Unless it is asked for, the plain one is left out, because it takes twenty times as long.
    """
    return [name for name in kernels(args) if args.variants or name != "plain"]


def parts_of(name: str) -> tuple[Parts, list[Method]]:
    """Return the parts of a target that comes with drafts, and the methods that they allow."""
    loaded = forerun.load(name, method="hybrid", guard=False, prefix_bytes=0)
    names = ["suffix"]
    if loaded.draft is not None:
        names += ["ouroboros", "sd", "cumulative"]
    if loaded.head is not None:
        names += ["lyanna"]
    if loaded.pre_verifier is not None:
        names += ["pacer"] if loaded.head is None else ["pacer-lyanna"]
    parts = Parts(loaded.target, loaded.draft, loaded.pre_verifier, loaded.costs, head=loaded.head)
    return parts, [method(each) for each in names]


def record(args: argparse.Namespace, targets: dict[str, Results]) -> Results:
    return {"targets": targets, **provenance(vars(args) | {"out": None})}


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", action="append", help=f"as in {CHAT_TARGETS[0]}, or a name alone; repeatable"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2, help="of chats")
    parser.add_argument("--exhaustive", action="store_true", help="compare all bits of forwards")
    parser.add_argument("--share", type=float, help="of all cases")
    parser.add_argument("--seconds", type=float, help="for the cases of a target")
    parser.add_argument(
        "--longest", type=int, default=LONGEST, help="the longest context, in tokens"
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--variants", help="instruction sets; all of this machine by default")
    parser.add_argument(
        "--engine", type=int, help="compare so many outputs of engines that run by chance"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first case or engine")
    parser.add_argument("--out", type=Path)
    return parser


def comparison(args: argparse.Namespace) -> Callable[[argparse.Namespace], Results]:
    """Return the comparison that the options ask for."""
    if args.exhaustive:
        return compare_bits
    return compare_engines if args.engine else compare_chats


def main() -> int:
    parser = parser_of_options()
    args = parser.parse_args()
    results = measured(parser, args, comparison(args))
    return int(any(target.get("difference") is not None for target in results["targets"].values()))


if __name__ == "__main__":
    sys.exit(main())
