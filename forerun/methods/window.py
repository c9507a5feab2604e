"""The lookahead window: guesses of the tokens to come that a model corrects a bit with every forward (lookahead
decoding, arXiv 2402.02057; Ouroboros, arXiv 2402.13720, has the draft model do it)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from forerun.engine.draft import Tree


class Window:
    """`span` rows of `width` guesses; row k, column j (both from 0) stands j + k + 1 tokens behind the end of a text.

    Row 0 is a chain, and every column goes on below it. That is a tree, and needs no mask of its own. One forward gives
    a token behind every column. It makes a phrase of `span` tokens under the column's first, and the newest row. Ours:
    guesses keep their places when the text grows by several tokens, or shrinks.
    """

    def __init__(self, width: int, span: int, text: Sequence[int], random: Random) -> None:
        self.width, self.random, self.text = width, random, list(text)
        self.rows = [self._any(width) for _ in range(span)]
        self.end = len(text)  # of the text
        self.nodes: list[int] = []  # of the last row, where it was last planted

    def _any(self, count: int) -> list[int]:
        """Tokens to begin with: some of the prompt."""
        return self.random.choices(self.text, k=count)

    def plant(self, tree: Tree, at: int, end: int, depth: int) -> None:
        """Grows the window behind the node `at` of a tree, with which a text of `end` tokens ends, at most `depth`
        tokens deep; leaves the columns that do not fit."""
        moved = max(-self.width, min(end - self.end, self.width))
        if moved:
            some = [self._any(abs(moved)) for _ in self.rows]
            pairs = zip(self.rows, some, strict=True)
            self.rows = [[*row[moved:], *any_] if moved > 0 else [*any_, *row[:moved]] for row, any_ in pairs]
        self.end, self.nodes = end, []
        for column in range(min(self.width, depth - len(self.rows) + 1)):
            at = tree.add(at, self.rows[0][column], "window")
            node = at
            for row in self.rows[1:]:
                node = tree.add(node, row[column], "window")
            self.nodes.append(node)

    def harvest(self, argmax: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Keys and phrases from the most probable token behind every node; the window then stands one token further
        on."""
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
