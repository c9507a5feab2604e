"""Texts of different lengths to train on, with the part of each that the target wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.train.chats import Conversation, read_chats
from forerun.train.laws import Law
from forerun.train.states import StoredStates

LEARNT = ("train", "validation")  # splits


@dataclass(frozen=True)
class Texts:
    """N texts, short ones padded.

    Attributes:
        tokens: [N, T] int64.
        begins, ends: [N] the target's distributions at positions `begins` to `ends - 1` are those that a draft meets.
            A position's distribution is that of the token behind it.
        states: what the LM head was given [ends, d] over the text of an index, where it was kept, in
        target: the model of this fingerprint.
        law: of an index, the target's distributions at its positions from `begins` to `ends` - 1, where they were kept.
    """

    tokens: Tensor
    begins: Tensor
    ends: Tensor
    states: Callable[[int], Tensor | None] = lambda row: None
    target: dict[str, Any] | None = None
    law: Callable[[int], Law | None] = lambda row: None

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Tensor) -> Texts:
        """Some of the texts, no wider than the longest of them."""
        begins, ends = self.begins[rows], self.ends[rows]
        return Texts(self.tokens[rows, : int(ends.max())], begins, ends)

    def met(self, ahead: int = 0) -> Tensor:
        """[N, T - ahead] bool: at which positions a draft meets the distribution that is `ahead` positions further, if
        it has begun by then."""
        at = torch.arange(max(0, self.tokens.shape[1] - ahead), device=self.tokens.device)
        return (at >= self.begins[:, None]) & (at + ahead < self.ends[:, None])

    @property
    def digest(self) -> str:
        """What tells these texts from others."""
        found = hashlib.sha256()
        for part in (self.tokens, self.begins, self.ends):
            found.update(part.cpu().numpy().tobytes())
        return found.hexdigest()

    def frequencies(self, vocabulary: int) -> Tensor:
        """[V] how often each token stands behind a position that counts."""
        return torch.bincount(self.tokens[:, 1:][self.met()[:, :-1]], minlength=vocabulary)

    def to(self, device: torch.device) -> Texts:
        return replace(self, tokens=self.tokens.to(device), begins=self.begins.to(device), ends=self.ends.to(device))

    def spread(self, most: int) -> Tensor:
        """Indices of about so many texts of all lengths, short ones first."""
        return self.ends.argsort(stable=True)[:: max(1, len(self) // most)]

    def batch(self, seed: int, step: int, size: int) -> Tensor:
        """Indices [size] of texts of about the same length: the same for the same seed and step."""
        rng = np.random.default_rng([seed, step])
        if bool((self.ends == self.ends[0]).all()):
            return torch.from_numpy(rng.integers(len(self), size=size))
        order = self.ends.argsort(stable=True)
        # A few neighbours more than are wanted, so that batches mix.
        near = min(len(self), 4 * size)
        start = int(rng.integers(len(self) - near + 1))
        return order[start + torch.from_numpy(rng.permutation(near)[:size])]


def check_sources(data: Sequence[str], chats: Path | None) -> None:
    """Raises ValueError unless one of the two is given."""
    if bool(data) == (chats is not None):
        raise ValueError("give --data or --chats" + ", not both" * bool(data))


def of_windows(windows: np.ndarray, begin: int = 0) -> Texts:
    """Windows [N, T] of the target's own output; distributions count from position `begin` on."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    count, length = tokens.shape
    return Texts(tokens, torch.full((count,), begin), torch.full((count,), length))


def of_chats(conversations: Sequence[Conversation], longest: int = 512, stored: StoredStates | None = None) -> Texts:
    """Conversations, of which the answers count. Those of more than `longest` tokens are cut.

    Raises ValueError where no answer is left.
    """
    kept = [each for each in conversations if 0 < len(each.prompt) < longest]
    if not kept:
        raise ValueError(f"no conversation has an answer within {longest} tokens")
    rows = [(each.prompt + each.answer)[:longest] for each in kept]
    begins = [len(each.prompt) - 1 for each in kept]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)

    def states(row: int) -> Tensor | None:
        found = None if stored is None else stored.of(kept[row])
        return None if found is None else found[: len(rows[row]) - 1]

    def law(row: int) -> Law | None:
        found = None if stored is None else stored.law_of(kept[row])
        return None if found is None else found.at(torch.arange(len(rows[row]) - len(kept[row].prompt)))

    # What stands behind the last token is never asked for.
    ends = torch.tensor([len(own) - 1 for own in rows])
    return Texts(tokens, torch.tensor(begins), ends, states, None if stored is None else stored.target, law)


def learnt_and_held(chats: Path, longest: int = 512) -> tuple[Texts, Texts]:
    """The splits of a folder of conversations that training sees, with the states that the target had."""
    stored = StoredStates(chats)
    learnt, held = (of_chats(read_chats(chats, split), longest, stored) for split in LEARNT)
    return learnt, held
