"""The common base of methods that draft with a head over the target's hidden states."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from time import perf_counter
from typing import TYPE_CHECKING

from forerun.engine.costs import Costs
from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.methods.base import Method, integer
from forerun.methods.later import beams, budget, torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.backends.heads import HiddenLM
    from forerun.engine.acceptance import Verdict
    from forerun.engine.sequence import Sequence

# Costs of the embedded target, if none were measured.
USUAL = Costs({1: 3.9, 8: 5.8, 32: 10.6}, {}, head={1: 0.4, 16: 0.8})
LEAST = 1e-30  # the smallest probability of a token


@dataclass(frozen=True)
class Heads(Method):
    """Draft up to `depth` places ahead with `width` beams: the best `nodes` tokens that they find, or a chain for a
    `width` of 1. Drafted tokens are the most probable ones, for sampled sequences too.
    """

    depth: int = integer(8)
    width: int = integer(1)
    nodes: int = integer(12)


class Paced(Heads):
    """Choose each step's depth and number of nodes by costs and calibration (`Budget`), with `depth` and `nodes` as
    limits. States are drafted in blocks of `block`."""

    block: int

    @property
    def needs_costs(self) -> bool:
        return True


class HeadDrafter(Drafter):
    """Draft point masses with a head by the settings of its method.

    Attributes:
        features: {sequence: [n, d]} the target's features that the head has not run yet. The last one is at the
            position before the last token.
        seconds, forwards: of the head in the present step.
    """

    def __init__(self, settings: Heads, head: HiddenLM, costs: Costs | None = None, beams: int = 1) -> None:
        """Take over a head. `costs`: for paced methods. `beams`: number of states that the head drafts at a depth."""
        self.head, self.depth, self.width = head, settings.depth, settings.width
        self.wants_hidden = head.capture
        self.nodes = settings.nodes if settings.width > 1 else settings.depth
        self.spread = self.nodes if self.width > 1 else 0
        self.features: dict[int, Tensor] = {}
        self.seconds, self.forwards = 0.0, 0
        self.budgets: budget.Budgets | None = None
        if isinstance(settings, Paced):
            known = costs if costs is not None and costs.head else USUAL
            self.budgets = budget.Budgets(head, known, settings.block, self.nodes, beams)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        head = self.head
        if hidden is None:
            hidden = torch.zeros(0, head.width, dtype=head.dtype, device=head.device)
        # The first draft runs the last feature, as it needs the state.
        self.features[seq.id] = hidden[-1:].clone()
        yield from head.prefill(seq.id, hidden[:-1], seq.tokens[1:-1], chunk, seq.limit + self.depth * self.width)

    def drop(self, seq: Sequence) -> None:
        self.features.pop(seq.id, None)
        self.head.drop(seq.id)

    def run(self, seqs: list[Sequence]) -> Tensor:
        """Run all features that the head has not run; return its states [B, d] after the last ones."""
        features = [self.features[seq.id] for seq in seqs]
        # The token after each feature.
        tokens = [seq.tokens[len(seq.tokens) - len(own) :] for seq, own in zip(seqs, features, strict=True)]
        for seq, own in zip(seqs, features, strict=True):
            self.features[seq.id] = own[len(own) :]
        return self.head.extend([seq.id for seq in seqs], features, tokens)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        self.seconds, self.forwards = 0.0, 0
        # A sequence of a single token has no feature yet.
        limits = [min(self.depth, seq.remaining - 1) if len(self.features[seq.id]) else 0 for seq in seqs]
        if max(limits) < 1:
            return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
        drafts = self.draft(seqs, limits)
        return Proposal(drafts, self.forwards, self.seconds)

    def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """Return a draft for each sequence, at most `limits[r]` deep. At least one limit is above 0."""
        raise NotImplementedError

    def chain_alone(
        self,
        seqs: abc.Sequence[Sequence],
        limits: abc.Sequence[int],
        plan: budget.Budget | None,
        old: Tensor | None = None,
        weight: float = 0.0,
    ) -> tuple[Draft, Tensor] | None:
        """Return a chain, drafted in C, and its logits. Return None for several rows or beams, and if the head does
        not run in C."""
        if len(seqs) > 1 or self.width > 1:
            return None
        seq, depth = seqs[0], min(limits[0], self.nodes)
        features, root = self.features[seq.id], seq.tokens[-1]
        if not self.head.can_draft(seq.id, len(features), depth):
            return None
        after = seq.tokens[len(seq.tokens) - len(features) :]
        begun, tokens = perf_counter(), list[int]()
        while True:
            start = len(tokens)
            most = (depth if plan is None else min(plan.deep[0], depth)) - start
            found = self.head.draft(seq.id, features, after, most, start, old, weight)
            tokens += found.tokens
            if plan is None:
                break
            logs = [log(max(each, LEAST)) for each in found.probabilities]
            if not plan.deeper_chains(start, [logs]) or len(tokens) == depth:
                tokens = tokens[: plan.sizes()[0]]
                break
        self.features[seq.id] = features[len(features) :]
        self.forwards += len(found.logits)
        self.seconds += perf_counter() - begun
        return Draft.chain(root, tokens, origin="draft"), found.logits

    def grow(
        self,
        seqs: abc.Sequence[Sequence],
        logits: beams.Logits,
        limits: abc.Sequence[int],
        plan: budget.Budget | None = None,
        origins: abc.Sequence[str] = (),
    ) -> list[Draft]:
        """Return drafts of `beams.grow` by this drafter's settings."""
        roots = [seq.tokens[-1] for seq in seqs]
        return beams.grow(roots, logits, self.head.hot, limits, self.width, self.nodes, plan, origins)

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for seq, verdict, states in zip(seqs, verdicts, hidden, strict=True):
            path = verdict.path
            new = states[: len(path)] if path[-1] == len(path) - 1 else states[path]
            self.features[seq.id] = torch.cat([self.features[seq.id], new])
