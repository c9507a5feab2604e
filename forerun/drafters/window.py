"""The lookahead window: guesses of the tokens to come that a model corrects a bit with every forward (lookahead
decoding, arXiv 2402.02057; Ouroboros, arXiv 2402.13720, has the draft model do it)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from forerun.draft import Tree


class Window:
    """`span` rows of `width` guesses; row k, column j (both from 0) stands j + k + 1 tokens behind the last one.

    Row 0 is a chain, and every column goes on below it: that is a tree, and needs no mask of its own. One forward
    answers with a token behind every column, which makes a phrase of `span` tokens under the column's first, and the
    newest row. Which guess moves where when several tokens are accepted at once is ours: each keeps its place in the
    text.
    """

    def __init__(self, width: int, span: int, text: Sequence[int], random: Random) -> None:
        self.width, self.random = width, random
        self.rows = [self._any(text, width) for _ in range(span)]
        self.nodes: list[int] = []  # of the last row, where they were last planted

    def _any(self, text: Sequence[int], count: int) -> list[int]:
        return [text[self.random.randrange(len(text))] for _ in range(count)]

    def plant(self, tree: Tree, at: int, depth: int) -> None:
        """Grows the window behind the node `at` of a tree, which may go `depth` tokens further there; leaves what does
        not fit."""
        self.nodes = []
        for column in range(min(self.width, depth - len(self.rows) + 1)):
            at = tree.add(at, self.rows[0][column], "window")
            node = at
            for row in self.rows[1:]:
                node = tree.add(node, row[column], "window")
            self.nodes.append(node)

    def harvest(self, best: Sequence[int], accepted: int, text: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Keys and phrases from the most likely token `best` behind every node; moves on by `accepted` tokens of the
        text, which ends with them."""
        if not self.nodes:
            return []
        newest = [best[node] for node in self.nodes]
        found = [
            (key, [*(row[column] for row in self.rows[1:]), newest[column]])
            for column, key in enumerate(self.rows[0][: len(newest)])
        ]
        newest += self._any(text, self.width - len(newest))
        self.rows = [*self.rows[1:], newest]
        skipped = min(accepted - 1, self.width)
        if skipped > 0:
            self.rows = [[*row[skipped:], *self._any(text, skipped)] for row in self.rows]
        return found
