"""Drafting with a head over the target's hidden states: what all such drafters share, and the two that Lyanna's is
compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import log
from time import perf_counter

import torch
from torch import Tensor

from forerun.costs import Costs
from forerun.draft import Draft
from forerun.drafters.beams import Logits, grow
from forerun.drafters.budget import Budget, Budgets
from forerun.drafters.sampled import sample_chains
from forerun.engine import Proposal
from forerun.generation import Generation, Mode
from forerun.runtime.heads import HiddenLM
from forerun.sampling import Verdict

LEAST = 1e-30  # the smallest probability of a token


class HeadDrafter:
    """Drafts at most `depth` places ahead with `width` beams, at most `nodes` tokens. These are point masses. With a
    `drawing`, "block" or "token", chains of sampled sequences are sampled, and verified in that way.

    Attributes:
        features: of each sequence, by id, [n, d]: the target's features that the head has not run yet. The last one is
            at the position before the last token.
        feature: which of the target's states these are.
        seconds, forwards: of the head, in the present step.
    """

    wants_hidden = True

    def __init__(self, head: HiddenLM, depth: int, width: int, nodes: int, drawing: str | None = None) -> None:
        assert drawing is None or width == 1
        self.head, self.depth, self.width, self.nodes, self.drawing = head, depth, width, nodes, drawing
        self.spread, self.feature = nodes if width > 1 else 0, head.feature
        self.features: dict[int, Tensor] = {}
        self.seconds, self.forwards = 0.0, 0

    def admit(self, seq: Generation, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        head = self.head
        if hidden is None:
            hidden = torch.zeros(0, head.width, dtype=head.dtype, device=head.device)
        # The first draft runs the last feature, as its state is needed there.
        self.features[seq.id] = hidden[-1:].clone()
        tokens = seq.tokens[1:-1] if head.known else None
        yield from head.prefill(seq.id, hidden[:-1], tokens, chunk, seq.limit + self.depth * self.width)

    def drop(self, seq: Generation) -> None:
        self.features.pop(seq.id, None)
        self.head.drop(seq.id)

    def run(self, seqs: list[Generation]) -> Tensor:
        """Runs all features that wait; the head's states [B, d] behind the last ones."""
        features = [self.features[seq.id] for seq in seqs]
        tokens = None
        if self.head.known:  # the one behind each feature: the last feature's is the last token
            tokens = [seq.tokens[len(seq.tokens) - len(own) :] for seq, own in zip(seqs, features, strict=True)]
        for seq, own in zip(seqs, features, strict=True):
            self.features[seq.id] = own[len(own) :]
        return self.head.extend([seq.id for seq in seqs], features, tokens)

    def propose(self, seqs: list[Generation]) -> Proposal:
        self.seconds, self.forwards = 0.0, 0
        # A sequence that began with a single token has no feature yet.
        limits = [min(self.depth, seq.room - 1) if len(self.features[seq.id]) else 0 for seq in seqs]
        if max(limits) < 1:
            return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
        drafts = self.draft(seqs, limits)
        return Proposal(drafts, self.forwards, self.seconds)

    def draft(self, seqs: list[Generation], limits: list[int]) -> list[Draft]:
        """A draft for each sequence, at most `limits[r]` deep. At least one limit is above 0."""
        raise NotImplementedError

    def guess(
        self,
        seqs: Sequence[Generation],
        limits: Sequence[int],
        budget: Budget | None,
        old: Tensor | None = None,
        weight: float = 0.0,
    ) -> tuple[Draft, Tensor] | None:
        """A chain for a sequence alone and its logits (`Guess`), where the head makes these in calls of C: one, or with
        a budget one a block. None where it does not."""
        if len(seqs) > 1 or self.width > 1 or (self.drawing is not None and not seqs[0].greedy):
            return None
        seq, depth = seqs[0], min(limits[0], self.nodes)
        features, root = self.features[seq.id], seq.tokens[-1]
        if not self.head.guesses(seq.id, len(features), depth):
            return None
        behind = seq.tokens[len(seq.tokens) - len(features) :] if self.head.known else None
        begun, tokens = perf_counter(), list[int]()
        while True:
            start = len(tokens)
            most = (depth if budget is None else min(budget.deep[0], depth)) - start
            found = self.head.guess(seq.id, features, behind, root, most, start, old, weight)
            tokens += found.tokens
            if budget is None:
                break
            chances = [log(max(chance, LEAST)) for chance in found.chances]
            if not budget.deeper_chains(start, [chances]) or len(tokens) == depth:
                tokens = tokens[: budget.sizes()[0]]
                break
        self.features[seq.id] = features[len(features) :]
        self.forwards += len(found.logits)
        self.seconds += perf_counter() - begun
        return Draft.chain(root, tokens, origin="draft"), found.logits

    def grow(
        self,
        seqs: Sequence[Generation],
        logits: Logits,
        limits: Sequence[int],
        budget: Budget | None = None,
        origins: Sequence[str] = (),
        quick: Callable[[Sequence[int], int], Tensor] | None = None,
    ) -> list[Draft]:
        """`beams.grow` with this drafter's settings, or chains that are sampled."""
        origins = origins or ["draft"] * len(seqs)
        if self.drawing is not None and not all(seq.greedy for seq in seqs):
            depths, block = [min(limit, self.nodes) for limit in limits], self.drawing == "block"
            return sample_chains(seqs, logits, self.head.hot, self.head.vocab_size, depths, origins, block)
        roots = [seq.tokens[-1] for seq in seqs]
        return grow(roots, logits, self.head.hot, limits, self.width, self.nodes, budget, origins, quick)

    def observe(
        self, seqs: list[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for seq, verdict, states in zip(seqs, verdicts, hidden, strict=True):
            path = verdict.path
            new = states[: len(path)] if path[-1] == len(path) - 1 else states[path]
            self.features[seq.id] = torch.cat([self.features[seq.id], new])


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
        super().__init__(head, depth, width, nodes, drawing)
        self.budgets = Budgets(head, costs_for, block, nodes, width) if costs_for is not None else None

    def draft(self, seqs: list[Generation], limits: list[int]) -> list[Draft]:
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

    def _grown(self, own: list[Generation], limits: list[int], budget: Budget | None) -> list[Draft]:
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


class MedusaDrafter(HeadDrafter):
    """All places ahead at once, each without knowing the tokens of the others (arXiv 2401.10774)."""

    def admit(self, seq: Generation, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        return super().admit(seq, hidden if hidden is None else hidden[-1:], chunk)

    def draft(self, seqs: list[Generation], limits: list[int]) -> list[Draft]:
        head, begun = self.head, perf_counter()
        deep = min(self.depth, head.states)
        nothing = torch.zeros(1, head.width, dtype=head.dtype, device=head.device)
        features = [self.features[seq.id] for seq in seqs]
        last = torch.cat([own if len(own) else nothing for own in features])
        found = head.logits(head.ahead(last, deep).flatten(0, 1)).view(len(seqs), deep, -1)
        self.seconds, self.forwards = perf_counter() - begun, 1
        return self.grow(
            seqs,
            lambda k, tokens, at: found[:, k, None].expand(-1, tokens.shape[1], -1),
            [min(limit, deep) for limit in limits],
        )

    def observe(
        self, seqs: list[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for seq, verdict, states in zip(seqs, verdicts, hidden, strict=True):
            self.features[seq.id] = states[verdict.path[-1]][None]
