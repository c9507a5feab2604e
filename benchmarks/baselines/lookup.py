"""Prompt lookup: what followed the last few tokens when they occurred before.

The idea is A. Saxena's prompt-lookup decoding (2023); the index of all n-grams, updated token by token, is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from forerun.engine.draft import Draft
from forerun.engine.sequence import Sequence
from forerun.engine.step import Drafter, Proposal
from forerun.methods import Method, Parts
from forerun.methods.base import integer


@dataclass(frozen=True)
class Lookup(Method):
    """Prompt lookup: proposes up to `gamma` tokens that once followed the last `ngram` or fewer tokens."""

    gamma: int = integer(8)
    ngram: int = integer(3)
    name: ClassVar[str] = "lookup"

    def build(self, parts: Parts) -> Drafter:
        return LookupDrafter(self.gamma, self.ngram)


@dataclass
class _Index:
    """The n-grams of a text: where each ended last, and how much of the text is in."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class LookupDrafter(Drafter):
    """Copies up to `gamma` tokens that followed the latest earlier occurrence of the longest matching n-gram.

    Drafts are point masses. No model runs, and a step without a match is a plain one.
    """

    def __init__(self, gamma: int, ngram: int) -> None:
        self.gamma, self.ngram = gamma, ngram
        self._of: dict[int, _Index] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        self._of[seq.id] = _Index()
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return Proposal([self._draft(seq, self._of[seq.id]) for seq in seqs])

    def drop(self, seq: Sequence) -> None:
        self._of.pop(seq.id, None)

    def _draft(self, seq: Sequence, index: _Index) -> Draft:
        tokens, ends = seq.tokens, index.ends
        # N-grams that end before the last token; the one that ends with it is what is looked up.
        for end in range(index.indexed + 1, len(tokens)):
            for n in range(1, min(self.ngram, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        index.indexed = len(tokens) - 1
        depth = min(self.gamma, seq.remaining - 1)
        for n in range(min(self.ngram, len(tokens)), 0, -1):
            match = ends.get(tuple(tokens[-n:]))
            if match is not None:
                # Where the match is near, what follows it is a period: go on with it.
                period = len(tokens) - match
                copied = [tokens[match + i % period] for i in range(depth)]
                return Draft.chain(tokens[-1], seq.sampler.fitting(tokens, copied), origin="lookup")
        return Draft.root(tokens[-1])
