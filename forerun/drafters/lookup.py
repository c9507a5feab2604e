"""Prompt lookup: what followed the last few tokens when they stood here before.

The idea is A. Saxena's prompt-lookup decoding (2023); the index of all n-grams, kept up to date token by token,
is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.draft import Draft
from forerun.sampling import Verdict


class LookupDrafter:
    """Copies up to `gamma` tokens from behind the latest earlier occurrence of the longest matching n-gram.

    Drafts are point masses. No model runs, and a step without a match is a plain one.
    """

    wants_hidden = False

    def __init__(self, gamma: int, ngram: int) -> None:
        self.gamma, self.ngram = gamma, ngram

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in seqs]
        self._indexed = [0] * len(seqs)

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        return Proposal([self._draft(row, seq) for row, seq in enumerate(seqs)])

    def _draft(self, row: int, seq: Generation) -> Draft:
        tokens, ends = seq.tokens, self._ends[row]
        # N-grams that end before the last token; the one that ends with it is what is looked up.
        for end in range(self._indexed[row] + 1, len(tokens)):
            for n in range(1, min(self.ngram, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        self._indexed[row] = len(tokens) - 1
        depth = min(self.gamma, seq.room - 1)
        for n in range(min(self.ngram, len(tokens)), 0, -1):
            match = ends.get(tuple(tokens[-n:]))
            if match is not None:
                # Where the match is near, what follows it is a period: go on with it.
                period = len(tokens) - match
                copied = [tokens[match + i % period] for i in range(depth)]
                return Draft.chain(tokens[-1], copied, origin="lookup")
        return Draft.root(tokens[-1])

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        pass

    def keep(self, rows: list[int]) -> None:
        self._ends = [self._ends[row] for row in rows]
        self._indexed = [self._indexed[row] for row in rows]
