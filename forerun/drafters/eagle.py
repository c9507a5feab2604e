"""Drafting with an EAGLE-like head (arXiv 2401.15077): each state follows from the last state and a drafted token."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.head import HeadDrafter
from forerun.engine.draft import Draft

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence


class EagleDrafter(HeadDrafter):
    def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        # Sequences without a feature, or with a limit of 0, do not draft.
        live = [row for row, limit in enumerate(limits) if limit > 0]
        own = [seqs[row] for row in live]
        limits = [limits[row] for row in live]
        in_c = self.head.grows(self.width)
        found = (
            [draft for draft, _ in self.draft_in_c(own, limits)]
            if in_c
            else self._grown(own, limits)
        )
        drafts = [Draft.root(seq.tokens[-1]) for seq in seqs]
        for row, draft in zip(live, found, strict=True):
            drafts[row] = draft
        return drafts

    def _grown(self, own: list[Sequence], limits: list[int]) -> list[Draft]:
        head, ids, begun = self.head, [seq.id for seq in own], perf_counter()
        states = head.extend(ids, *self.take(own))[:, None]  # [B, w, d]
        self.seconds += perf_counter() - begun
        self.forwards += 1
        lengths, rows = (
            [head.length(id) for id in ids],
            torch.arange(len(ids), device=head.device)[:, None],
        )
        seen = torch.zeros(len(ids), 1, 0, dtype=torch.bool, device=head.device)

        def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            nonlocal states, seen
            begun = perf_counter()
            if k:
                if self.width == 1:  # a chain sees itself
                    seen = torch.ones(len(ids), 1, k, dtype=torch.bool, device=head.device)
                else:
                    itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=head.device)
                    seen = torch.cat([seen[rows, at], itself.expand(len(ids), -1, -1)], -1)
                    states = states[rows, at]
                states = head.branch(ids, states, tokens, k - 1, seen)
                self.forwards += 1
            found = head.logits(states.flatten(0, 1)).view(len(ids), states.shape[1], -1)
            self.seconds += perf_counter() - begun
            return found

        drafts = self.grow(own, logits, limits, self.plan(own, limits))
        head.crop(ids, lengths)
        return drafts
