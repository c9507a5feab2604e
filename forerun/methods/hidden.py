"""What methods share that draft with a head over the target's hidden states."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from time import perf_counter
from typing import TYPE_CHECKING

from forerun.engine.costs import Costs
from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.methods.base import Parts, Sampling, at_least, true_or_false
from forerun.methods.later import torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.backends.heads import HiddenLM
    from forerun.engine.acceptance import Verdict
    from forerun.engine.sequence import Mode, Sequence
    from forerun.methods.beams import Logits
    from forerun.methods.budget import Budget

# Those of the embedded target, for where none were measured.
USUAL = Costs({1: 3.9, 8: 5.8, 32: 10.6}, {}, head={1: 0.4, 16: 0.8})
LEAST = 1e-30  # the smallest probability of a token


@dataclass(frozen=True)
class Heads(Sampling):
    """What methods with a head have in common: up to `depth` places ahead, `width` beams, the best `nodes` tokens of
    what they find; for a `width` of 1 a chain.

    With `sampled`, the tokens of chains of sampled sequences are drawn as the target's are. Otherwise they are the most
    probable ones.
    """

    depth: int = 8
    width: int = 1
    nodes: int = 12
    sampled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        true_or_false("sampled", self.sampled)
        for name in ("depth", "width", "nodes"):
            at_least(name, getattr(self, name), 1)
        if self.sampled and self.width > 1:
            raise ValueError(f"sampled is for chains: width must be 1, not {self.width}")
        if self.sampled and isinstance(self, Paced):
            # A token that was drawn and looked at must be sent.
            raise ValueError("this method takes drafted tokens back where they do not pay, so sampled must be false")

    @property
    def drawing(self) -> str | None:
        """How chains that were sampled are verified, None where all tokens are the most probable ones."""
        return self.verification if self.sampled else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Depth, width, and nodes at most."""
        return self.depth, self.width, self.nodes if self.width > 1 else self.depth

    def costs_for(self, parts: Parts) -> Callable[[Mode], Costs] | None:
        """The costs by mode that it chooses its drafts by, if any."""
        return None

    @property
    def steps(self) -> int:
        """How many states it makes before it asks whether to make more, where it asks."""
        return self.depth


class Paced(Heads):
    """What methods have in common that choose each step's depth and number of nodes by costs and calibration."""

    block: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("block", self.block, 1)

    @property
    def steps(self) -> int:
        return self.block

    @property
    def needs_costs(self) -> bool:
        return True

    def costs_for(self, parts: Parts) -> Callable[[Mode], Costs]:
        def costs(mode: Mode) -> Costs:
            known = parts.costs
            return known if known is not None and known.head else USUAL

        return costs


class HeadDrafter(Drafter):
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

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        head = self.head
        if hidden is None:
            hidden = torch.zeros(0, head.width, dtype=head.dtype, device=head.device)
        # The first draft runs the last feature, as its state is needed there.
        self.features[seq.id] = hidden[-1:].clone()
        tokens = seq.tokens[1:-1] if head.known else None
        yield from head.prefill(seq.id, hidden[:-1], tokens, chunk, seq.limit + self.depth * self.width)

    def drop(self, seq: Sequence) -> None:
        self.features.pop(seq.id, None)
        self.head.drop(seq.id)

    def run(self, seqs: list[Sequence]) -> Tensor:
        """Runs all features that wait; the head's states [B, d] behind the last ones."""
        features = [self.features[seq.id] for seq in seqs]
        tokens = None
        if self.head.known:  # the one behind each feature: the last feature's is the last token
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
        """A draft for each sequence, at most `limits[r]` deep. At least one limit is above 0."""
        raise NotImplementedError

    def guess(
        self,
        seqs: abc.Sequence[Sequence],
        limits: abc.Sequence[int],
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
        seqs: abc.Sequence[Sequence],
        logits: Logits,
        limits: abc.Sequence[int],
        budget: Budget | None = None,
        origins: abc.Sequence[str] = (),
    ) -> list[Draft]:
        """`beams.grow` with this drafter's settings, or chains that are sampled."""
        origins = origins or ["draft"] * len(seqs)
        from forerun.methods import beams

        if self.drawing is not None and not all(seq.greedy for seq in seqs):
            depths, block = [min(limit, self.nodes) for limit in limits], self.drawing == "block"
            return beams.sample_chains(seqs, logits, self.head.hot, self.head.vocab_size, depths, origins, block)
        roots = [seq.tokens[-1] for seq in seqs]
        return beams.grow(roots, logits, self.head.hot, limits, self.width, self.nodes, budget, origins)

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for seq, verdict, states in zip(seqs, verdicts, hidden, strict=True):
            path = verdict.path
            new = states[: len(path)] if path[-1] == len(path) - 1 else states[path]
            self.features[seq.id] = torch.cat([self.features[seq.id], new])
