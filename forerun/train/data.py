"""Token streams and the batches cut from them; a batch is a function of its step, so resuming is exact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.files import read_text
from forerun.zoo.corpus import source_files

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def read_texts(sources: Iterable[str]) -> Iterator[str]:
    """Texts of files and of folders' files: .jsonl gives the "text" field of each line, others themselves.

    "stdlib" stands for the training split of the standard library. Raises ValueError for a file that is missing or
    not text, and for a line without a "text".
    """
    for source in sources:
        if source == "stdlib":
            yield from (text for _, text in source_files("train"))
            continue
        path = Path(source)
        paths = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
        for file in paths:
            text = read_text(file)
            if file.suffix == ".jsonl":
                yield from _lines(file, text)
            elif text.strip():
                yield text


def _lines(file: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            value = None
        if not isinstance(value, str):
            raise ValueError(f'{file} line {number} is not a JSON object with a "text"')
        yield value


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], seed: int = 0) -> np.ndarray:
    """Texts in a shuffled order as one stream [n], an end token before each; raises ValueError for none."""
    if not texts:
        raise ValueError(f"the data holds no text; files of these kinds are read: {' '.join(SUFFIXES)}")
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    order = np.random.default_rng(seed).permutation(len(texts))
    return np.concatenate([np.array([*end, *rows[i]], dtype=kind) for i in order])


class Windows:
    """Windows of `length + 1` tokens over a flat token stream, in a new order and phase every epoch.

    `batch(step, size)` is the same whenever it is asked for: no iterator state to save.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int = 0) -> None:
        if len(stream) < 2 * length + 2:
            raise ValueError(
                f"the data holds {len(stream)} tokens, too few for windows of {length}: "
                f"give at least {2 * length + 2} tokens or a smaller length"
            )
        self.stream, self.length, self.seed = stream, length, seed
        self.per_epoch = (len(stream) - length - 1) // length
        self._order = lru_cache(maxsize=2)(self._new_order)

    def _new_order(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        return rng.permutation(self.per_epoch) * self.length + rng.integers(self.length)

    def batch(self, step: int, size: int) -> Tensor:
        """Tokens [size, length + 1] of the given step."""
        starts = [self._order(i // self.per_epoch)[i % self.per_epoch] for i in range(step * size, (step + 1) * size)]
        rows = np.stack([self.stream[start : start + self.length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))
