"""Lookahead decoding (arXiv 2402.02057).

The target's own forwards make phrases and check them, so there is no draft model.
"""

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
from forerun.engine.target import ChunkSize
from forerun.methods import Method, Parts
from forerun.methods.base import integer


@dataclass(frozen=True)
class Lookahead(Method):
    """Lookahead decoding: the target makes and checks phrases in its own forwards."""

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
    """The lookahead window: guesses of the next tokens, which the model corrects in every forward.

    It has `span` rows of `width` guesses. Row k, column j (both from 0) is the token at j + k + 1
    after the end of the text. Row 0 is a chain, and each column continues below it, so the window
    is a tree and needs no mask. One forward gives a token after each column: it completes a phrase
    of `span` tokens after the column's first one, and makes the newest row. Ours: guesses keep
    their places when the text grows by several tokens, or shrinks.

    Attributes:
        end: the length of the text.
        nodes: the nodes of the last row, in the tree to which the window was last added.
    """

    def __init__(self, width: int, span: int, text: Tokens[int], random: Random) -> None:
        self.width = width
        self.random = random
        self.text = list(text)
        self.rows = [self._any(width) for _ in range(span)]
        self.end = len(text)
        self.nodes: list[int] = []

    def _any(self, count: int) -> list[int]:
        """Return random tokens of the prompt, which are the first guesses."""
        return self.random.choices(self.text, k=count)

    def plant(self, tree: Tree, at: int, end: int, depth: int) -> None:
        """Add the window to a tree after the node `at`, the last of a text of `end` tokens.

        Columns deeper than `depth` are left out.
        """
        self._move(max(-self.width, min(end - self.end, self.width)))
        self.end = end
        self.nodes = []
        for column in range(min(self.width, depth - len(self.rows) + 1)):
            at = tree.add(at, self.rows[0][column], "window")
            node = at
            for row in self.rows[1:]:
                node = tree.add(node, row[column], "window")
            self.nodes.append(node)

    def _move(self, places: int) -> None:
        """Move the window by so many places; a negative number moves it back."""
        if not places:
            return
        fresh = [self._any(abs(places)) for _ in self.rows]
        for number, (row, guesses) in enumerate(zip(self.rows, fresh, strict=True)):
            if places > 0:
                self.rows[number] = [*row[places:], *guesses]
            else:
                self.rows[number] = [*guesses, *row[:places]]

    def harvest(self, argmax: Tokens[int]) -> list[tuple[int, list[int]]]:
        """Return (key, phrase) pairs from the argmax after every node, and move on by one token."""
        if not self.nodes:
            return []
        newest = [argmax[node] for node in self.nodes]
        phrases = []
        for column, key in enumerate(self.rows[0][: len(newest)]):
            middle = [row[column] for row in self.rows[1:]]
            phrases.append((key, [*middle, newest[column]]))
        self.rows = [*self.rows[1:], newest + self._any(self.width - len(newest))]
        self.end += 1
        self.nodes = []
        return phrases


@dataclass
class _Text:
    """The pool and the window of one sequence, whose text is in the pool up to `learnt`."""

    pool: PhrasePool
    window: Window
    learnt: int


class LookaheadDrafter(Drafter):
    """Proposes phrases that followed the last token before, and a window beside them.

    There are up to `guesses` phrases of `span` tokens, and `width` columns of the window. Drafts
    are point masses. Ours: the window's first row may be accepted as any other draft. With a `pool`
    the phrases of greedy sequences outlive them; every other sequence has its own pool.
    """

    def __init__(self, width: int, guesses: int, span: int, pool: PhrasePool | None = None) -> None:
        self.width = width
        self.guesses = guesses
        self.span = span
        self.pool = pool
        self.extra_nodes = (width + guesses) * span
        self.rows: dict[int, _Text] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterable[int]:
        if self.pool is not None and seq.greedy and seq.shares:
            pool = self.pool
        else:
            pool = PhrasePool(self.span, self.guesses)
        window = Window(self.width, self.span, seq.tokens, Random(0))
        self.rows[seq.id] = _Text(pool, window, pool.learn(seq.tokens))
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts = []
        for seq in seqs:
            row = self.rows[seq.id]
            tree = Tree(Draft.root(seq.tokens[-1]))
            for phrase in row.pool.get(seq.tokens[-1], self.guesses):
                tokens = seq.sampler.fitting(seq.tokens, phrase[: seq.remaining - 1])
                tree.branch(0, tokens, "phrase")
            row.window.plant(tree, 0, len(seq.tokens), seq.remaining - 1)
            drafts.append(tree.draft())
        return Proposal(drafts)

    def observe(self, outcomes: Tokens[RowOutcome], memo: Any) -> None:
        for outcome in outcomes:
            seq = outcome.sequence
            row = self.rows[seq.id]
            # A sequence whose processor raised has no argmax.
            if outcome.verdict.argmax:
                for key, phrase in row.window.harvest(outcome.verdict.argmax):
                    row.pool.add(key, phrase)
            row.learnt = row.pool.learn(seq.tokens, row.learnt)

    def drop(self, seq: Sequence) -> None:
        self.rows.pop(seq.id, None)
