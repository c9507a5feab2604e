"""Lookahead decoding (arXiv 2402.02057): the target's own forwards make and check phrases; there is no draft model."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.draft import Draft, Tree
from forerun.drafters.phrases import PhrasePool
from forerun.drafters.window import Window
from forerun.sampling import Verdict


class LookaheadDrafter:
    """Proposes what came behind the last token before, up to `guesses` phrases of `span` tokens, and a window of
    `width` columns beside them. Drafts are point masses.

    As a draft, the window's first row may be accepted like any other (ours).
    """

    wants_hidden = False

    def __init__(self, width: int, guesses: int, span: int, pool: PhrasePool | None = None) -> None:
        self.width, self.guesses, self.span, self.pool = width, guesses, span, pool

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self.pools = [PhrasePool(self.span, self.guesses) if self.pool is None else self.pool for _ in seqs]
        self.windows = [Window(self.width, self.span, seq.tokens, Random(0)) for seq in seqs]
        self.learnt = [pool.learn(seq.tokens) for pool, seq in zip(self.pools, seqs, strict=True)]

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        drafts = []
        for seq, pool, window in zip(seqs, self.pools, self.windows, strict=True):
            tree = Tree(Draft.root(seq.tokens[-1]))
            for phrase in pool.get(seq.tokens[-1], self.guesses):
                tree.branch(0, phrase[: seq.room - 1], "phrase")
            window.plant(tree, 0, len(seq.tokens), seq.room - 1)
            drafts.append(tree.draft())
        return Proposal(drafts)

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        for row, (seq, verdict) in enumerate(zip(seqs, verdicts, strict=True)):
            for key, phrase in self.windows[row].harvest(verdict.best):
                self.pools[row].add(key, phrase)
            self.learnt[row] = self.pools[row].learn(seq.tokens, self.learnt[row])

    def keep(self, rows: list[int]) -> None:
        self.pools = [self.pools[row] for row in rows]
        self.windows = [self.windows[row] for row in rows]
        self.learnt = [self.learnt[row] for row in rows]
