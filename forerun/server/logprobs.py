"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import json
from asyncio import sleep
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.sampling.probabilities import Logprob
from forerun.text.stop_strings import StopStrings

MIN_LOGPROB = -9999.0  # written for minus infinity, which JSON lacks
CACHED = 1 << 16  # tokens whose texts are kept
SLICE = 16  # tokens that are written at once, before the event loop may do other work

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def as_json(content: Any) -> bytes:
    """Return content as compact JSON; characters that UTF-8 lacks become question marks."""
    return _encode(content).encode("utf-8", "replace")


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, cached for all answers.

    Attributes:
        text: a function that returns the text of a token id.
        text_and_bytes: a function that returns the text of a token id and the list of its bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._stops = StopStrings(tokenizer, ())
        self.text = lru_cache(CACHED)(
            lambda token: str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        )
        self.text_and_bytes = lru_cache(CACHED)(
            lambda token: (self.text(token), list(self._stops.bytes_of(token)))
        )


class LogprobsJson:
    """The log probabilities of a choice, written in small pieces.

    To write those of a long prompt at once, with twenty alternatives per token, would block the
    event loop for seconds.
    """

    def __init__(self, texts: TokenTexts, is_chat: bool) -> None:
        self._texts = texts
        self._is_chat = is_chat
        self._offset = 0  # characters of the tokens so far
        names = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
        if is_chat:
            names = ["content"]
        self._parts: dict[str, list[bytes]] = {name: [] for name in names}

    async def add(self, logprobs: Sequence[Logprob | int]) -> None:
        """Append log probabilities.

        The first token of a prompt has none, because nothing precedes it; it is given as its id.
        """
        write = self._chat_row if self._is_chat else self._completion_row
        for start in range(0, len(logprobs), SLICE):
            rows = [write(logprob) for logprob in logprobs[start : start + SLICE]]
            for parts, values in zip(self._parts.values(), zip(*rows, strict=True), strict=True):
                parts.append(as_json(values)[1:-1])
            await sleep(0)

    def _chat_row(self, logprob: Logprob | int) -> tuple[Any, ...]:
        assert isinstance(logprob, Logprob)
        top = [self._entry(token, value) for token, value in logprob.top]
        return (self._entry(logprob.token, logprob.logprob) | {"top_logprobs": top},)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, text_bytes = self._texts.text_and_bytes(token)
        return {"token": text, "logprob": max(MIN_LOGPROB, logprob), "bytes": text_bytes}

    def _completion_row(self, logprob: Logprob | int) -> tuple[Any, ...]:
        """Return a token's text, its log probability, the most probable tokens, and its offset."""
        token = logprob if isinstance(logprob, int) else logprob.token
        text = self._texts.text(token)
        offset = self._offset
        self._offset += len(text)
        if isinstance(logprob, int):
            return text, None, None, offset
        value = max(MIN_LOGPROB, logprob.logprob)
        if not logprob.top:
            return text, value, None, offset
        top = {text: value}  # because OpenAI always lists the token itself
        # In ascending order, so that of two tokens with the same text the more probable one stays.
        for other, best in reversed(logprob.top):
            top[self._texts.text(other)] = max(MIN_LOGPROB, best)
        return text, value, top, offset

    def take(self) -> bytes:
        """Return what was added since the last call, as a JSON object."""
        members = [
            b'"%s":[%s]' % (name.encode(), b",".join(parts)) for name, parts in self._parts.items()
        ]
        if self._is_chat:
            members.append(b'"refusal":null')
        self._parts = {name: [] for name in self._parts}
        return b"{" + b",".join(members) + b"}"
