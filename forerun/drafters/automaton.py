"""A suffix automaton with counts: how often each substring of some texts occurs, and what follows.

The automaton is that of Blumer et al. (1985), grown token by token. SuffixDecoding (arXiv
2411.04975) and Arctic Inference keep a suffix tree of bounded depth. An automaton was chosen here
for three reasons. It has at most two states per token, while a tree has a node for every repeated
substring unless its edges are compressed. It has the longest repeated suffix without a search. And
no depth limits a match or a draft. Counts are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# The most states that are counted with each token, longest first. A limit is needed because a
# periodic text has ever more of them.
LINKS = 256


class Automaton:
    """The substrings of texts. Substrings that end at the same places share a state.

    Attributes:
        follows: of each state, {next token: state}.
        links: of each state, that of its longest suffix in another state (suffix link). The empty
            state, 0, has -1.
        longest: the length of each state's longest substring.
        counts: the number of occurrences of each state.
        newest: the end of each state's last occurrence, counted over all tokens that were ever
            added.
        place: the number of these tokens.
    """

    def __init__(self) -> None:
        """Build an empty automaton."""
        self.follows: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.longest = [0]
        self.counts = [0]
        self.newest = [0]
        self.place = 0

    def extend(self, last: int, token: int) -> int:
        """Add a text's next token, and return the state after it.

        `last` is the state of the text before the token, 0 for a new text.
        """
        follows = self.follows
        links = self.links
        longest = self.longest
        end = follows[last].get(token, -1)
        if end < 0:
            end = self._new({}, longest[last] + 1)
            at = last
            while at >= 0 and token not in follows[at]:
                follows[at][token] = end
                at = links[at]
            if at < 0:
                links[end] = 0
            else:
                suffix = follows[at][token]
                is_whole = longest[suffix] == longest[at] + 1
                links[end] = suffix if is_whole else self._split(at, token, suffix)
        elif longest[end] != longest[last] + 1:
            end = self._split(last, token, end)
        self.place += 1
        counts = self.counts
        newest = self.newest
        place = self.place
        at = end
        counted = 0
        while at > 0 and counted < LINKS:
            counts[at] += 1
            newest[at] = place
            at = links[at]
            counted += 1
        return end

    def _split(self, at: int, token: int, state: int) -> int:
        """Split off the shorter substrings of a state, and return the new state that has them.

        They are those that are no longer than the longest of `at` plus the token.
        """
        follows = self.follows
        links = self.links
        part = self._new(dict(follows[state]), self.longest[at] + 1)
        links[part] = links[state]
        self.counts[part] = self.counts[state]
        self.newest[part] = self.newest[state]
        links[state] = part
        while at >= 0 and follows[at].get(token) == state:
            follows[at][token] = part
            at = links[at]
        return part

    def _new(self, follows: dict[int, int], length: int) -> int:
        self.follows.append(follows)
        self.longest.append(length)
        for values in (self.links, self.counts, self.newest):
            values.append(0)
        return len(self.longest) - 1

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """Return state and length of the longest suffix of `text` that occurs."""
        follows = self.follows
        links = self.links
        longest = self.longest
        state = length = 0
        for token in text:
            while state > 0 and token not in follows[state]:
                state = links[state]
                length = longest[state]
            after = follows[state].get(token)
            if after is not None:
                state = after
                length += 1
        return state, length

    def grow(
        self, state: int, most: int, least: float, ends: Collection[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Return a state's most frequent continuation, and the probability of each beginning of it.

        A token's probability is its share of the counts; of equal counts the newest wins. The
        continuation has at most `most` tokens, and a probability of at least `least`. Nothing
        follows one of the tokens `ends`. At the end of the texts the longest shorter suffix
        continues, so a period repeats.
        """
        follows = self.follows
        links = self.links
        tokens: list[int] = []
        probabilities: list[float] = []
        at = state
        probability = 1.0
        while len(tokens) < most and not (tokens and tokens[-1] in ends):
            while at > 0 and not follows[at]:
                at = links[at]
            if at <= 0:
                break
            after = follows[at]
            if len(after) == 1:
                ((token, at),) = after.items()
            else:
                token, at, share = self._most_frequent(after)
                probability *= share
                if probability < least:
                    break
            tokens.append(token)
            probabilities.append(probability)
        return tokens, probabilities

    def _most_frequent(self, after: dict[int, int]) -> tuple[int, int, float]:
        """Return the most frequent of {token: state}, and its share of the counts."""
        counts = self.counts
        newest = self.newest
        count, _, token, state = max(
            (counts[state], newest[state], token, state) for token, state in after.items()
        )
        return token, state, count / sum(counts[state] for state in after.values())
