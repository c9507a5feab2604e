"""Drafting with an EAGLE-like head (arXiv 2401.15077): states follow from the token after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter
from forerun.methods.base import Parts
from forerun.methods.hidden import HeadDrafter, Heads, Paced
from forerun.methods.later import torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.backends.heads import HiddenLM
    from forerun.engine.costs import Costs
    from forerun.engine.sequence import Mode, Sequence
    from forerun.methods.budget import Budget


@dataclass(frozen=True)
class Eagle(Heads):
    """Drafts with an EAGLE-like head (arXiv 2401.15077), which is given the token behind each state."""

    name: ClassVar[str] = "eagle"
    head: ClassVar[str | None] = "eagle"

    def build(self, parts: Parts) -> Drafter:
        assert parts.head is not None
        return EagleDrafter(parts.head.fresh(), *self.shape, self.costs_for(parts), self.steps, self.drawing)


@dataclass(frozen=True)
class PacerEagle(Paced, Eagle):
    """The EAGLE-like head with the rule of `pacer-lyanna`: `depth` and `nodes` are limits, and each step goes as deep
    and takes as many tokens as they are worth. It asks every `block` depths, each of which is a forward of the head."""

    depth: int = 16
    nodes: int = 16
    block: int = 1
    name: ClassVar[str] = "pacer-eagle"


class EagleDrafter(HeadDrafter):
    """Each state is made from the one before and the token behind it (arXiv 2401.15077). So every depth of a tree is a
    forward of the head on all beams.

    With `costs_for`, the costs of forwards by mode, each step chooses its depth and number of nodes by the rule of
    Lyanna's (`Budget`); whether to go on is asked every `block` depths."""

    def __init__(
        self,
        head: HiddenLM,
        depth: int,
        width: int,
        nodes: int,
        costs_for: Callable[[Mode], Costs] | None = None,
        block: int = 1,
        drawing: str | None = None,
    ) -> None:
        from forerun.methods.budget import Budgets

        super().__init__(head, depth, width, nodes, drawing)
        self.budgets = Budgets(head, costs_for, block, nodes, width) if costs_for is not None else None

    def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        # Sequences without a feature, or without room, sit out.
        live = [row for row, limit in enumerate(limits) if limit > 0]
        own = [seqs[row] for row in live]
        limits, budget = [limits[row] for row in live], None
        if self.budgets is not None:
            budget = self.budgets.of(own, limits, list(range(len(own))), [0] * len(own))
        guessed = self.guess(own, limits, budget)
        found = [guessed[0]] if guessed is not None else self._grown(own, limits, budget)
        drafts = [Draft.root(seq.tokens[-1]) for seq in seqs]
        for row, draft in zip(live, found, strict=True):
            drafts[row] = draft
        return drafts

    def _grown(self, own: list[Sequence], limits: list[int], budget: Budget | None) -> list[Draft]:
        head, ids, begun = self.head, [seq.id for seq in own], perf_counter()
        states = self.run(own)[:, None]  # [B, w, d]
        self.seconds += perf_counter() - begun
        self.forwards += 1
        lengths, rows = [head.length(id) for id in ids], torch.arange(len(ids), device=head.device)[:, None]
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

        drafts = self.grow(own, logits, limits, budget)
        head.crop(ids, lengths)
        return drafts
