"""Texts that a tokenizer always writes as one token, such as marks. It needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def ids_of(tokenizer: PreTrainedTokenizerBase, texts: Collection[str]) -> dict[str, int]:
    """Return the ids of those texts that are added tokens."""
    return {
        str(token): id
        for id, token in tokenizer.added_tokens_decoder.items()
        if str(token) in texts
    }


def special_texts(tokenizer: PreTrainedTokenizerBase, texts: Collection[str]) -> dict[int, str]:
    """Return those texts that are special tokens, which decoding leaves out, by their ids."""
    return {
        id: str(token)
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and str(token) in texts
    }
