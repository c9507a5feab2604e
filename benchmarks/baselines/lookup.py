"""Prompt lookup: a draft of the tokens that followed the last few tokens before.

The idea is A. Saxena's prompt-lookup decoding (2023). The index of all n-grams, which is updated
token by token, is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from forerun.engine.draft import Draft
from forerun.engine.sequence import Sequence
from forerun.engine.step import Drafter, Proposal
from forerun.engine.target import ChunkSize
from forerun.methods import Method, Parts
from forerun.methods.base import integer


@dataclass(frozen=True)
class Lookup(Method):
    """Proposes up to `gamma` tokens that once followed the last `ngram` or fewer tokens."""

    gamma: int = integer(8)
    ngram: int = integer(3)
    name: ClassVar[str] = "lookup"

    def build(self, parts: Parts) -> Drafter:
        return LookupDrafter(self.gamma, self.ngram)


@dataclass
class _Index:
    """Where each n-gram of a text ended last, and how much of the text is indexed."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class LookupDrafter(Drafter):
    """Copies the tokens that followed the latest earlier occurrence of the longest n-gram.

    Drafts are point masses of up to `gamma` tokens. No model runs, and a step without a match is a
    plain one.
    """

    def __init__(self, gamma: int, ngram: int) -> None:
        self.gamma = gamma
        self.ngram = ngram
        self._indexes: dict[int, _Index] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterable[int]:
        self._indexes[seq.id] = _Index()
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return Proposal([self._draft(seq, self._indexes[seq.id]) for seq in seqs])

    def drop(self, seq: Sequence) -> None:
        self._indexes.pop(seq.id, None)

    def _draft(self, seq: Sequence, index: _Index) -> Draft:
        tokens = seq.tokens
        ends = index.ends
        # Index the n-grams that end before the last token, because the one that ends with it is
        # looked up.
        for end in range(index.indexed + 1, len(tokens)):
            for n in range(1, min(self.ngram, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        index.indexed = len(tokens) - 1
        depth = min(self.gamma, seq.remaining - 1)
        for n in range(min(self.ngram, len(tokens)), 0, -1):
            match = ends.get(tuple(tokens[-n:]))
            if match is not None:
                # A near match is followed by fewer tokens, which are repeated as a period.
                period = len(tokens) - match
                copied = [tokens[match + i % period] for i in range(depth)]
                return Draft.chain(tokens[-1], seq.sampler.fitting(tokens, copied), origin="lookup")
        return Draft.root(tokens[-1])
