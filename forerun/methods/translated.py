"""Drafting with a model of another tokenizer by shared tokens (TLI; Timor et al., arXiv 2502.05202).

Drafts are sampled from the draft's distribution at the tokens that both have. The acceptance rule gets the same
distribution, so the target's is kept: what the draft misreads can cost acceptance, and nothing else.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from forerun.engine.sequence import Sequence
from forerun.methods.chain import Chain, ChainDrafter
from forerun.methods.stop import LengthPolicy, StopRule
from forerun.model.causal_lm import CausalLM
from forerun.model.prefix_store import common
from forerun.text.vocabularies import REACH, Translation


class Reader:
    """The committed tokens of a sequence, translated to the draft's tokens.

    A token that both have is read as such. For others the text is cut anew from the beginning of its word.

    Attributes:
        tokens: the draft's tokens for all that was read.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.tokens: list[int] = list(translation.draft.front)
        self._own: list[int] = []  # the target's tokens that were read
        self._ends = [len(self.tokens)]  # the number of ours for the first i of them; -1 if none ends there

    def read(self, tokens: abc.Sequence[int]) -> bool:
        """Read the target's tokens, in place of those that differ from what was read. Return False if they end in half
        a character that the draft has no tokens for; then its word is not read."""
        count = len(self._own)
        self._cut(count if list(tokens[:count]) == self._own else common(self._own, tokens))
        while len(self._own) < len(tokens):
            if not (self._read_one(tokens[len(self._own)]) or self._read_on(tokens)):
                return False
        return True

    def _cut(self, count: int) -> None:
        """Keep the first `count` of the target's tokens, or fewer, up to where one of the draft's ends."""
        while self._ends[count] < 0:
            count -= 1
        del self._own[count:], self._ends[count + 1 :]
        del self.tokens[self._ends[count] :]

    def _read_one(self, token: int) -> bool:
        """Read a token that is one of the draft's, or none as it has no text. Return whether it is."""
        one, front = self.translation.reads.get(token), self.translation.draft.front
        if one is None and self.translation.target.of(token):
            return False
        begins = not self._own and front[-1:] == [one]  # the draft has put it there itself
        if one is not None and not begins:
            self.tokens.append(one)
        self._own.append(token)
        self._ends.append(len(self.tokens))
        return True

    def _read_on(self, tokens: abc.Sequence[int]) -> bool:
        """Read all tokens up to the next one without text, from the beginning of a word on."""
        target, draft = self.translation.target, self.translation.draft
        here = stop = len(self._own)
        while stop < len(tokens) and target.of(tokens[stop]):
            stop += 1
        self._cut(self._word(tokens, here))
        span = tokens[len(self._own) : stop]
        text = target.spell(span)
        found = self.translation.read(text)
        if found is None and stop < len(tokens):  # that character will never be whole
            found = draft.encode(text.decode("utf-8", "replace"))
        if found is None:
            return False
        ends: dict[int, int] = {}
        if draft.spell(found) == text:
            sizes = accumulate(len(draft.of(token) or b"") for token in found)
            ends = {size: count for count, size in enumerate(sizes, len(self.tokens) + 1)}
        self._ends += [ends.get(size, -1) for size in accumulate(len(target.of(token) or b"") for token in span)]
        self.tokens += found
        self._own += span
        self._ends[-1] = len(self.tokens)
        return True

    def _word(self, tokens: abc.Sequence[int], here: int) -> int:
        """Return where the word begins that the token `here` belongs to; `here` itself if that is too far back."""
        target = self.translation.target
        for at in range(here, max(here - REACH, 0) - 1, -1):
            if at < here and not target.of(tokens[at]):
                break
            if self._ends[at] >= 0 and target.begins_word(tokens, at):
                return at
        return here


class TranslatedDrafter(ChainDrafter):
    """A chain drafter whose model reads sequences in its own tokens, and drafts the tokens that both have.

    Everything that a sequence asks of its tokens, and a length policy, sees the draft's distribution at these. When the
    target has committed a text that the model would cut otherwise, its row is cropped to what is still right.
    """

    def __init__(
        self, translation: Translation, model: CausalLM, policy: LengthPolicy, vocab_size: int, block: bool
    ) -> None:
        assert not policy.wants_draft  # such a layer belongs to a pair of one tokenizer
        super().__init__(model, policy, vocab_size, block)
        self.translation = translation
        self._readers: dict[int, Reader] = {}
        self._held: dict[int, list[int]] = {}  # what each row of the model has run
        known = sorted(translation.shared.items())
        self._ids = {ours: theirs for ours, theirs in known if ours < vocab_size and theirs < model.vocab_size}
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
        return min(seq.remaining - 1, context - len(self._text(seq)) + 1 if context else seq.remaining)

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
        return [*text[length:], *(self._ids[token] for token in chain.tokens[max(0, length - len(text)) :])]

    def _at_once(self, chain: Chain, rule: StopRule) -> None:
        """Return None: the model's tokens are not those that are drafted."""

    def _goes_on(self, chain: Chain) -> bool:
        token = chain.tokens[-1]  # a processor may have forced one that the draft lacks
        return len(chain.tokens) < chain.depth and token not in chain.seq.eos and token in self._ids

    def _roll(
        self, ids: abc.Sequence[int], pending: abc.Sequence[abc.Sequence[int]], count: int
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        best, logits = [], []
        for _ in range(count):
            _, (found,), _ = self.model.roll(ids, pending, 1, self.model.vocab_size)
            for id, tokens in zip(ids, pending, strict=True):
                self._held[id] += tokens
            found = found[:, self._theirs]
            places = found.argmax(-1)
            best.append(self._ours[places])
            logits.append(found.new_full((len(ids), self.vocab_size), -torch.inf).index_copy_(1, self._ours, found))
            pending = self._theirs[places][:, None].tolist() if len(best) < count else []
        return torch.stack(best, 1), logits, []
