"""A suffix automaton with counts: how often each substring of some texts occurs, and what follows it.

The automaton is that of Blumer et al. (1985), grown token by token. SuffixDecoding (arXiv 2411.04975) and Arctic
Inference keep a suffix tree of bounded depth. An automaton was chosen here for three reasons. It has at most two states
a token, while a tree has a node for every repeated substring unless its edges are compressed. It has the longest
repeated suffix without a search. And no depth limits a match or a draft. Counts are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

LINKS = 256  # the most states that are counted with each token, longest first: a periodic text has ever more of them


class Automaton:
    """The substrings of texts. Those that end at the same places are one state.

    Attributes:
        follows: of each state, {next token: state}.
        links: of each state, that of its longest suffix in another state (suffix link); -1 for the empty one, state 0.
        longest: the length of each state's longest substring.
        counts: the number of occurrences of each state.
        newest: the end of its last occurrence, counted over all tokens that were ever added.
        place: the number of these tokens.
    """

    def __init__(self) -> None:
        """Build an empty automaton."""
        self.follows: list[dict[int, int]] = [{}]
        self.links, self.longest, self.counts, self.newest = [-1], [0], [0], [0]
        self.place = 0

    def extend(self, last: int, token: int) -> int:
        """Add a text's next token. `last` is the state of the text before it, 0 for a new text. Return the state after
        it."""
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
                links[end] = (
                    found if longest[found] == longest[at] + 1 else self._split(at, token, found)
                )
        self.place += 1
        counts, newest, place, at, counted = self.counts, self.newest, self.place, end, 0
        while at > 0 and counted < LINKS:
            counts[at] += 1
            newest[at] = place
            at = links[at]
            counted += 1
        return end

    def _split(self, at: int, token: int, found: int) -> int:
        """Split off a state with the substrings of `found` that are no longer than the longest of `at` plus the
        token."""
        follows, links = self.follows, self.links
        own = self._new(dict(follows[found]), self.longest[at] + 1)
        links[own], self.counts[own], self.newest[own] = (
            links[found],
            self.counts[found],
            self.newest[found],
        )
        links[found] = own
        while at >= 0 and follows[at].get(token) == found:
            follows[at][token] = own
            at = links[at]
        return own

    def _new(self, follows: dict[int, int], length: int) -> int:
        self.follows.append(follows)
        self.longest.append(length)
        for each in (self.links, self.counts, self.newest):
            each.append(0)
        return len(self.longest) - 1

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """Return state and length of the longest suffix of `text` that occurs."""
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
        self, state: int, most: int, least: float, ends: Collection[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Return the most frequent continuation of a state, and the probability of each beginning of it.

        A token's probability is its share of the counts; of equal counts the newest wins. The continuation has at most
        `most` tokens, and a probability of at least `least`. Nothing follows one of the tokens `ends`. At the end of
        the texts the longest shorter suffix continues, so a period repeats.
        """
        follows, links, counts, newest = self.follows, self.links, self.counts, self.newest
        tokens: list[int] = []
        probs: list[float] = []
        at, probability = state, 1.0
        while len(tokens) < most and not (tokens and tokens[-1] in ends):
            while at > 0 and not follows[at]:
                at = links[at]
            if at <= 0:
                break
            after = follows[at]
            if len(after) == 1:
                ((token, at),) = after.items()
            else:
                count, _, token, at = max(
                    (counts[found], newest[found], token, found) for token, found in after.items()
                )
                probability *= count / sum(counts[found] for found in after.values())
                if probability < least:
                    break
            tokens.append(token)
            probs.append(probability)
        return tokens, probs
