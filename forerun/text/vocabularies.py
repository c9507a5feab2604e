"""Two tokenizers: which of their tokens stand for the same bytes, and texts of the one as tokens of the other."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.text.stop_strings import StopStrings

LEAST = 0.5  # of a sample's tokens: with fewer shared ones drafts seldom pay

_BYTE = re.compile(
    "<0x[0-9a-fA-F]{2}>"
)  # SentencePiece spells bytes that are in no other token like this

# What shared tokens are counted in.
_SAMPLE = (
    "The weather was fine, so Anna and her brother walked along the river until they came to an old bridge. It had "
    "been built in 1874, and nobody could say how long it would stand. What would you do first? Explain it to me.\n\n",
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n"
    "    total = sum(values)\n    return total / len(values)  # the average\n",
)


class Vocabulary:
    """A tokenizer's tokens as bytes, and texts as its tokens.

    Attributes:
        spelled: [V] bytes of each token in the middle of a text; None for special tokens, and for ids that are no
            token.
        special: ids of special tokens by their names.
        end: the token that ends a text, or None.
        front: the tokens that the tokenizer puts before every text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        names = {id: name for name, id in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        hidden = {*tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}
        spelling = StopStrings(tokenizer, ())
        self.spelled: list[bytes | None] = [None] * (max(names, default=-1) + 1)
        for id in names:
            if id not in hidden:
                self.spelled[id] = str(added[id]).encode() if id in added else spelling.bytes_of(id)
        self.special = {names[id]: id for id in hidden if id in names}
        self.end: int | None = tokenizer.eos_token_id
        self.front: list[int] = tokenizer("")["input_ids"]
        if self.front and self.front[-1] == self.end:  # some put an end after every text
            self.front = self.front[:-1]
        # Of tokens with the same bytes tokenizers take an added one first, and a byte's last.
        self.ids = {own: id for id, own in reversed(list(enumerate(self.spelled))) if own}
        for id in sorted(names):
            own = self.spelled[id]
            if own and (id in added or (len(own) == 1 and _BYTE.fullmatch(names[self.ids[own]]))):
                self.ids[own] = id
        self._bases = [(base, self._encode(base)) for base in ("\n", "a")]

    def spell(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; special ones have none."""
        return b"".join(self.of(token) or b"" for token in tokens)

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for a special one, and for what is no token."""
        return self.spelled[token] if token < len(self.spelled) else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of another one: without the space that some tokenizers put
        first."""
        wanted, others = text.encode(), []
        plain = self._encode(text)
        if self.spell(plain) == wanted:
            return plain
        for base, own in self._bases:
            tokens = self._encode(base + text)
            if tokens[: len(own)] == own:
                others.append(tokens[len(own) :])
                if self.spell(others[-1]) == wanted:
                    return others[-1]
        return others[0] if others else plain  # a normaliser has changed the text

    def _encode(self, text: str) -> list[int]:
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return list(backend.encode(text, add_special_tokens=False).ids)


def whole(text: bytes) -> tuple[bytes, bytes]:
    """Split bytes before an incomplete character at their end."""
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    half = decoder.getstate()[0]
    return text[: len(text) - len(half)], half


@dataclass(frozen=True)
class Translation:
    """A target's tokens and those of a draft with another tokenizer."""

    target: Vocabulary
    draft: Vocabulary
    overlap: float  # share of a sample's tokens that both have

    @cached_property
    def shared(self) -> dict[int, int]:
        """The draft's token for each of the target's that it has as well: of the same bytes, and the ends of texts. Of
        several tokens with the same bytes, one of each counts."""
        target, draft = self.target, self.draft
        found = {id: draft.ids[own] for own, id in target.ids.items() if own in draft.ids}
        return found | (
            {target.end: draft.end} if target.end is not None and draft.end is not None else {}
        )

    @cached_property
    def reads(self) -> dict[int, int]:
        """The draft's token for each of the target's that is read as one: also special tokens of the same name, and all
        tokens with the same bytes."""
        ids, special = self.draft.ids, self.draft.special
        found = {id: special[name] for name, id in self.target.special.items() if name in special}
        found |= {id: ids[own] for id, own in enumerate(self.target.spelled) if own and own in ids}
        return found | {id: other for id, other in self.shared.items() if id == self.target.end}

    def read(self, text: bytes) -> list[int] | None:
        """Return the draft's tokens for some bytes; None if they end in part of a character that it has no tokens
        for."""
        text, half = whole(text)
        left = [self.draft.ids.get(half[i : i + 1]) for i in range(len(half))]
        known = [token for token in left if token is not None]
        return (
            [*self.draft.encode(text.decode("utf-8", "replace")), *known]
            if len(known) == len(left)
            else None
        )


def translate(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str
) -> Translation:
    """Return the translation of a draft of that name. Raises ValueError if the two share fewer than `LEAST` of a
    sample's tokens."""
    ours, theirs = Vocabulary(target), Vocabulary(draft)
    tokens = [token for text in _SAMPLE for token in ours.encode(text)]
    overlap = sum(ours.of(token) in theirs.ids for token in tokens) / max(1, len(tokens))
    if overlap < LEAST:
        raise ValueError(
            f"draft {name!r}: its tokenizer has {overlap:.0%} of the target's tokens of a sample text; a draft needs "
            f"at least {LEAST:.0%}"
        )
    return Translation(ours, theirs, overlap)
