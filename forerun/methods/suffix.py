"""Suffix drafting: what followed the longest stretch that the text ends with, where it occurred before.

The method is SuffixDecoding's (arXiv 2411.04975; Arctic Inference has an implementation). The length of a draft follows
from the length of the match, its tokens from counts, and of this text and earlier outputs the one with the higher score
is drafted from. What holds the counts is ours (`forerun.methods.automaton`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft, Tree
from forerun.engine.step import Drafter, Proposal
from forerun.methods.automaton import Automaton
from forerun.methods.base import Method, Parts, at_least, between, true_or_false

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.methods.pools import SuffixMemory

LONGEST = 64  # tokens that are looked up in earlier outputs
LEAD = 8  # of a prompt's last tokens that are kept with its output, so that its first tokens are found again
PART = 4096  # tokens of a prompt that are read at once: a few milliseconds


@dataclass(frozen=True)
class Suffix(Method):
    """Suffix drafting (arXiv 2411.04975): what followed the longest stretch that the text ends with, in the text itself
    or in earlier outputs.

    At most `factor` * match + `offset` tokens and at most `most`, the best `width` of each place (1: a chain), none
    whose path is less probable than `least` by its counts. Earlier outputs have up to `memory` tokens together, and are
    there where it is `warm`.

    The defaults are ours, for a CPU: there every token that is verified costs. Where it is free, longer drafts pay.
    """

    factor: float = 1.0
    offset: float = 0.0
    most: int = 16
    width: int = 1
    least: float = 0.3
    memory: int = 65536
    warm: bool = True
    name: ClassVar[str] = "suffix"

    def __post_init__(self) -> None:
        between("factor", self.factor, 0, 100)
        between("offset", self.offset, 0, 100)
        at_least("most", self.most, 1)
        at_least("width", self.width, 1)
        between("least", self.least, 0, 1)
        at_least("memory", self.memory, 1)
        true_or_false("warm", self.warm)

    @property
    def phrases(self) -> tuple[int, int]:
        """A memory: its texts have no fixed length, hence the 0."""
        return 0, self.memory

    def build(self, parts: Parts) -> Drafter:
        return self.suffixes(parts)

    def suffixes(self, parts: Parts) -> SuffixDrafter:
        kept = parts.memory(self.memory) if self.warm else None
        return SuffixDrafter(self.factor, self.offset, self.most, self.width, self.least, kept)


@dataclass
class _Text:
    """The suffixes of one text, as far as they are known."""

    automaton: Automaton = field(default_factory=Automaton)
    last: int = 0
    known: int = 0

    def learn(self, tokens: list[int], end: int) -> None:
        extend, last = self.automaton.extend, self.last
        for token in tokens[self.known : end]:
            last = extend(last, token)
        self.last, self.known = last, max(end, self.known)


class SuffixDrafter(Drafter):
    """Drafts at most `factor` * match + `offset` tokens behind a match, and at most `most`: the best `width` of each
    place, as a tree, none whose path is less probable than `least` by its counts. Drafts are point masses.

    With a `memory`, outputs go there when they end, and are drafted from, those of salted requests excepted.
    """

    def __init__(
        self,
        factor: float,
        offset: float,
        most: int,
        width: int,
        least: float,
        memory: SuffixMemory | None = None,
    ) -> None:
        self.factor, self.offset, self.most, self.width, self.least = factor, offset, most, width, least
        self.memory, self.spread = memory, most if width > 1 else 0
        self.rows: dict[int, _Text] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        row = self.rows[seq.id] = _Text()
        for end in range(PART, len(seq.tokens), PART):
            row.learn(seq.tokens, end)
            yield 0

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return Proposal([self.find(seq)[0] for seq in seqs])

    def drop(self, seq: Sequence) -> None:
        self.rows.pop(seq.id, None)
        is_output = seq.output and seq.finish_reason in ("stop", "length", "abort")
        if self.memory is not None and seq.shares and is_output:
            self.memory.add(seq.tokens[max(0, seq.prompt_length - LEAD) :])

    def find(self, seq: Sequence) -> tuple[Draft, float]:
        """A draft and its score: how many of its tokens are right, if counts are probabilities."""
        row, tokens = self.rows[seq.id], seq.tokens
        row.learn(tokens, len(tokens))
        state = row.automaton.links[row.last]
        best = self._grow(row.automaton, state, row.automaton.longest[state], seq)
        if self.memory is not None and seq.shares:
            with self.memory.lock:
                automaton = self.memory.automaton
                state, match = automaton.match(tokens[-LONGEST:])
                other = self._grow(automaton, state, match, seq)
                if other[2] > best[2]:
                    best = other
                    self.memory.use(state)
        found, parents, score = best
        return self._draft(seq, found, parents), score

    def _grow(self, automaton: Automaton, state: int, match: int, seq: Sequence) -> tuple[list[int], list[int], float]:
        """Tokens, parents and score of what followed a match of so many tokens."""
        nodes, depth = min(self.most, int(self.factor * match + self.offset)), seq.remaining - 1
        if not match or min(nodes, depth) < 1:
            return [], [], 0.0
        tokens, parents, chances = automaton.grow(state, nodes, depth, self.least, self.width, seq.eos)
        return tokens, parents, sum(chances)

    def _draft(self, seq: Sequence, tokens: list[int], parents: list[int]) -> Draft:
        root, sampler = seq.tokens[-1], seq.sampler
        if parents == list(range(len(parents))):
            return Draft.chain(root, sampler.fitting(seq.tokens, tokens), origin="lookup")
        draft = Draft([root, *tokens], [-1, *parents], origins=["lookup"] * (len(tokens) + 1))
        if not sampler.processors:
            return draft
        tree = Tree(Draft.root(root))
        for node, below in enumerate(draft.children):
            if not below:
                path = [draft.tokens[at] for at in draft.path(node)[1:]]
                tree.branch(0, sampler.fitting(seq.tokens, path), "lookup")
        return tree.draft()
