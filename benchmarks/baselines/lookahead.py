"""Lookahead decoding (arXiv 2402.02057): the target's own forwards make and check phrases; there is no draft model."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from torch import Tensor

from forerun.drafters.pools import PhrasePool
from forerun.engine.draft import Draft, Tree
from forerun.engine.sequence import Sequence
from forerun.engine.step import Drafter, Proposal, RowOutcome
from forerun.methods import Method, Parts
from forerun.methods.base import integer


@dataclass(frozen=True)
class Lookahead(Method):
    """Lookahead decoding: the target makes phrases and checks them in its own forwards (arXiv 2402.02057)."""

    window: int = integer(4, 0)
    guesses: int = integer(4)
    ngram: int = integer(4, 2)
    warm: bool = True
    name: ClassVar[str] = "lookahead"

    @property
    def phrases(self) -> tuple[int, int]:
        return self.ngram - 1, self.guesses

    def build(self, parts: Parts) -> Drafter:
        pool = parts.pool(self.phrases) if self.warm else None
        return LookaheadDrafter(self.window, self.guesses, self.ngram - 1, pool)


class Window:
    """The lookahead window (arXiv 2402.02057): guesses of the tokens to come, which the model corrects in every
    forward.

    It has `span` rows of `width` guesses. Row k, column j (both from 0) is the token at j + k + 1 after the end of the
    text. Row 0 is a chain, and each column continues below it, so the window is a tree and needs no mask of its own.
    One forward gives a token after each column: this completes a phrase of `span` tokens after the column's first one,
    and makes the newest row. Ours: guesses keep their places when the text grows by several tokens, or shrinks.
    """

    def __init__(self, width: int, span: int, text: Tokens[int], random: Random) -> None:
        self.width, self.random, self.text = width, random, list(text)
        self.rows = [self._any(width) for _ in range(span)]
        self.end = len(text)  # of the text
        self.nodes: list[int] = []  # of the last row in the tree it was last added to

    def _any(self, count: int) -> list[int]:
        """Return random tokens of the prompt, to begin with."""
        return self.random.choices(self.text, k=count)

    def plant(self, tree: Tree, at: int, end: int, depth: int) -> None:
        """Add the window to a tree after the node `at`, the last of a text of `end` tokens. Leave out columns deeper
        than `depth`."""
        moved = max(-self.width, min(end - self.end, self.width))
        if moved:
            some = [self._any(abs(moved)) for _ in self.rows]
            pairs = zip(self.rows, some, strict=True)
            self.rows = [
                [*row[moved:], *any_] if moved > 0 else [*any_, *row[:moved]] for row, any_ in pairs
            ]
        self.end, self.nodes = end, []
        for column in range(min(self.width, depth - len(self.rows) + 1)):
            at = tree.add(at, self.rows[0][column], "window")
            node = at
            for row in self.rows[1:]:
                node = tree.add(node, row[column], "window")
            self.nodes.append(node)

    def harvest(self, argmax: Tokens[int]) -> list[tuple[int, list[int]]]:
        """Return (key, phrase) pairs from the argmax after every node, and move the window on by one token."""
        if not self.nodes:
            return []
        newest = [argmax[node] for node in self.nodes]
        found = [
            (key, [*(row[column] for row in self.rows[1:]), newest[column]])
            for column, key in enumerate(self.rows[0][: len(newest)])
        ]
        self.rows = [*self.rows[1:], newest + self._any(self.width - len(newest))]
        self.end, self.nodes = self.end + 1, []
        return found


@dataclass
class _Text:
    """What belongs to one sequence; its text is in the pool up to `learnt`."""

    pool: PhrasePool
    window: Window
    learnt: int


class LookaheadDrafter(Drafter):
    """Proposes what followed the last token before, up to `guesses` phrases of `span` tokens, and a window of `width`
    columns beside them. Drafts are point masses.

    As a draft, the window's first row may be accepted like any other (ours). With a `pool` the phrases of greedy
    sequences outlive them; every other sequence has a pool of its own.
    """

    def __init__(self, width: int, guesses: int, span: int, pool: PhrasePool | None = None) -> None:
        self.width, self.guesses, self.span, self.pool = width, guesses, span, pool
        self.spread = (width + guesses) * span
        self.rows: dict[int, _Text] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        pool = (
            self.pool
            if self.pool is not None and seq.greedy and seq.shares
            else PhrasePool(self.span, self.guesses)
        )
        window = Window(self.width, self.span, seq.tokens, Random(0))
        self.rows[seq.id] = _Text(pool, window, pool.learn(seq.tokens))
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts = []
        for seq in seqs:
            row, tree = self.rows[seq.id], Tree(Draft.root(seq.tokens[-1]))
            for phrase in row.pool.get(seq.tokens[-1], self.guesses):
                tree.branch(
                    0, seq.sampler.fitting(seq.tokens, phrase[: seq.remaining - 1]), "phrase"
                )
            row.window.plant(tree, 0, len(seq.tokens), seq.remaining - 1)
            drafts.append(tree.draft())
        return Proposal(drafts)

    def observe(self, outcomes: Tokens[RowOutcome], memo: Any) -> None:
        for outcome in outcomes:
            seq, verdict = outcome.sequence, outcome.verdict
            row = self.rows[seq.id]
            if verdict.argmax:  # a sequence whose processor raised has none
                for key, phrase in row.window.harvest(verdict.argmax):
                    row.pool.add(key, phrase)
            row.learnt = row.pool.learn(seq.tokens, row.learnt)

    def drop(self, seq: Sequence) -> None:
        self.rows.pop(seq.id, None)
