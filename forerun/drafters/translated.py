"""Drafting with a model of another tokenizer by shared tokens.

The method is TLI (Timor et al., arXiv 2502.05202). Drafts are sampled from the draft's distribution
at the tokens that both tokenizers have. The acceptance rule gets the same distribution, so the
target's distribution is kept. A mistranslation only lowers acceptance.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import torch
from torch import Tensor

from forerun.drafters.model_chain import Chain, ChainDrafter
from forerun.engine.sequence import Sequence
from forerun.engine.target import ChunkSize
from forerun.model.causal_lm import CausalLM
from forerun.model.prefix_store import common
from forerun.planning.cost_model import CostSource
from forerun.planning.stop_rules import LengthPolicy, StopRule
from forerun.text.vocabularies import Translation


class Reader:
    """The committed tokens of a sequence, translated to the draft's tokens one by one.

    Attributes:
        tokens: the draft's tokens for all that was read.
    """

    def __init__(self, translation: Translation) -> None:
        """Begin with an empty text."""
        self.translation = translation
        self.tokens: list[int] = list(translation.draft.front)
        self._target_tokens: list[int] = []  # those that were read
        # The number of the draft's tokens for the first i of them; -1 within a character.
        self._ends = [len(self.tokens)]

    def read(self, tokens: abc.Sequence[int]) -> bool:
        """Read the target's tokens, in place of those that differ from what was read.

        Return False if they end in half a character that the draft has no tokens for. Then that
        half is not read.
        """
        count = len(self._target_tokens)
        if list(tokens[:count]) != self._target_tokens:
            count = common(self._target_tokens, tokens)
        while self._ends[count] < 0:
            count -= 1
        del self._target_tokens[count:]
        del self._ends[count + 1 :]
        del self.tokens[self._ends[count] :]
        while len(self._target_tokens) < len(tokens):
            start = len(self._target_tokens)
            stop, translated = self._next(tokens, start)
            if translated is None:
                return False
            self.tokens += translated
            self._target_tokens += tokens[start:stop]
            self._ends += [-1] * (stop - start - 1)
            self._ends.append(len(self.tokens))
        return True

    def _next(self, tokens: abc.Sequence[int], start: int) -> tuple[int, list[int] | None]:
        """Return the end of the next whole characters, and the draft's tokens for them.

        Instead of tokens there is None for half a character.
        """
        target = self.translation.target
        draft = self.translation.draft
        same = self.translation.reads.get(tokens[start])
        if same is not None or not target.of(tokens[start]):
            # The draft's tokenizer puts some tokens before every text itself.
            is_front = start == 0 and draft.front[-1:] == [same]
            return start + 1, [] if same is None or is_front else [same]
        stop = start
        text = b""
        translated = None
        while translated is None and stop < len(tokens):
            spelled = target.of(tokens[stop])
            if not spelled:
                break
            stop += 1
            text += spelled
            translated = self.translation.read(text)
        if translated is None and stop < len(tokens):  # that character will never be whole
            translated = draft.encode(text.decode("utf-8", "replace"))
        return stop, translated


class TranslatedDrafter(ChainDrafter):
    """A chain drafter whose model reads texts in its own tokens, and drafts the shared ones.

    The processors of a sequence and the length policy see the draft's distribution at the tokens
    that both tokenizers have.
    """

    def __init__(
        self,
        translation: Translation,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int,
        costs: CostSource | None = None,
    ) -> None:
        """Take over a draft model. `vocab_size`: that of the target."""
        super().__init__(model, policy, vocab_size, costs)
        self.translation = translation
        self._readers: dict[int, Reader] = {}
        self._held: dict[int, list[int]] = {}  # what each row of the model has run
        # {token of the target: token of the draft}
        self._ids: dict[int, int] = {}
        for target_id, draft_id in sorted(translation.shared.items()):
            if target_id < vocab_size and draft_id < model.vocab_size:
                self._ids[target_id] = draft_id
        self._target_ids = torch.tensor([*self._ids], device=model.device)
        self._draft_ids = torch.tensor([*self._ids.values()], device=model.device)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterator[int]:
        """Translate a prompt and run it."""
        reader = self._readers[seq.id] = Reader(self.translation)
        reader.read(seq.tokens)
        yield from super().admit(seq, hidden, chunk)
        self._held[seq.id] = reader.tokens[:-1]

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence and its translation."""
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
        if not context:
            return seq.remaining - 1
        return min(seq.remaining - 1, context - len(self._text(seq)) + 1)

    def _settle(self, seq: Sequence) -> bool:
        """Read what the target has committed, and keep what is still right of the model's row.

        The last token is not kept, because it is to be run. Return whether there is anything to
        draft after.
        """
        reader = self._readers[seq.id]
        held = self._held[seq.id]
        is_read = reader.read(seq.tokens)
        right = len(held)
        if reader.tokens[:right] != held:
            right = common(held, reader.tokens)
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
        text = self._text(chain.seq)
        length = len(self._held[chain.seq.id])
        drafted = chain.tokens[max(0, length - len(text)) :]
        return [*text[length:], *(self._ids[token] for token in drafted)]

    def _at_once(self, chain: Chain, rule: StopRule) -> None:
        """Return None, because the model's tokens are not those that are drafted."""

    def _goes_on(self, chain: Chain) -> bool:
        token = chain.tokens[-1]  # a processor may have forced one that the draft lacks
        is_end = token in chain.seq.eos or token not in self._ids
        return len(chain.tokens) < chain.depth and not is_end

    def _logits(self, ids: abc.Sequence[int], pending: abc.Sequence[abc.Sequence[int]]) -> Tensor:
        last = [logits[-1] for logits in self.model.extend(ids, pending)]
        draft_logits = torch.stack(last)
        for id, tokens in zip(ids, pending, strict=True):
            self._held[id] += tokens
        logits = draft_logits.new_full((len(ids), self.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._target_ids, draft_logits[:, self._draft_ids])
