"""Texts to train on: files, conversations, and windows of the target's own output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.files import read_text
from forerun.train.corpus import Split, source_files

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


# Files.


def read_texts(sources: Iterable[str]) -> Iterator[str]:
    """Yield the texts of files and of folders' files: of .jsonl the "text" of each line, of other files the whole text.

    "stdlib" stands for the training split of the standard library. Raises ValueError for a file that is missing or not
    text, and for a line without a "text".
    """
    for source in sources:
        if source == "stdlib":
            yield from (text for _, text in source_files("train"))
            continue
        path = Path(source)
        paths = (
            sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
        )
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
    """Join texts in a shuffled order to one stream [n], an end token before each; raise ValueError for none."""
    if not texts:
        raise ValueError(
            f"the data holds no text; files of these kinds are read: {' '.join(SUFFIXES)}"
        )
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    order = np.random.default_rng(seed).permutation(len(texts))
    return np.concatenate([np.array([*end, *rows[i]], dtype=dtype) for i in order])


# Conversations.


@dataclass(frozen=True)
class Conversation:
    """One question with its answer, as `benchmarks.chat.data` makes them."""

    question: str
    prompt: list[int]  # token ids, the template's own included
    answer: list[int]  # token ids, with the end token of a finished answer
    text: str  # of the answer
    temperature: float  # of the answer
    source: str  # of the question, as "own" or "given"
    split: str  # one of SPLITS, which follows from the question


def check_chats(folder: Path, tokenizer: PreTrainedTokenizerBase, target: str) -> None:
    """Raise ValueError for a folder without conversations, or with those of another tokenizer."""
    for each in read_chats(folder, SPLITS[0])[:8]:
        is_known = max([*each.prompt, *each.answer]) < len(tokenizer)
        if not is_known or tokenizer.decode(each.answer, skip_special_tokens=True) != each.text:
            raise ValueError(
                f"the conversations in {folder} are of a model with other tokens than {target!r}"
            )


def read_chats(folder: Path, split: str) -> list[Conversation]:
    """Return the conversations of a split; raise ValueError if they have not been made."""
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        made = "`python -m benchmarks.chat.data` makes them in a clone of forerun"
        raise ValueError(
            f"no conversations in {folder}, there is no {path.name}: {made}; --data takes plain text"
        )
    return [Conversation(**json.loads(line)) for line in read_text(path).splitlines()]


# Both as tensors.


@dataclass(frozen=True)
class Texts:
    """N texts, short ones padded.

    Attributes:
        tokens: [N, T] int64.
        begins, ends: [N] the positions `begins` to `ends - 1` count: the loss compares distributions there. A
            position's distribution is that of the token after it.
    """

    tokens: Tensor
    begins: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Tensor) -> Texts:
        """Return some of the texts, no wider than the longest of them."""
        begins, ends = self.begins[rows], self.ends[rows]
        return Texts(self.tokens[rows, : int(ends.max())], begins, ends)

    def counted(self, ahead: int = 0) -> Tensor:
        """Return [N, T - ahead] bool: the positions of the output where `ahead` positions further count too."""
        at = torch.arange(max(0, self.tokens.shape[1] - ahead), device=self.tokens.device)
        return (at >= self.begins[:, None]) & (at + ahead < self.ends[:, None])

    @property
    def mean_length(self) -> float:
        return float(self.ends.float().mean())

    @property
    def digest(self) -> str:
        """Return a hash of the texts."""
        found = hashlib.sha256()
        for part in (self.tokens, self.begins, self.ends):
            found.update(part.cpu().numpy().tobytes())
        return found.hexdigest()

    def frequencies(self, vocabulary: int) -> Tensor:
        """Return [V] how often each token stands after a position that counts."""
        return torch.bincount(self.tokens[:, 1:][self.counted()[:, :-1]], minlength=vocabulary)

    def to(self, device: torch.device) -> Texts:
        return Texts(self.tokens.to(device), self.begins.to(device), self.ends.to(device))

    def spread(self, most: int) -> Tensor:
        """Return the indices of about `most` texts of all lengths, short ones first."""
        return self.ends.argsort(stable=True)[:: max(1, len(self) // most)]

    def batch(self, seed: int, step: int, size: int) -> Tensor:
        """Return the indices [size] of texts of about the same length: the same for the same seed and step."""
        rng = np.random.default_rng([seed, step])
        if bool((self.ends == self.ends[0]).all()):
            return torch.from_numpy(rng.integers(len(self), size=size))
        order = self.ends.argsort(stable=True)
        near = min(len(self), 4 * size)  # more than needed, so that batches mix
        start = int(rng.integers(len(self) - near + 1))
        return order[start + torch.from_numpy(rng.permutation(near)[:size])]


def of_windows(windows: np.ndarray, begin: int = 0) -> Texts:
    """Make texts of windows [N, T] of the target's own output; distributions count from position `begin` on."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    count, length = tokens.shape
    return Texts(tokens, torch.full((count,), begin), torch.full((count,), length))


def of_chats(conversations: Sequence[Conversation], longest: int = 512) -> Texts:
    """Make texts of conversations, of which the answers count. Those of more than `longest` tokens are cut.

    Raises ValueError where no answer is left.
    """
    kept = [each for each in conversations if 0 < len(each.prompt) < longest]
    if not kept:
        raise ValueError(f"no conversation has an answer within {longest} tokens")
    rows = [(each.prompt + each.answer)[:longest] for each in kept]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)
    # No label is needed for the last token.
    ends = torch.tensor([len(own) - 1 for own in rows])
    return Texts(tokens, torch.tensor([len(each.prompt) - 1 for each in kept]), ends)


def load_train_val(chats: Path, longest: int = 512) -> tuple[Texts, Texts]:
    """Read the splits of a folder of conversations that training sees."""
    train, val = (of_chats(read_chats(chats, split), longest) for split in SPLITS[:2])
    return train, val


def split_windows(
    windows: np.ndarray, share: float, begin: int, val_begin: int
) -> tuple[Texts, Texts]:
    """Keep each 1/`share`-th window for validation; distributions count from `begin` and `val_begin`."""
    every = np.s_[:: round(1 / share)]
    return of_windows(np.delete(windows, every, 0), begin), of_windows(windows[every], val_begin)


def joined(one: Texts, other: Texts) -> Texts:
    """Return texts of one width as one."""
    pairs = ((one.tokens, other.tokens), (one.begins, other.begins), (one.ends, other.ends))
    return Texts(*(torch.cat(pair) for pair in pairs))
