"""Two tokenizers: tokens of the same bytes, and texts of one as tokens of the other."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.text.stop_strings import StopStrings

MIN_OVERLAP = 0.5  # with a smaller share of common tokens drafts seldom pay

# How SentencePiece names a token for one byte, which it uses if no other token has that byte.
_BYTE = re.compile("<0x[0-9a-fA-F]{2}>")

# The texts in which common tokens are counted.
_SAMPLE = (
    "The weather was fine, so Anna and her brother walked along the river until they came to an "
    "old bridge. It had been built in 1874, and nobody could say how long it would stand. What "
    "would you do first? Explain it to me.\n\n",
    "def mean(values: list[float]) -> float:\n    if not values:\n"
    "        raise ValueError('no values')\n"
    "    total = sum(values)\n    return total / len(values)  # the average\n",
)


class Vocabulary:
    """A tokenizer's tokens as bytes, and texts as its tokens.

    Attributes:
        tokenizer: the tokenizer.
        spelled: [V] the bytes of each token in the middle of a text; None for special tokens, and
            for ids that are not tokens.
        special: ids of special tokens by their names.
        end: the token that ends a text, or None.
        front: the tokens that the tokenizer puts before every text.
        ids: the token of each spelling.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        names = {id: name for name, id in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        hidden = {*tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}
        speller = StopStrings(tokenizer, ())
        self.spelled: list[bytes | None] = [None] * (max(names, default=-1) + 1)
        for id in names:
            if id not in hidden:
                self.spelled[id] = str(added[id]).encode() if id in added else speller.bytes_of(id)
        self.special = {names[id]: id for id in hidden if id in names}
        self.end: int | None = tokenizer.eos_token_id
        self.front: list[int] = tokenizer("")["input_ids"]
        if self.front and self.front[-1] == self.end:  # some put an end after every text
            self.front = self.front[:-1]
        # Of several tokens with the same bytes, tokenizers prefer an added token. A token that only
        # spells a byte is their last choice.
        pairs = reversed(list(enumerate(self.spelled)))
        self.ids = {text: id for id, text in pairs if text}
        for id in sorted(names):
            text = self.spelled[id]
            if text and (id in added or self._is_byte(text, names)):
                self.ids[text] = id
        self._bases = [(base, self._encode(base)) for base in ("\n", "a")]

    def _is_byte(self, text: bytes, names: dict[int, str]) -> bool:
        """Return whether the token in `ids` for a text only spells a byte."""
        return len(text) == 1 and _BYTE.fullmatch(names[self.ids[text]]) is not None

    def spell(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens. Special ones have none."""
        return b"".join(self.of(token) or b"" for token in tokens)

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for a special one and for an id that is not a token."""
        return self.spelled[token] if token < len(self.spelled) else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of another one.

        The space that some tokenizers put before a text is left out.
        """
        wanted = text.encode()
        others = []
        plain = self._encode(text)
        if self.spell(plain) == wanted:
            return plain
        for base, base_tokens in self._bases:
            tokens = self._encode(base + text)
            if tokens[: len(base_tokens)] == base_tokens:
                others.append(tokens[len(base_tokens) :])
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
    """A target's tokens and those of a draft with another tokenizer.

    Attributes:
        target: the target's vocabulary.
        draft: the draft's vocabulary.
        overlap: the share of a sample's tokens that both have.
    """

    target: Vocabulary
    draft: Vocabulary
    overlap: float

    @cached_property
    def shared(self) -> dict[int, int]:
        """The draft's token for each of the target's tokens that both have.

        The two tokens have the same bytes, or both end a text. Of several tokens with the same
        bytes one counts.
        """
        ids = self.draft.ids
        shared = {id: ids[text] for text, id in self.target.ids.items() if text in ids}
        if self.target.end is not None and self.draft.end is not None:
            shared[self.target.end] = self.draft.end
        return shared

    @cached_property
    def reads(self) -> dict[int, int]:
        """The draft's token for each of the target's tokens that it reads as one token.

        These are the shared tokens, special tokens of the same name, and all tokens with the same
        bytes.
        """
        ids = self.draft.ids
        special = self.draft.special
        read = {id: special[name] for name, id in self.target.special.items() if name in special}
        read |= {id: ids[text] for id, text in enumerate(self.target.spelled) if text in ids}
        return read | {id: other for id, other in self.shared.items() if id == self.target.end}

    def read(self, text: bytes) -> list[int] | None:
        """Return the draft's tokens for some bytes.

        Return None if they end in an incomplete character for which the draft has no tokens.
        """
        complete, half = whole(text)
        left = [self.draft.ids.get(half[i : i + 1]) for i in range(len(half))]
        known = [token for token in left if token is not None]
        if len(known) < len(left):
            return None
        return [*self.draft.encode(complete.decode("utf-8", "replace")), *known]


def translate(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str
) -> Translation:
    """Return the translation of a draft of that name.

    Raises ValueError if the two share less than `MIN_OVERLAP` of a sample's tokens.
    """
    ours = Vocabulary(target)
    theirs = Vocabulary(draft)
    tokens = [token for text in _SAMPLE for token in ours.encode(text)]
    overlap = sum(ours.of(token) in theirs.ids for token in tokens) / max(1, len(tokens))
    if overlap < MIN_OVERLAP:
        raise ValueError(
            f"draft {name!r}: its tokenizer has {overlap:.0%} of the target's tokens of a sample "
            f"text; a draft needs at least {MIN_OVERLAP:.0%}"
        )
    return Translation(ours, theirs, overlap)
