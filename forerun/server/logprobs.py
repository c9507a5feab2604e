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

LEAST = -9999.0  # for minus infinity, which JSON lacks
CACHED = 1 << 16  # tokens whose text is kept
SLICE = 16  # tokens that are written at once, before the event loop does other work

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def as_json(content: Any) -> bytes:
    return _encode(content).encode("utf-8", "replace")


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, cached for all answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self._stops = tokenizer, StopStrings(tokenizer, ())
        self.text = lru_cache(CACHED)(
            lambda token: str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        )
        self.both = lru_cache(CACHED)(
            lambda token: (self.text(token), list(self._stops.bytes_of(token)))
        )


class LogprobsJson:
    """The log probabilities of a choice, written in small pieces: a long prompt with twenty of them a token would hold
    up the event loop for seconds."""

    def __init__(self, texts: TokenTexts, is_chat: bool) -> None:
        self._texts, self._is_chat = texts, is_chat
        self._offset = 0  # characters of the tokens so far
        names = (
            ("content",) if is_chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        self._parts: dict[str, list[bytes]] = {name: [] for name in names}

    async def add(self, logprobs: Sequence[Logprob | int]) -> None:
        """Append log probabilities. The first token of a prompt has none, and is given as its id."""
        for start in range(0, len(logprobs), SLICE):
            some = logprobs[start : start + SLICE]
            rows = [self._chat(each) if self._is_chat else self._plain(each) for each in some]
            for parts, values in zip(self._parts.values(), zip(*rows, strict=True), strict=True):
                parts.append(as_json(values)[1:-1])
            await sleep(0)

    def _chat(self, each: Logprob | int) -> tuple[Any, ...]:
        assert isinstance(each, Logprob)
        best = [self._entry(*top) for top in each.top]
        return (self._entry(each.token, each.logprob) | {"top_logprobs": best},)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, own = self._texts.both(token)
        return {"token": text, "logprob": max(LEAST, logprob), "bytes": own}

    def _plain(self, each: Logprob | int) -> tuple[Any, ...]:
        text, offset = self._texts.text(each if isinstance(each, int) else each.token), self._offset
        self._offset += len(text)
        if isinstance(each, int):
            return text, None, None, offset
        logprob, top = max(LEAST, each.logprob), None
        if each.top:
            top = {text: logprob}  # the token itself is always named
            for token, best in reversed(each.top):  # if two texts are the same, the best one stays
                top[self._texts.text(token)] = max(LEAST, best)
        return text, logprob, top, offset

    def take(self) -> bytes:
        """Return what was added since the last call."""
        found = [
            b'"%s":[%s]' % (name.encode(), b",".join(each)) for name, each in self._parts.items()
        ]
        self._parts = {name: [] for name in self._parts}
        return b"{" + b",".join([*found, b'"refusal":null'] if self._is_chat else found) + b"}"
