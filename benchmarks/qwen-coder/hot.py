"""Writes the hot tokens of Qwen's draft: the ones that the target says most, in its answers to the training questions.

    python -m benchmarks.chat.data ... --out chats    (docs/results/qwen-coder.md has the command)
    python benchmarks/qwen-coder/hot.py chats [--size 16384]

Answers are few (94,000 tokens), so the questions and the standard library's source (its training files) count too, at
0.3 of the answers' weight each. Then come the lowest ids, which a BPE tokenizer learnt first.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import chain
from pathlib import Path

import torch

from forerun.api.loading import load_tokenizer
from forerun.backends.hot import save_hot
from forerun.train.corpus import source_files
from forerun.zoo import HOT_FILE, QWEN_CODER, WEIGHTS_FOLDER

SHARE = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chats", type=Path)
    parser.add_argument("--size", type=int, default=16384)
    given = parser.parse_args()
    tokenizer = load_tokenizer(QWEN_CODER)
    known = {
        name: _conversations(given.chats / f"{name}.jsonl")
        for name in ("train", "validation", "test")
    }
    code = Counter(
        chain.from_iterable(tokenizer(text)["input_ids"] for _, text in source_files("train"))
    )
    parts = [
        (1.0, _counted(known["train"], "answer")),
        (SHARE, _counted(known["train"], "prompt")),
        (SHARE, code),
    ]
    scores: Counter[int] = Counter()
    for weight, counts in parts:
        for token, count in counts.items():
            scores[token] += weight * count / counts.total()
    order = [*scores, *(token for token in range(given.size) if token not in scores)]
    hot = sorted(order, key=lambda token: (-scores[token], token))[: given.size]
    folder = WEIGHTS_FOLDER / f"{QWEN_CODER}-draft"
    folder.mkdir(exist_ok=True)
    save_hot(folder, torch.tensor(hot))
    for name in ("validation", "test"):
        print(
            name,
            f"of an answer's tokens, hot or in the text so far: {_coverage(known[name], hot):.4f}",
        )
    print(folder / HOT_FILE)


def _conversations(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _counted(rows: list[dict], part: str) -> Counter[int]:
    return Counter(chain.from_iterable(row[part] for row in rows))


def _coverage(rows: list[dict], hot: list[int]) -> float:
    found, total, known = 0, 0, set(hot)
    for row in rows:
        seen = set(row["prompt"])
        for token in row["answer"]:
            found += token in known or token in seen
            seen.add(token)
        total += len(row["answer"])
    return found / total


if __name__ == "__main__":
    main()
