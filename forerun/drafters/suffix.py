"""Suffix drafting: draft what followed earlier occurrences of the text's longest repeated suffix.

The method is SuffixDecoding (arXiv 2411.04975; Arctic Inference has an implementation). A draft's
length follows from the length of the match, and its tokens from counts. Of this text and earlier
outputs, the one with the higher score is used. The data structure is ours
(`forerun.drafters.automaton`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forerun.drafters.automaton import Automaton
from forerun.engine.draft import Draft
from forerun.engine.step import Proposal
from forerun.methods.suffix import Suffix
from forerun.planning.forecast import PlannedDrafter, StepSituation
from forerun.planning.suffix_plan import SuffixPlanner

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.pools import SuffixMemory
    from forerun.engine.sequence import Sequence
    from forerun.engine.target import ChunkSize
    from forerun.planning.cost_model import CostSource

LONGEST_MATCH = 64  # in earlier outputs, in tokens
# The last tokens of a prompt, which are kept with its output so that the output's beginning can
# match.
LEAD = 8
PROMPT_PART = 4096  # prompt tokens that are read at once, in a few milliseconds


@dataclass
class _Text:
    """The automaton of a sequence's text.

    Attributes:
        last: the state of the whole text.
        known: the number of tokens that the automaton has.
    """

    automaton: Automaton = field(default_factory=Automaton)
    last: int = 0
    known: int = 0

    def read(self, tokens: list[int], end: int) -> None:
        """Add the tokens up to `end` that are not known yet."""
        extend = self.automaton.extend
        last = self.last
        for token in tokens[self.known : end]:
            last = extend(last, token)
        self.last = last
        self.known = max(end, self.known)


class SuffixDrafter(PlannedDrafter):
    """Draft point masses by the settings of its method. Outputs go into `memory` at their end."""

    def __init__(
        self, settings: Suffix, memory: SuffixMemory | None = None, costs: CostSource | None = None
    ) -> None:
        """Build a drafter. With `costs`, tokens not worth their place in a batch are left out."""
        self.settings = settings
        self.memory = memory
        self.rows: dict[int, _Text] = {}
        self.planner: SuffixPlanner | None = None
        if costs is not None:
            self.planner = SuffixPlanner(costs, settings.least)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterator[int]:
        """Read a prompt in parts, so that a long one does not hold up the next step.

        Outputs that ended since the last admission are read here too. No step waits for them.
        """
        if self.memory is not None:
            self.memory.read()
        row = self.rows[seq.id] = _Text()
        for end in range(PROMPT_PART, len(seq.tokens), PROMPT_PART):
            row.read(seq.tokens, end)
            yield 0

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a draft for each sequence."""
        return Proposal([self.find(seq, len(seqs))[0] for seq in seqs])

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence, and keep its output for later requests if it may be shared."""
        self.rows.pop(seq.id, None)
        is_output = seq.output and seq.finish_reason in ("stop", "length", "abort")
        if self.memory is not None and seq.shares and is_output:
            self.memory.add(seq.tokens[max(0, seq.prompt_length - LEAD) :])

    def find(self, seq: Sequence, rows: int) -> tuple[Draft, float]:
        """Return a draft for a step of N rows, and its score.

        The score is the expected number of accepted tokens by the counts.
        """
        row = self.rows[seq.id]
        tokens = seq.tokens
        least = self._least(seq.greedy, rows, len(tokens))
        if least > 1:  # no token is so probable, and reading the text takes time
            return Draft.root(tokens[-1]), 0.0
        row.read(tokens, len(tokens))
        # The link leads from the whole text to its longest suffix that has occurred before.
        state = row.automaton.links[row.last]
        match = row.automaton.longest[state]
        chain, score = self._grow(row.automaton, state, match, least, seq)
        if self.memory is not None and seq.shares:
            with self.memory.lock:
                automaton = self.memory.automaton
                state, match = automaton.match(tokens[-LONGEST_MATCH:])
                other_chain, other_score = self._grow(automaton, state, match, least, seq)
            if other_score > score:
                chain, score = other_chain, other_score
        return Draft.chain(tokens[-1], seq.sampler.fitting(tokens, chain), origin="lookup"), score

    def _least(self, greedy: bool, rows: int, context: int) -> float:
        """Return the least probability of a token that is drafted."""
        if self.planner is None:
            return self.settings.least
        return self.planner.least(StepSituation(rows, context, greedy))

    def _grow(
        self, automaton: Automaton, state: int, match: int, least: float, seq: Sequence
    ) -> tuple[list[int], float]:
        """Return the continuation of a matched state, and its score."""
        most = 0
        if match:
            by_match = int(self.settings.factor * match + self.settings.offset)
            most = min(self.settings.most, by_match, seq.remaining - 1)
        tokens, probabilities = automaton.grow(state, most, least, seq.eos)
        return tokens, sum(probabilities)
