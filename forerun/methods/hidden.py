"""What methods share that draft with a head over the target's hidden states."""

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
from forerun.methods.base import Sampling, flag, integer
from forerun.methods.later import beams, budget, torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.backends.heads import HiddenLM
    from forerun.engine.acceptance import Verdict
    from forerun.engine.sequence import Sequence

# Those of the embedded target, if none were measured.
USUAL = Costs({1: 3.9, 8: 5.8, 32: 10.6}, {}, head={1: 0.4, 16: 0.8})
LEAST = 1e-30  # the smallest probability of a token


@dataclass(frozen=True)
class Heads(Sampling):
    """Drafts up to `depth` places ahead with `width` beams, the best `nodes` tokens of what they find; for a `width` of
    1 a chain.

    Drafted tokens are the most probable ones. With `sampled`, chains of sampled sequences are sampled as the target's
    tokens are.
    """

    depth: int = integer(8)
    width: int = integer(1)
    nodes: int = integer(12)
    sampled: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampled and self.width > 1:
            raise ValueError(f"sampled is for chains: width must be 1, not {self.width}")


class Paced(Heads):
    """Chooses each step's depth and number of nodes, of which `depth` and `nodes` are limits, by costs and calibration
    (`Budget`). States are drafted in blocks of `block`."""

    block: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampled:  # a sampled token that was looked at must be sent
            raise ValueError("this method takes drafted tokens back where they do not pay, so sampled must be false")

    @property
    def needs_costs(self) -> bool:
        return True


class HeadDrafter(Drafter):
    """Drafts with a head by the settings of its method. Tokens that are not sampled are point masses.

    Attributes:
        features: of each sequence, by id, [n, d]: the target's features that the head has not run yet. The last one is
            at the position before the last token.
        seconds, forwards: of the head, in the present step.
    """

    wants_hidden = True

    def __init__(self, settings: Heads, head: HiddenLM, costs: Costs | None = None, beams: int = 1) -> None:
        """`costs`: those of paced methods. `beams`: states that the head makes at a depth."""
        self.head, self.depth, self.width = head, settings.depth, settings.width
        self.nodes = settings.nodes if settings.width > 1 else settings.depth
        self.is_sampling, self.block = settings.sampled, settings.verification == "block"
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
        # The first draft runs the last feature, as its state is needed there.
        self.features[seq.id] = hidden[-1:].clone()
        yield from head.prefill(seq.id, hidden[:-1], seq.tokens[1:-1], chunk, seq.limit + self.depth * self.width)

    def drop(self, seq: Sequence) -> None:
        self.features.pop(seq.id, None)
        self.head.drop(seq.id)

    def run(self, seqs: list[Sequence]) -> Tensor:
        """Run all features that wait; return the head's states [B, d] after the last ones."""
        features = [self.features[seq.id] for seq in seqs]
        # The one after each feature: the last feature's is the last token.
        tokens = [seq.tokens[len(seq.tokens) - len(own) :] for seq, own in zip(seqs, features, strict=True)]
        for seq, own in zip(seqs, features, strict=True):
            self.features[seq.id] = own[len(own) :]
        return self.head.extend([seq.id for seq in seqs], features, tokens)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        self.seconds, self.forwards = 0.0, 0
        # A sequence that began with a single token has no feature yet.
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
        """Return a chain for a sequence alone and its logits, state by state, without `grow`. None for several rows,
        beams and sampling, and if the head does not make chains alone."""
        if len(seqs) > 1 or self.width > 1 or (self.is_sampling and not seqs[0].greedy):
            return None
        seq, depth = seqs[0], min(limits[0], self.nodes)
        features, root = self.features[seq.id], seq.tokens[-1]
        if not self.head.guesses(seq.id, len(features), depth):
            return None
        after = seq.tokens[len(seq.tokens) - len(features) :]
        begun, tokens = perf_counter(), list[int]()
        while True:
            start = len(tokens)
            most = (depth if plan is None else min(plan.deep[0], depth)) - start
            found = self.head.guess(seq.id, features, after, most, start, old, weight)
            tokens += found.tokens
            if plan is None:
                break
            logs = [log(max(each, LEAST)) for each in found.chances]
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
        """`beams.grow` by this drafter's settings, or chains that are sampled."""
        origins = origins or ["draft"] * len(seqs)
        if self.is_sampling and not all(seq.greedy for seq in seqs):
            depths = [min(limit, self.nodes) for limit in limits]
            return beams.sample_chains(seqs, logits, self.head.hot, self.head.vocab_size, depths, origins, self.block)
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
