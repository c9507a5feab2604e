"""Writes the hot tokens of Qwen's draft, which are those that the target says most.

    python -m benchmarks.training.chats ... --out chats
    python benchmarks/training/hot_tokens.py chats [--size 16384]

docs/results/qwen-coder.md has the first command. The target's answers to the training questions are
few (94,000 tokens), so the questions and the standard library's source (its training files) count
too, at 0.3 of the answers' weight each. Then come the lowest ids, which a BPE tokenizer learns
first.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from forerun.api.loading import load_tokenizer
from forerun.backends.hot import save_hot
from forerun.train.corpus import source_files
from forerun.zoo import HOT_FILE, QWEN_CODER, WEIGHTS_FOLDER

Row = dict[str, Any]

SHARE = 0.3  # the weight of questions, and that of code


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chats", type=Path)
    parser.add_argument("--size", type=int, default=16384)
    args = parser.parse_args()
    hot = hot_tokens(_conversations(args.chats / "train.jsonl"), args.size)
    folder = WEIGHTS_FOLDER / f"{QWEN_CODER}-draft"
    folder.mkdir(exist_ok=True)
    save_hot(folder, torch.tensor(hot))
    for name in ("validation", "test"):
        share = _coverage(_conversations(args.chats / f"{name}.jsonl"), hot)
        print(f"{name} of an answer's tokens, hot or in the text so far: {share:.4f}")
    print(folder / HOT_FILE)


def hot_tokens(rows: list[Row], size: int) -> list[int]:
    """Return so many tokens, the most frequent ones first."""
    parts = [
        (1.0, _counted(rows, "answer")),
        (SHARE, _counted(rows, "prompt")),
        (SHARE, _counted_code()),
    ]
    scores: Counter[int] = Counter()
    for weight, counts in parts:
        for token, count in counts.items():
            scores[token] += weight * count / counts.total()
    tokens = [*scores, *(token for token in range(size) if token not in scores)]
    return sorted(tokens, key=lambda token: (-scores[token], token))[:size]


def _conversations(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _counted(rows: list[Row], part: str) -> Counter[int]:
    return Counter(chain.from_iterable(row[part] for row in rows))


def _counted_code() -> Counter[int]:
    tokenizer = load_tokenizer(QWEN_CODER)
    counts: Counter[int] = Counter()
    for _, text in source_files("train"):
        counts.update(tokenizer(text)["input_ids"])
    return counts


def _coverage(rows: list[Row], hot: list[int]) -> float:
    """Return the share of the answers' tokens that are hot or in the text so far."""
    known = set(hot)
    covered = 0
    total = 0
    for row in rows:
        seen = set(row["prompt"])
        for token in row["answer"]:
            covered += token in known or token in seen
            seen.add(token)
        total += len(row["answer"])
    return covered / total


if __name__ == "__main__":
    main()
