"""Prompts with a gap, as models for code were trained to fill it. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Each form has three tokens. They mark the text that precedes the gap, the text that follows it,
# and the text that fills it; each token comes before its text.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek-Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
)
# What such models write when the gap is full, even if their generation config does not name it.
_ENDS = (
    "<|endoftext|> <|fim_pad|> <|repo_name|> <|file_sep|> <|file_separator|> <fim_pad> <file_sep> "
    "<repo_name> <reponame> <filename> <fim-pad> <|EOT|> \u2581<EOT>"
)


@dataclass(frozen=True)
class InfillForm:
    """How a tokenizer's model is asked to fill a gap.

    Attributes:
        before: the token that marks the text that precedes the gap.
        after: the token that marks the text that follows the gap.
        middle: the token that marks the text that fills the gap.
        ends: the tokens that end the text that fills the gap.
        is_sentencepiece: whether the tokenizer puts a space before every text. The text that
            follows the gap is encoded without this space.
    """

    before: int
    after: int
    middle: int
    ends: frozenset[int]
    is_sentencepiece: bool

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], after: str
    ) -> list[list[int]]:
        """Return the token ids of prompts, one for the gap between each text and `after`.

        Special tokens in the texts are read as such, as in other prompts.
        """
        line = "\n" if self.is_sentencepiece else ""
        rest = _encode(tokenizer, line + after)[len(_encode(tokenizer, line)) :]
        front = [*tokenizer("")["input_ids"], self.before]
        return [
            [*front, *_encode(tokenizer, text), self.after, *rest, self.middle] for text in texts
        ]


def infill_form(tokenizer: PreTrainedTokenizerBase) -> InfillForm | None:
    """Return the form whose tokens a tokenizer has, or None."""
    ids = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
    for form in _FORMS:
        if all(name in ids for name in form):
            before, after, middle = (ids[name] for name in form)
            ends = frozenset(ids[name] for name in (*form, *_ENDS.split()) if name in ids)
            return InfillForm(before, after, middle, ends, form[0].startswith("\u2581"))
    return None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
