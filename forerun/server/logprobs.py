"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.logprobs import Logprob
from forerun.text import StopStrings

LEAST = -9999.0  # stands for minus infinity, which JSON has not


class Spelling:
    """Tokens as texts and bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> Callable[[int], bytes]:
        return StopStrings(self._tokenizer, ()).bytes_of

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def chat(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """`logprobs` of a choice in a chat."""
        content = [
            self._entry(each.token, each.logprob) | {"top_logprobs": [self._entry(*best) for best in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def completion(self, logprobs: Sequence[Logprob | int], offset: int) -> dict[str, Any]:
        """`logprobs` of a choice behind a plain prompt, `offset` characters into its text. The first token of a prompt
        is given as its id: nothing came before it."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in logprobs:
            text = self.text(each if isinstance(each, int) else each.token)
            top = None
            if not isinstance(each, int) and each.top:
                top = {text: max(LEAST, each.logprob)}  # the token itself is always named
                for token, logprob in reversed(each.top):  # where texts are the same, the best one stays
                    top[self.text(token)] = max(LEAST, logprob)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if isinstance(each, int) else max(LEAST, each.logprob))
            found["top_logprobs"].append(top)
            found["text_offset"].append(offset)
            offset += len(text)
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(LEAST, logprob), "bytes": list(self._bytes(token))}
