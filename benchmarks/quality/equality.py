"""Whether outputs with drafts are those of plain decoding, and whether many tokens have the bits of single ones.

    python benchmarks/quality/equality.py [--target NAME:METHOD,.. ...] [--tokens 48] [--threads 2] [--out JSON]
    python benchmarks/quality/equality.py --exhaustive [--target NAME ...] [--share 0.01 | --seconds 600] [--seed 0]
    python benchmarks/quality/equality.py --engine 3000 [--target NAME ...] [--seed 0]

Without options greedy chats are compared, token for token, on real models. Each target is loaded with each method, the
guard off; "default" is the method that `forerun.load` chooses.

--exhaustive compares all bits of logits, keys and values of forwards of 1 to 64 tokens, of trees, prompt chunks and
ragged batches with those of decoding one by one, by every instruction set of this machine and 1 to 3 threads, after
lengths around multiples of 8, 16, 32, 64 and 256 up to 2,100 (`benchmarks.quality.forward_bits`). All cases take weeks:
--share and --seconds take a part of them, spread over the whole. --start goes on where another run with the same seed
ended.

--engine runs so many short outputs in engines in which drafters, lengths, pauses and requests are chosen by chance
(`benchmarks.quality.random_engines`). Both end with status 1 at the first difference, and tell how to run it again alone.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a file too

import forerun
from benchmarks.quality.forward_bits import KINDS, LONGEST, Cases, Check, Difference, reference_of
from benchmarks.quality.questions import measured
from benchmarks.quality.random_engines import run_by_chance
from forerun.bench.report import versions
from forerun.csrc.library import variants
from forerun.engine.stats import summarise
from forerun.methods import Method, Parts, method

QUESTIONS = (
    "Write a Python function that reverses a linked list.",
    "What does `git rebase` do?",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\nMake this faster.",
    "Explain the difference between a list and a tuple, with an example.",
    "Write a SQL query for the three customers who paid most in 2025.",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
)
TARGETS = ("qwen-coder:sd,suffix,default", "qwen-coder-draft:suffix,default")
EXHAUSTIVE, ENGINE = ("smollm2", "qwen-coder"), ("embedded",)
SAID = 5.0  # seconds between two lines of progress


def measure(given: argparse.Namespace) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    for each in given.target or TARGETS:
        target, _, methods = each.rpartition(":")
        expected, own = None, targets.setdefault(target, {})
        for name in methods.split(","):
            decoder = forerun.load(target, method=None if name == "default" else name, guard=False)
            if expected is None:
                expected = [
                    result.tokens for result in chats(decoder.replace(method="ar"), given.tokens)
                ]
            found = chats(decoder, given.tokens)
            steps = [step for result in found for step in result.steps]
            own[name] = {
                "method": decoder.method.name,
                "equal": sum(
                    result.tokens == plain for result, plain in zip(found, expected, strict=True)
                ),
                "chats": len(found),
                "tau": round(summarise(steps, 1.0).tau, 3),
            }
            print(target, name, own[name], flush=True)
    return told(given, targets)


def exhaustive(given: argparse.Namespace) -> dict[str, Any]:
    """Run cases of every target; return how many, and the first difference of each or None."""
    targets: dict[str, Any] = {}
    chosen = given.variants.split(",") if given.variants else variants()
    for name in given.target or EXHAUSTIVE:
        model = forerun.load(name, method="ar", prefix_bytes=0).target
        cases = Cases(given.longest, given.seed, kinds=given.kinds.split(","), of_variants=chosen)
        check = Check(
            model,
            reference_of(model, given.longest, given.seed, lambda line: print(line, flush=True)),
        )
        targets[name] = own = run_cases(name, check, cases, given)
        end = "equal in all bits" if own["difference"] is None else "DIFFERENT"
        compared = f"{own['rows']} rows of logits and {own['entries']} positions of keys and values"
        print(
            f"{name}: {own['cases']} of {len(cases)} cases, {compared} compared: {end}", flush=True
        )
        if own["difference"] is not None:
            break
    return told(given, targets)


def run_cases(name: str, check: Check, cases: Cases, given: argparse.Namespace) -> dict[str, Any]:
    begun, said, end = perf_counter(), perf_counter(), len(cases)
    if given.share is not None:
        end = min(end, given.start + max(1, round(given.share * len(cases))))
    number, difference = given.start, None
    while number < end and (given.seconds is None or perf_counter() - begun < given.seconds):
        try:
            check.run(cases[number], given.seed)
        except Difference as error:
            difference = str(error)
            again = f"--exhaustive --target {name} --longest {given.longest} --kinds {given.kinds}"
            again += f" --variants {given.variants}" if given.variants else ""
            print(f"{difference}\nagain: {again} --seed {given.seed} --start {number}", flush=True)
            break
        number += 1
        if perf_counter() - said > SAID:
            said = perf_counter()
            print(
                f"{name}: case {number} of {end}, {check.rows} rows; go on with --start {number}",
                flush=True,
            )
    counts = {
        "cases": number - given.start,
        "next": number,
        "rows": check.rows,
        "entries": check.entries,
    }
    return counts | {
        "of": len(cases),
        "seconds": round(perf_counter() - begun),
        "difference": difference,
    }


def by_chance(given: argparse.Namespace) -> dict[str, Any]:
    """Run engines with every target; return the counts of each."""
    targets: dict[str, Any] = {}
    for name in given.target or ENGINE:
        parts, methods = parts_of(name)
        print(f"{name}: beside {', '.join(each.name for each in methods)}", flush=True)
        counts, difference, last = None, None, [perf_counter()]

        def say(line: str, name: str = name, last: list[float] = last) -> None:
            if perf_counter() - last[0] > SAID:
                last[0] = perf_counter()
                print(f"{name}: {line}", flush=True)

        try:
            options: dict[str, Any] = {
                "first": given.start,
                "of_variants": quick(given),
                "say": say,
            }
            counts = run_by_chance(parts, methods, given.engine, given.seed, **options)
            print(f"{name}: {counts}: equal", flush=True)
        except Difference as error:
            difference = str(error)
            print(
                f"{difference}\nwith --engine {given.engine} --target {name} --seed {given.seed}",
                flush=True,
            )
        targets[name] = (vars(counts) if counts is not None else {}) | {"difference": difference}
    return told(given, targets)


def quick(given: argparse.Namespace) -> list[str]:
    """Return the instruction sets that engines run, without the plain one, which takes twenty times as long."""
    return (
        given.variants.split(",")
        if given.variants
        else [each for each in variants() if each != "plain"]
    )


def parts_of(name: str) -> tuple[Parts, list[Method]]:
    """Return the parts of a target that comes with drafts, and the methods that they allow."""
    loaded = forerun.load(name, method="hybrid", guard=False, prefix_bytes=0)
    names = ["suffix", "ouroboros"]
    if loaded.draft is not None:
        names += ["sd", "cumulative"]
    if loaded.head is not None:
        names += ["lyanna"]
    if loaded.pre_verifier is not None:
        names += ["pacer"] if loaded.head is None else ["pacer-lyanna"]
    parts = Parts(loaded.target, loaded.draft, loaded.pre_verifier, loaded.costs, head=loaded.head)
    return parts, [
        method(each) for each in names if each != "ouroboros" or loaded.draft is not None
    ]


def told(given: argparse.Namespace, targets: dict[str, Any]) -> dict[str, Any]:
    return {
        "targets": targets,
        "arguments": vars(given) | {"out": None},
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def chats(decoder: forerun.Decoder, tokens: int) -> list[Any]:
    return [
        decoder.chat([{"role": "user", "content": text}], max_new_tokens=tokens)
        for text in QUESTIONS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", action="append", help=f"as in {TARGETS[0]}, or a name alone; repeatable"
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
    parser.add_argument(
        "--variants", help="instruction sets; all of this machine if none are given"
    )
    parser.add_argument(
        "--engine", type=int, help="compare so many outputs of engines that run by chance"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first case or engine")
    parser.add_argument("--out", type=Path)
    given, found = parser.parse_args(), list[dict[str, Any]]()
    how = exhaustive if given.exhaustive else by_chance if given.engine else measure

    def kept(given: argparse.Namespace) -> dict[str, Any]:
        found.append(how(given))
        return found[0]

    measured(parser, given, kept)
    return int(any(each.get("difference") is not None for each in found[0]["targets"].values()))


if __name__ == "__main__":
    sys.exit(main())
