"""Texts with the target's states, from which heads learn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.training.gpu.target import PART, Target
from forerun.train.texts import Conversation

NOISE = 24  # texts are sorted by their length and up to so many positions, so that batches differ
KEPT = ("states", "best", "whole", "lower")  # tensors that a file keeps


class Batch(NamedTuple):
    """Rows of texts.

    Attributes:
        at: [B, T] the place of each position in the tensors of Data.
        within: [B, T] whether it is within the text.
        answers: [B, T] whether it is an answer's.
    """

    at: Tensor
    within: Tensor
    answers: Tensor


class Data:
    """Texts with the target's states.

    Args:
        target: reads the texts.
        known: the conversations.
        part: positions that are read or measured together.
        kept: a file for the states, so that they are read once; None to read them anew.
        lower: whether the states of two lower blocks are wanted.

    Attributes:
        sources: where each text comes from.
        lengths, sizes: [R] tokens of each text, on the CPU and on the device.
        starts: [R] the place of its first token.
        begins: [R] the position in it from which the answer is predicted.
        tokens: [n] of all texts in turn.
        states: [n, d] the target's.
        best: [n] the likeliest token after each state.
        whole: [n] the log-sum-exp of the logits of each state.
        lower: [n, 2 d] the states of two lower blocks, or empty.
    """

    def __init__(
        self,
        target: Target,
        known: list[Conversation],
        part: int = PART,
        kept: Path | None = None,
        lower: bool = False,
    ) -> None:
        device = target.device
        rows = [(one.prompt + one.answer)[:-1] for one in known]
        self.part = part
        self.sources = [one.source for one in known]
        self.lengths = torch.tensor([len(row) for row in rows])
        self.sizes = self.lengths.to(device)
        self.starts = (self.lengths.cumsum(0) - self.lengths).to(device)
        self.begins = torch.tensor([len(one.prompt) - 1 for one in known], device=device)
        self.tokens = torch.tensor([token for row in rows for token in row], device=device)
        total = len(self.tokens)
        lower_total = total if lower else 0
        self.states = torch.empty(total, target.size, dtype=torch.bfloat16, device=device)
        self.lower = torch.empty(lower_total, 2 * target.size, dtype=torch.bfloat16, device=device)
        self.whole = torch.empty(total, device=device)
        self.best = torch.empty(total, dtype=torch.int32, device=device)
        if kept is not None and self._load(kept):
            return
        self._read_all(target)
        if kept is not None:
            save_file({name: getattr(self, name) for name in KEPT}, kept)

    def _load(self, path: Path) -> bool:
        """Load the states from a file, and return whether it has all that is wanted."""
        if not path.exists():
            return False
        parts = load_file(path)
        if len(parts["lower"]) < len(self.lower):
            return False
        self.states, self.best, self.whole, self.lower = (parts[name] for name in KEPT)
        return True

    def _read_all(self, target: Target) -> None:
        """Read all texts.

        On a CPU several threads of one core each do it, because they do not wait at barriers.
        """
        on_cpu = target.device.type == "cpu"
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if on_cpu else threads)
        with ThreadPoolExecutor(threads if on_cpu else 1) as pool:
            batches = self.batches(self.part, random.Random(0))
            list(pool.map(lambda rows: self._read(target, rows), batches))
        torch.set_num_threads(threads)

    def _read(self, target: Target, rows: list[int]) -> None:
        """Read some texts."""
        at, within, _ = self.take(rows)
        lower: list[Tensor] = []
        has_lower = len(self.lower) > 0
        states = target.read(self.tokens[at], lower=lower if has_lower else None)[within]
        places = at[within]
        best, whole = target.law(states)
        if has_lower:
            self.lower[places] = torch.cat(lower, -1)[within]
        self.states[places] = states
        self.best[places] = best
        self.whole[places] = whole

    def batches(self, positions: int, rng: random.Random) -> list[list[int]]:
        """Return all rows in shuffled batches of about the same length.

        A batch has at most so many positions, padding included.
        """
        lengths = self.lengths.tolist()
        order = sorted(range(len(lengths)), key=lambda row: lengths[row] + rng.random() * NOISE)
        batches: list[list[int]] = [[]]
        longest = 0
        for row in order:
            longest = max(longest, lengths[row])
            if batches[-1] and (len(batches[-1]) + 1) * longest > positions:
                batches.append([])
                longest = lengths[row]
            batches[-1].append(row)
        rng.shuffle(batches)
        return batches

    def forever(self, positions: int, seed: int) -> Iterator[list[int]]:
        """Yield batches without end, each time in a new order."""
        rng = random.Random(seed)
        while True:
            yield from self.batches(positions, rng)

    def take(self, rows: list[int]) -> Batch:
        """Return rows of texts, padded to the longest."""
        chosen = torch.tensor(rows, device=self.starts.device)
        position = torch.arange(int(self.lengths[rows].max()), device=self.starts.device)
        within = position < self.sizes[chosen][:, None]
        is_answer = position >= self.begins[chosen][:, None]
        return Batch(self.starts[chosen][:, None] + position * within, within, within & is_answer)
