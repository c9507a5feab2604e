"""A suffix automaton with counts: how often each stretch of some texts occurs, and what follows it.

The automaton is that of Blumer et al. (1985), grown token by token. SuffixDecoding (arXiv 2411.04975) and Arctic
Inference keep a tree of bounded depth, into which each token extends all suffixes that are active. An automaton was
chosen here for three reasons. It has at most two states a token, where a tree has a node for every repeated stretch of
every length, unless its edges are compressed. It knows the longest suffix that occurred before without a search. And it
has no depth at which a match, or a draft after one, must end. Counts, and texts that are taken out again, are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush, nlargest

LINKS = 256  # suffixes of a text, told apart by where they occur, that are counted with each token at most


class Automaton:
    """Stretches of texts as states. Those that end at the same places are one state.

    Attributes:
        follows: of each state, the state after each token that may come next.
        links: of each state, that of its longest suffix which occurs elsewhere too; -1 for the empty one, state 0.
        longest: the length of each state's longest stretch.
        counts: how often each state occurs.
        newest: the place where it occurred last, counted over all texts that ever were put in.
        place: the number of their tokens.
        counted: the number of states that were counted with the last token.
    """

    def __init__(self, links: int | None = LINKS) -> None:
        """`links`: states that are counted with a token at most, the longest first. A text that goes round in circles
        has more and more of them. None for all, so that texts may be taken out."""
        self.follows: list[dict[int, int]] = [{}]
        self.links, self.longest, self.counts, self.newest = [-1], [0], [0], [0]
        self.most, self.place, self.counted = links, 0, 0
        self._free: list[int] = []

    def extend(self, last: int, token: int) -> int:
        """Put in a text's next token. `last`: the state of the text before it, 0 for a new text. Return that of the
        text with it."""
        follows, links, longest = self.follows, self.links, self.longest
        found = follows[last].get(token)
        if found is not None:
            end = found if longest[found] == longest[last] + 1 else self._split(last, token, found)
        else:
            end, at = self._new({}, longest[last] + 1), last
            while at >= 0 and token not in follows[at]:
                follows[at][token] = end
                at = links[at]
            if at < 0:
                links[end] = 0
            else:
                found = follows[at][token]
                links[end] = found if longest[found] == longest[at] + 1 else self._split(at, token, found)
        self.place += 1
        counts, newest, place, at, counted = self.counts, self.newest, self.place, end, 0
        while at > 0 and counted != self.most:
            counts[at] += 1
            newest[at] = place
            at = links[at]
            counted += 1
        self.counted = counted
        return end

    def remove(self, text: Sequence[int]) -> None:
        """Take out a text that was put in, if all states are counted."""
        follows, links, counts = self.follows, self.links, self.counts
        states = [0]
        for token in text:
            states.append(follows[states[-1]][token])
        for at in states:
            while at > 0:
                counts[at] -= 1
                at = links[at]
        gone = set()
        for at, token in zip(states, text, strict=False):
            while at >= 0:
                found = follows[at].get(token)
                if found is not None:
                    if counts[found]:  # and so are those of shorter suffixes
                        break
                    del follows[at][token]
                    gone.add(found)
                at = links[at]
        for state in gone:
            follows[state] = {}
        self._free += gone

    def _split(self, at: int, token: int, found: int) -> int:
        """Make a state of those stretches of `found` that are no longer than that of `at` and the token."""
        follows, links = self.follows, self.links
        own = self._new(dict(follows[found]), self.longest[at] + 1)
        links[own], self.counts[own], self.newest[own] = links[found], self.counts[found], self.newest[found]
        links[found] = own
        while at >= 0 and follows[at].get(token) == found:
            follows[at][token] = own
            at = links[at]
        return own

    def _new(self, follows: dict[int, int], length: int) -> int:
        if self._free:
            state = self._free.pop()
            self.follows[state], self.longest[state], self.counts[state] = follows, length, 0
            return state
        self.follows.append(follows)
        self.longest.append(length)
        for each in (self.links, self.counts, self.newest):
            each.append(0)
        return len(self.longest) - 1

    @property
    def size(self) -> int:
        """Number of states in use."""
        return len(self.links) - len(self._free)

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """Return state and length of the longest suffix of a text that occurs."""
        follows, links, longest = self.follows, self.links, self.longest
        state = length = 0
        for token in text:
            while state > 0 and token not in follows[state]:
                state = links[state]
                length = longest[state]
            found = follows[state].get(token)
            if found is not None:
                state, length = found, length + 1
        return state, length

    def grow(
        self, state: int, nodes: int, depth: int, least: float, width: int = 1, ends: Collection[int] = ()
    ) -> tuple[list[int], list[int], list[float]]:
        """Return the most probable continuations of a state's stretches, as a tree: its tokens, their parents (0: the
        stretch itself, k: the k-th token), and the probabilities of the paths to them, best first.

        A token's probability is its share of what followed; of tokens with equal counts the newest is better. At most
        `nodes` tokens, `depth` deep, none whose path is less probable than `least`, and of each place the best `width`.
        Nothing comes after one of the tokens `ends`. Where the texts end, what followed the longest shorter suffix goes
        on: a period repeats.
        """
        follows, links, counts, newest = self.follows, self.links, self.counts, self.newest
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        heap: list[tuple[float, int, int, int, int, int]] = []
        node, at, probability, level = 0, state, 1.0, 0
        while len(tokens) < nodes:
            if level < depth and not (tokens and tokens[-1] in ends):
                while at > 0 and not follows[at]:
                    at = links[at]
                if at > 0:
                    after = follows[at]
                    if len(after) == 1:
                        ((token, found),) = after.items()
                        heappush(heap, (-probability, level, -newest[found], node, token, found))
                    else:
                        total = sum(counts[found] for found in after.values())
                        each = ((counts[found], newest[found], token, found) for token, found in after.items())
                        for count, place, token, found in nlargest(width, each) if width > 1 else (max(each),):
                            if probability * count >= least * total:
                                heappush(heap, (-probability * count / total, level, -place, node, token, found))
            if not heap:
                break
            cost, level, _, parent, token, at = heappop(heap)
            probability, level = -cost, level + 1
            tokens.append(token)
            parents.append(parent)
            probs.append(probability)
            node = len(tokens)
        return tokens, parents, probs
