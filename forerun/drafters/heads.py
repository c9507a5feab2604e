"""Drafting with a head over the target's hidden states: what Lyanna's drafter and those that it is compared with have
in common, and these."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.draft import Draft
from forerun.drafters.beams import grow
from forerun.runtime.hidden import HiddenLM
from forerun.sampling import Verdict


class HeadDrafter:
    """Keeps the features that its head has not run yet; drafts `depth` places, with `width` beams and at most `nodes`
    tokens, all point masses."""

    wants_hidden = True

    def __init__(self, head: HiddenLM, depth: int, width: int, nodes: int) -> None:
        self.head, self.depth, self.width, self.nodes = head, depth, width, nodes
        self.seconds = 0.0  # in the head, of the present step
        self.forwards = 0

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self.head.start(len(seqs))
        if hidden is None:
            hidden = torch.zeros(len(seqs), 0, self.head.width, dtype=self.head.dtype, device=self.head.device)
        self._pieces = [[hidden[row, : len(seq.tokens) - 1]] for row, seq in enumerate(seqs)]
        if self.head.kind != "medusa" and any(len(own) > 1 for (own,) in self._pieces):
            # Prompts are no part of the first step, which a guard judges; the last feature is, as it has an answer.
            self.run(seqs, [own[:-1] for (own,) in self._pieces], left=1)

    @property
    def features(self) -> list[Tensor]:
        """Of each row [n, d], what the head has not run yet."""
        for own in self._pieces:
            if len(own) > 1:
                own[:] = [torch.cat(own)]
        return [own[0] for own in self._pieces]

    def run(self, seqs: Sequence[Generation], features: list[Tensor], left: int = 0) -> Tensor:
        """Has the head run these features, for each row all that it has but the `left` last ones, or none; the states
        [B, d] behind them."""
        behind = []
        for seq, own in zip(seqs, features, strict=True):
            end = len(seq.tokens) - left
            behind.append(seq.tokens[end - len(own) : end])
        states = self.head.extend(features, behind if self.head.known else None)
        for row, own in enumerate(features):
            self.forget(row, len(own))
        return states

    def forget(self, row: int, count: int) -> None:
        """Drops the first `count` of a row's features."""
        (own,) = self._pieces[row]
        self._pieces[row] = [own[count:]]

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        self.seconds, self.forwards, features = 0.0, 0, self.features
        # At the start behind a single token there are no features.
        limits = [min(self.depth, seq.room - 1) if len(own) else 0 for seq, own in zip(seqs, features, strict=True)]
        if max(limits) < 1:
            return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
        drafts = self.draft(seqs, features, limits)
        return Proposal(drafts, self.forwards, self.seconds)

    def draft(self, seqs: Sequence[Generation], features: list[Tensor], limits: list[int]) -> list[Draft]:
        """A draft for each sequence, at most so deep; one of them at least is to have a token."""
        raise NotImplementedError

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        assert hidden is not None
        for row, verdict in enumerate(verdicts):
            path = verdict.path
            new = hidden[row, : len(path)] if path[-1] == len(path) - 1 else hidden[row, path]
            self._pieces[row].append(new)

    def keep(self, rows: list[int]) -> None:
        self.head.keep(rows)
        self._pieces = [self._pieces[row] for row in rows]


class EagleDrafter(HeadDrafter):
    """Each state is made of the one before and the token behind it, so every depth of a tree is a forward of the head
    on all beams (arXiv 2401.15077)."""

    def draft(self, seqs: Sequence[Generation], features: list[Tensor], limits: list[int]) -> list[Draft]:
        head, begun = self.head, perf_counter()
        states = self.run(seqs, features)[:, None]  # [B, w, d]
        self.seconds += perf_counter() - begun
        self.forwards += 1
        lengths, rows = list(head.cache.lengths), torch.arange(len(seqs), device=head.device)[:, None]
        seen = torch.zeros(len(seqs), 1, 0, dtype=torch.bool, device=head.device)

        def law(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            nonlocal states, seen
            begun = perf_counter()
            if k:
                width = tokens.shape[1]
                own = torch.eye(width, dtype=torch.bool, device=head.device).expand(len(seqs), -1, -1)
                seen = torch.cat([seen[rows, at], own], -1)
                states = head.branch(states[rows, at], tokens, k - 1, seen)
                self.forwards += 1
            logits = head.logits(states.flatten(0, 1)).view(len(seqs), states.shape[1], -1)
            self.seconds += perf_counter() - begun
            return logits

        drafts = grow([seq.tokens[-1] for seq in seqs], law, head.hot, limits, self.width, self.nodes)
        head.crop(lengths)
        return drafts


class MedusaDrafter(HeadDrafter):
    """All places ahead at once, each without knowing the tokens of the others (arXiv 2401.10774)."""

    def draft(self, seqs: Sequence[Generation], features: list[Tensor], limits: list[int]) -> list[Draft]:
        head, begun = self.head, perf_counter()
        deep = min(self.depth, head.states)
        nothing = torch.zeros(head.width, dtype=head.dtype, device=head.device)
        last = torch.stack([own[-1] if len(own) else nothing for own in features])
        for row, own in enumerate(features):
            self.forget(row, max(len(own) - 1, 0))
        logits = head.logits(head.ahead(last, deep).flatten(0, 1)).view(len(seqs), deep, -1)
        self.seconds, self.forwards = perf_counter() - begun, 1
        return grow(
            [seq.tokens[-1] for seq in seqs],
            lambda k, tokens, at: logits[:, k, None].expand(-1, tokens.shape[1], -1),
            head.hot,
            [min(limit, deep) for limit in limits],
            self.width,
            self.nodes,
        )
