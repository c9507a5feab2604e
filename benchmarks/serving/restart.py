"""How fast does a server that was killed answer a follow-up, with `--prompt-cache`?

    python -m benchmarks.serving.restart [--target qwen-coder] [--turns 4] [--tokens 48]
        [--settle 8] [--out JSON]

A chat of 4,000 tokens is answered once. Then several follow-ups of it are asked, one after the
other. The server is killed with SIGKILL and started again, and the same follow-ups come in the same
order. The prompt cache is a new folder, which is deleted at the end. The result has the seconds of
each answer, the median of after over before, and whether all answers are the same.

Each follow-up is asked once before and once after, because the server also remembers which answers
it gave and drafts from them, and a second time would be faster for that. Afterwards the disk knows
a follow-up's own text too, which saves the reading of some ten tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import httpx

from benchmarks.serving.servers import BENCHMARKS, System, end_on_signals, report, started

CHATS = BENCHMARKS / "speed" / "qwen-coder" / "long-4000.jsonl.gz"
QUESTIONS = (
    "Name the functions of this file.",
    "Which names does it import, and why?",
    "What would you test first here?",
    "Is there a bug in this file?",
    "Which of its functions is the longest?",
    "Write a docstring for its first class.",
)
ANSWER_SECONDS = 600.0

Message = dict[str, str]
Answer = tuple[float, str]  # seconds, text


def ask(url: str, messages: list[Message], tokens: int) -> Answer:
    """Return a greedy answer and the seconds that it took."""
    body = {"messages": messages, "temperature": 0, "max_tokens": tokens}
    started_at = perf_counter()
    reply = httpx.post(
        f"{url}/v1/chat/completions", json=body, timeout=ANSWER_SECONDS, trust_env=False
    )
    seconds = perf_counter() - started_at
    reply.raise_for_status()
    return seconds, reply.json()["choices"][0]["message"]["content"]


def follow_ups(chat: list[Message], turns: int) -> list[list[Message]]:
    """Return the chat with each of the first questions after it."""
    return [[*chat, {"role": "user", "content": question}] for question in QUESTIONS[:turns]]


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the answers' seconds before and after the kill, and what they say together."""
    command = (sys.executable, "-m", "forerun", "serve", "--target", args.target)
    cached = (*command, "--prompt-cache", str(folder), "--log-level", "warning")
    server = System("forerun", cached)
    cores = sorted(os.sched_getaffinity(0))
    log = folder.with_suffix(".log")
    with gzip.open(CHATS, "rt") as lines:
        first: list[Message] = json.loads(lines.readline())["messages"]
    with started(server, cores, log) as (process, url):
        seconds, text = ask(url, first, args.tokens)
        chats = follow_ups([*first, {"role": "assistant", "content": text}], args.turns)
        before = [ask(url, chat, args.tokens) for chat in chats]
        sleep(args.settle)  # because the cache is written beside the answers
        process.kill()
        process.wait()
    with started(server, cores, log) as (_, url):
        after = [ask(url, chat, args.tokens) for chat in chats]
    ratios = [late[0] / early[0] for early, late in zip(before, after, strict=True)]
    return {
        "first_seconds": round(seconds, 3),
        "before_seconds": [round(answer[0], 3) for answer in before],
        "after_seconds": [round(answer[0], 3) for answer in after],
        "after_over_before": round(median(ratios), 3),
        "first_after_over_before": round(ratios[0], 3),
        "same_answers": [answer[1] for answer in before] == [answer[1] for answer in after],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="qwen-coder")
    parser.add_argument("--turns", type=int, default=4, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds before the kill")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end_on_signals()
    with TemporaryDirectory(prefix="forerun-restart-") as home:
        results = measured(args, Path(home) / "cache")
    report(results, args)


if __name__ == "__main__":
    main()
