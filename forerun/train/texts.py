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
    """Yield the texts of files, and of the files in folders.

    A .jsonl file has one text in each line, under the key "text"; any other file is one text. The
    source "stdlib" stands for the training split of the standard library.

    Raises:
        ValueError: a file is missing or is not text, or a line has no "text".
    """
    for source in sources:
        if source == "stdlib":
            yield from (text for _, text in source_files("train"))
            continue
        for file in _files(Path(source)):
            text = read_text(file)
            if file.suffix == ".jsonl":
                yield from _texts_of_lines(file, text)
            elif text.strip():
                yield text


def _files(path: Path) -> list[Path]:
    """Return a file, or the files in a folder that hold text."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)


def _texts_of_lines(file: Path, text: str) -> Iterator[str]:
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
    """Join texts in a shuffled order to one stream [n], with an end token before each.

    Raises:
        ValueError: there are no texts.
    """
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
    """One question with its answer, as `benchmarks.training.chats` makes them.

    Attributes:
        question: the text of the question.
        prompt: token ids, including those of the chat template.
        answer: token ids, including the end token if the answer is finished.
        text: the text of the answer.
        temperature: the temperature at which the answer was sampled.
        source: where the question comes from, for example "own" or "given".
        split: one of SPLITS, which follows from the question.
    """

    question: str
    prompt: list[int]
    answer: list[int]
    text: str
    temperature: float
    source: str
    split: str


def check_chats(folder: Path, tokenizer: PreTrainedTokenizerBase, target: str) -> None:
    """Raise ValueError if a folder has no conversations, or those of another tokenizer."""
    for chat in read_chats(folder, SPLITS[0])[:8]:
        is_known = max([*chat.prompt, *chat.answer]) < len(tokenizer)
        if not is_known or tokenizer.decode(chat.answer, skip_special_tokens=True) != chat.text:
            raise ValueError(
                f"the conversations in {folder} are of a model with other tokens than {target!r}"
            )


def read_chats(folder: Path, split: str) -> list[Conversation]:
    """Return the conversations of a split.

    Raises:
        ValueError: the folder has none, because they have not been made.
    """
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"no conversations in {folder}, there is no {path.name}: `python -m "
            "benchmarks.training.chats` makes them in a clone of forerun; --data takes plain text"
        )
    return [Conversation(**json.loads(line)) for line in read_text(path).splitlines()]


# Both as tensors.


@dataclass(frozen=True)
class Texts:
    """N texts, the short ones padded.

    Attributes:
        tokens: [N, T] int64.
        begins: [N] the first positions that count, which means that the loss compares distributions
            there. A position's distribution is that of the token after it.
        ends: [N] the positions after the last ones that count.
    """

    tokens: Tensor
    begins: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Tensor) -> Texts:
        """Return some of the texts, no wider than the longest of them."""
        begins = self.begins[rows]
        ends = self.ends[rows]
        return Texts(self.tokens[rows, : int(ends.max())], begins, ends)

    def counted(self, ahead: int = 0) -> Tensor:
        """Return as bool [N, T - ahead] where a position and the `ahead` next ones count."""
        at = torch.arange(max(0, self.tokens.shape[1] - ahead), device=self.tokens.device)
        return (at >= self.begins[:, None]) & (at + ahead < self.ends[:, None])

    @property
    def mean_length(self) -> float:
        """Return the mean length of a text in tokens."""
        return float(self.ends.float().mean())

    @property
    def digest(self) -> str:
        """Return a hash of the texts."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.begins, self.ends):
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()

    def frequencies(self, vocabulary: int) -> Tensor:
        """Return [V] how often each token follows a position that counts."""
        return torch.bincount(self.tokens[:, 1:][self.counted()[:, :-1]], minlength=vocabulary)

    def to(self, device: torch.device) -> Texts:
        """Return the texts on a device."""
        return Texts(self.tokens.to(device), self.begins.to(device), self.ends.to(device))

    def spread(self, most: int) -> Tensor:
        """Return the indices of about `most` texts of all lengths, the short ones first."""
        return self.ends.argsort(stable=True)[:: max(1, len(self) // most)]

    def batch(self, seed: int, step: int, size: int) -> Tensor:
        """Return the indices [size] of texts of about the same length.

        The seed and the step alone decide which texts these are.
        """
        rng = np.random.default_rng([seed, step])
        if bool((self.ends == self.ends[0]).all()):
            return torch.from_numpy(rng.integers(len(self), size=size))
        order = self.ends.argsort(stable=True)
        candidates = min(len(self), 4 * size)  # more than needed, so that batches mix
        start = int(rng.integers(len(self) - candidates + 1))
        return order[start + torch.from_numpy(rng.permutation(candidates)[:size])]


def of_windows(windows: np.ndarray, begin: int = 0) -> Texts:
    """Make texts of windows [N, T] of the target's own output, which count from `begin` on."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    count, length = tokens.shape
    return Texts(tokens, torch.full((count,), begin), torch.full((count,), length))


def of_chats(conversations: Sequence[Conversation], longest: int = 512) -> Texts:
    """Make texts of conversations, in which the answers count.

    Texts of more than `longest` tokens are cut.

    Raises:
        ValueError: no answer is left.
    """
    kept = [chat for chat in conversations if 0 < len(chat.prompt) < longest]
    if not kept:
        raise ValueError(f"no conversation has an answer within {longest} tokens")
    rows = [(chat.prompt + chat.answer)[:longest] for chat in kept]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    begins = torch.tensor([len(chat.prompt) - 1 for chat in kept])
    ends = torch.tensor([len(row) - 1 for row in rows])  # because the last token needs no label
    return Texts(tokens, begins, ends)


def load_train_val(chats: Path, longest: int = 512) -> tuple[Texts, Texts]:
    """Read those splits of a folder of conversations that training sees."""
    train, val = (of_chats(read_chats(chats, split), longest) for split in SPLITS[:2])
    return train, val


def split_windows(
    windows: np.ndarray, share: float, begin: int, val_begin: int
) -> tuple[Texts, Texts]:
    """Keep every (1 / `share`)-th window for validation.

    Training windows count from `begin` on, those of validation from `val_begin` on.
    """
    held = np.s_[:: round(1 / share)]
    return of_windows(np.delete(windows, held, 0), begin), of_windows(windows[held], val_begin)


def joined(one: Texts, other: Texts) -> Texts:
    """Return the texts of both, which have one width."""
    return Texts(
        torch.cat((one.tokens, other.tokens)),
        torch.cat((one.begins, other.begins)),
        torch.cat((one.ends, other.ends)),
    )
