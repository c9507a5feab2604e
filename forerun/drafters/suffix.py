"""Suffix drafting: draft what followed earlier occurrences of the text's longest repeated suffix.

The method is SuffixDecoding (arXiv 2411.04975; Arctic Inference has an implementation). A draft's length follows from
the length of the match, and its tokens from counts. Of this text and earlier outputs, the one with the higher score is
used. The data structure is ours (`forerun.drafters.automaton`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from forerun.drafters.automaton import Automaton
from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.methods.suffix_settings import Suffix
from forerun.planning.cost_model import rounded

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.pools import SuffixMemory
    from forerun.engine.sequence import Sequence
    from forerun.planning.cost_model import Costs

LONGEST = 64  # the longest match in earlier outputs, in tokens
LEAD = 8  # last tokens of a prompt that are kept with its output, so that the output's beginning can match
SURE = 1.5  # counts promise more than comes true: of tokens that had to be 0.8 sure 0.68 to 0.83 were accepted
PART = 4096  # prompt tokens that are read at once, in a few milliseconds


@dataclass
class _Text:
    automaton: Automaton = field(default_factory=Automaton)
    last: int = 0
    known: int = 0

    def read(self, tokens: list[int], end: int) -> None:
        extend, last = self.automaton.extend, self.last
        for token in tokens[self.known : end]:
            last = extend(last, token)
        self.last, self.known = last, max(end, self.known)


class SuffixDrafter(Drafter):
    """Draft point masses by the settings of its method. Outputs are added to `memory` when they end."""

    def __init__(
        self, settings: Suffix, memory: SuffixMemory | None = None, costs: Costs | None = None
    ) -> None:
        """Build a drafter. With `costs`, tokens that are not worth their place in a batch are left out."""
        self.settings, self.memory = settings, memory

        def least(rows: int, context: int) -> float:
            worth = costs.at(context, rows).marginal(rows) if costs is not None else 0.0
            return max(settings.least, SURE * worth)

        self._least = lru_cache(least)
        self.rows: dict[int, _Text] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        row = self.rows[seq.id] = _Text()
        for end in range(PART, len(seq.tokens), PART):
            row.read(seq.tokens, end)
            yield 0

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return Proposal([self.find(seq, len(seqs))[0] for seq in seqs])

    def drop(self, seq: Sequence) -> None:
        self.rows.pop(seq.id, None)
        is_output = seq.output and seq.finish_reason in ("stop", "length", "abort")
        if self.memory is not None and seq.shares and is_output:
            self.memory.add(seq.tokens[max(0, seq.prompt_length - LEAD) :])

    def find(self, seq: Sequence, rows: int) -> tuple[Draft, float]:
        """Return a draft for a step of N rows, and its score: the expected number of accepted tokens by the counts."""
        row, tokens = self.rows[seq.id], seq.tokens
        least = self._least(rows, rounded(len(tokens)))
        row.read(tokens, len(tokens))
        state = row.automaton.links[row.last]
        best = self._grow(row.automaton, state, row.automaton.longest[state], least, seq)
        if self.memory is not None and seq.shares:
            with self.memory.lock:
                automaton = self.memory.automaton
                state, match = automaton.match(tokens[-LONGEST:])
                other = self._grow(automaton, state, match, least, seq)
                if other[1] > best[1]:
                    best = other
        found, score = best
        return Draft.chain(tokens[-1], seq.sampler.fitting(tokens, found), origin="lookup"), score

    def _grow(
        self, automaton: Automaton, state: int, match: int, least: float, seq: Sequence
    ) -> tuple[list[int], float]:
        asked = self.settings
        most = min(asked.most, int(asked.factor * match + asked.offset), seq.remaining - 1)
        tokens, probs = automaton.grow(state, most if match else 0, least, seq.eos)
        return tokens, sum(probs)
