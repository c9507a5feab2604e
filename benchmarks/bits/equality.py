"""Whether greedy chats with drafts are those of plain decoding, token for token, on real models.

    python -m benchmarks.bits.equality [--target NAME:METHOD,.. ...] [--tokens 48] [--threads 2] [--out JSON]

Each target is loaded with each method, the guard off; "default" is the method that `forerun.load` chooses.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import forerun
from benchmarks.bits.chat import measured
from forerun.bench.report import versions
from forerun.engine.stats import summarise

QUESTIONS = (
    "Write a Python function that reverses a linked list.",
    "What does `git rebase` do?",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\nMake this faster.",
    "Explain the difference between a list and a tuple, with an example.",
    "Write a SQL query for the three customers who paid most in 2025.",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
)
TARGETS = ("qwen-coder:sd,suffix,default", "qwen-coder-draft:suffix,default")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    for each in given.target or TARGETS:
        target, _, methods = each.rpartition(":")
        expected, own = None, targets.setdefault(target, {})
        for name in methods.split(","):
            decoder = forerun.load(target, method=None if name == "default" else name, guard=False)
            if expected is None:
                expected = [result.tokens for result in chats(decoder.replace(method="ar"), given.tokens)]
            found = chats(decoder, given.tokens)
            steps = [step for result in found for step in result.steps]
            own[name] = {
                "method": decoder.method.name,
                "equal": sum(result.tokens == plain for result, plain in zip(found, expected, strict=True)),
                "chats": len(found),
                "tau": round(summarise(steps, 1.0).tau, 3),
            }
            print(target, name, own[name], flush=True)
    return {
        "targets": targets,
        "arguments": vars(given) | {"out": None},
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def chats(decoder: forerun.Decoder, tokens: int) -> list[Any]:
    return [decoder.chat([{"role": "user", "content": text}], max_new_tokens=tokens) for text in QUESTIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", help=f"as in {TARGETS[0]}; repeatable")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    measured(parser, parser.parse_args(), measure)


if __name__ == "__main__":
    main()
