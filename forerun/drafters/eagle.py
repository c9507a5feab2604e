"""Drafting with an EAGLE-like head (arXiv 2401.15077).

Each state follows from the last state and a drafted token.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.head import HeadDrafter, HeadWork, NewFeatures
from forerun.engine.draft import Draft

if TYPE_CHECKING:
    from forerun.backends.heads import HiddenLM
    from forerun.engine.sequence import Sequence


class EagleDrafter(HeadDrafter):
    """Draft a state per depth and beam, in C if it can."""

    def draft(self, seqs: list[Sequence], limits: list[int], work: HeadWork) -> list[Draft]:
        """Return a draft for each sequence; an empty one for a limit of 0."""
        live = [row for row, limit in enumerate(limits) if limit > 0]
        live_seqs = [seqs[row] for row in live]
        live_limits = [limits[row] for row in live]
        if self.head.grows(self.width):
            grown = [draft for draft, _ in self.draft_in_c(live_seqs, live_limits, work)]
        else:
            grown = self._draft_in_torch(live_seqs, live_limits, work)
        drafts = [Draft.root(seq.tokens[-1]) for seq in seqs]
        for row, draft in zip(live, grown, strict=True):
            drafts[row] = draft
        return drafts

    def _draft_in_torch(
        self, seqs: list[Sequence], limits: list[int], work: HeadWork
    ) -> list[Draft]:
        """Return drafts of sequences whose limits are above 0."""
        ids = [seq.id for seq in seqs]
        branches = _Branches(self.head, ids, self.take(seqs), self.width, work)
        drafts = self.grow(seqs, branches, limits, self.plan(seqs, limits))
        self.head.crop(ids, branches.lengths)
        return drafts


class _Branches:
    """Return the logits of each depth, from states that torch computes (`beams.Logits`).

    Attributes:
        lengths: of the head's rows without drafted states.
    """

    def __init__(
        self, head: HiddenLM, ids: list[int], new: NewFeatures, width: int, work: HeadWork
    ) -> None:
        """Run what the head has not run of the sequences."""
        started_at = perf_counter()
        self._head = head
        self._ids = ids
        self._width = width
        self._work = work
        self._states = head.extend(ids, *new)[:, None]  # [B, w, d] of the last depth
        self._rows = torch.arange(len(ids), device=head.device)[:, None]
        # [B, w, n] which of the n drafted states each beam has on its path
        self._seen = torch.zeros(len(ids), 1, 0, dtype=torch.bool, device=head.device)
        work.add(1, started_at)
        self.lengths = [head.length(id) for id in ids]

    def __call__(self, k: int, tokens: Tensor, at: Tensor) -> Tensor:
        started_at = perf_counter()
        if k:
            self._branch(k, tokens, at)
        states = self._states
        logits = self._head.logits(states.flatten(0, 1))
        self._work.add(1 if k else 0, started_at)
        return logits.view(len(self._ids), states.shape[1], -1)

    def _branch(self, k: int, tokens: Tensor, at: Tensor) -> None:
        """Compute the states of depth k, after these tokens."""
        count = len(self._ids)
        device = self._head.device
        states = self._states
        if self._width == 1:  # a chain has all of its states on its path
            self._seen = torch.ones(count, 1, k, dtype=torch.bool, device=device)
        else:
            itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=device)
            seen = self._seen[self._rows, at]
            self._seen = torch.cat([seen, itself.expand(count, -1, -1)], -1)
            states = states[self._rows, at]
        self._states = self._head.branch(self._ids, states, tokens, k - 1, self._seen)
