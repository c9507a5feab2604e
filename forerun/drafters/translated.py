"""Drafting with a model of another tokenizer by shared tokens (TLI; Timor et al., arXiv 2502.05202).

Drafts are sampled from the draft's distribution at the tokens that both have. The acceptance rule gets the same
distribution, so the target's is kept: what the draft misreads can cost acceptance, and nothing else.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import torch
from torch import Tensor

from forerun.drafters.model_chain import Chain, ChainDrafter
from forerun.engine.sequence import Sequence
from forerun.model.causal_lm import CausalLM
from forerun.model.prefix_store import common
from forerun.planning.cost_model import Costs
from forerun.planning.stop_rules import LengthPolicy, StopRule
from forerun.text.vocabularies import Translation


class Reader:
    """The committed tokens of a sequence, translated to the draft's tokens, one by one.

    Attributes:
        tokens: the draft's tokens for all that was read.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.tokens: list[int] = list(translation.draft.front)
        self._own: list[int] = []  # the target's tokens that were read
        self._ends = [
            len(self.tokens)
        ]  # the number of ours for the first i of them; -1 within a character

    def read(self, tokens: abc.Sequence[int]) -> bool:
        """Read the target's tokens, in place of those that differ from what was read. Return False if they end in half
        a character that the draft has no tokens for; then that half is not read."""
        count = len(self._own)
        if list(tokens[:count]) != self._own:
            count = common(self._own, tokens)
        while self._ends[count] < 0:
            count -= 1
        del self._own[count:], self._ends[count + 1 :]
        del self.tokens[self._ends[count] :]
        while (here := len(self._own)) < len(tokens):
            stop, found = self._next(tokens, here)
            if found is None:
                return False
            self.tokens += found
            self._own += tokens[here:stop]
            self._ends += [*[-1] * (stop - here - 1), len(self.tokens)]
        return True

    def _next(self, tokens: abc.Sequence[int], here: int) -> tuple[int, list[int] | None]:
        """Return the end of the next whole characters, and the draft's tokens for them; None for half a character."""
        target, draft = self.translation.target, self.translation.draft
        one = self.translation.reads.get(tokens[here])
        if one is not None or not target.of(tokens[here]):
            begins = here == 0 and draft.front[-1:] == [one]  # the draft has put it there itself
            return here + 1, [] if one is None or begins else [one]
        stop, found, text = here, None, b""
        while found is None and stop < len(tokens) and (own := target.of(tokens[stop])):
            stop, text = stop + 1, text + own
            found = self.translation.read(text)
        if found is None and stop < len(tokens):  # that character will never be whole
            found = draft.encode(text.decode("utf-8", "replace"))
        return stop, found


class TranslatedDrafter(ChainDrafter):
    """A chain drafter whose model reads sequences in its own tokens, and drafts the tokens that both have.

    Everything that a sequence asks of its tokens, and a length policy, sees the draft's distribution at these.
    """

    def __init__(
        self,
        translation: Translation,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int,
        costs: Costs | None = None,
    ) -> None:
        super().__init__(model, policy, vocab_size, costs)
        self.translation = translation
        self._readers: dict[int, Reader] = {}
        self._held: dict[int, list[int]] = {}  # what each row of the model has run
        known = sorted(translation.shared.items())
        self._ids = {
            ours: theirs
            for ours, theirs in known
            if ours < vocab_size and theirs < model.vocab_size
        }
        self._ours = torch.tensor([*self._ids], device=model.device)
        self._theirs = torch.tensor([*self._ids.values()], device=model.device)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        reader = self._readers[seq.id] = Reader(self.translation)
        reader.read(seq.tokens)
        yield from super().admit(seq, hidden, chunk)
        self._held[seq.id] = reader.tokens[:-1]

    def drop(self, seq: Sequence) -> None:
        super().drop(seq)
        self._readers.pop(seq.id, None)
        self._held.pop(seq.id, None)

    def _text(self, seq: Sequence) -> list[int]:
        return self._readers[seq.id].tokens

    def _knows(self, tokens: abc.Sequence[int]) -> bool:
        return max(tokens, default=0) < self.model.vocab_size

    def _depth(self, seq: Sequence) -> int:
        if seq.id not in self.model or not self._settle(seq) or not self._knows(self._text(seq)):
            return 0
        context = self.model.context
        return min(
            seq.remaining - 1, context - len(self._text(seq)) + 1 if context else seq.remaining
        )

    def _settle(self, seq: Sequence) -> bool:
        """Read what the target has committed, and keep as much of the model's row as is still right, but not the last
        token, which is to be run. Return whether there is anything to draft after."""
        reader, held = self._readers[seq.id], self._held[seq.id]
        is_read = reader.read(seq.tokens)
        right = len(held) if reader.tokens[: len(held)] == held else common(held, reader.tokens)
        right = min(right, max(0, len(reader.tokens) - 1))
        if right < len(held):
            self.model.crop([seq.id], [right])
            del held[right:]
        return is_read and bool(reader.tokens)

    def _crop(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq.id in self._open:
                self._settle(seq)
                self._open.discard(seq.id)

    def _pending(self, chain: Chain) -> list[int]:
        text, length = self._text(chain.seq), len(self._held[chain.seq.id])
        return [
            *text[length:],
            *(self._ids[token] for token in chain.tokens[max(0, length - len(text)) :]),
        ]

    def _at_once(self, chain: Chain, rule: StopRule) -> None:
        """Return None: the model's tokens are not those that are drafted."""

    def _goes_on(self, chain: Chain) -> bool:
        token = chain.tokens[-1]  # a processor may have forced one that the draft lacks
        return len(chain.tokens) < chain.depth and token not in chain.seq.eos and token in self._ids

    def _logits(self, ids: abc.Sequence[int], pending: abc.Sequence[abc.Sequence[int]]) -> Tensor:
        found = torch.stack([own[-1] for own in self.model.extend(ids, pending)])
        for id, tokens in zip(ids, pending, strict=True):
            self._held[id] += tokens
        logits = found.new_full((len(ids), self.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._ours, found[:, self._theirs])
