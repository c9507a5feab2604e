"""What is found out about a tokenizer once, and known as long as the tokenizer exists."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

_T = TypeVar("_T")


def per_tokenizer(
    function: Callable[[PreTrainedTokenizerBase], _T],
) -> Callable[[PreTrainedTokenizerBase], _T]:
    """Return a function that calls another one once for each tokenizer.

    Several models may be served in turns, and a model that is unloaded must not stay in memory.
    """
    known: WeakKeyDictionary[PreTrainedTokenizerBase, _T] = WeakKeyDictionary()

    @wraps(function)
    def find(tokenizer: PreTrainedTokenizerBase) -> _T:
        try:
            return known[tokenizer]
        except KeyError:
            return known.setdefault(tokenizer, function(tokenizer))

    return find
