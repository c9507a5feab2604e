"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import json
from asyncio import sleep
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.logprobs import Logprob
from forerun.text import StopStrings

LEAST = -9999.0  # stands for minus infinity, which JSON has not
KEPT = 1 << 16  # tokens whose spelling is remembered
SLICE = 16  # tokens that are spelled at once; between two slices the event loop does what else there is


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def as_json(content: Any) -> bytes:
    return _encode(content).encode("utf-8", "replace")


class Spelling:
    """Tokens of one tokenizer as texts and bytes. One is enough for all answers, as it remembers them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(KEPT)(self._text)
        self._both = lru_cache(KEPT)(self._spell)

    @cached_property
    def _bytes(self) -> Callable[[int], bytes]:
        return StopStrings(self.tokenizer, ()).bytes_of

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _spell(self, token: int) -> tuple[str, list[int]]:
        return self.text(token), list(self._bytes(token))

    def chat(self, logprobs: Sequence[Logprob]) -> dict[str, list[Any]]:
        """Of a choice in a chat."""
        content = [
            self._entry(each.token, each.logprob) | {"top_logprobs": [self._entry(*best) for best in each.top]}
            for each in logprobs
        ]
        return {"content": content}

    def completion(self, logprobs: Sequence[Logprob | int], offset: int) -> dict[str, list[Any]]:
        """Of a choice behind a plain prompt, `offset` characters into its text. The first token of a prompt is given
        as its id: nothing came before it."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
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
        text, own = self._both(token)
        return {"token": text, "logprob": max(LEAST, logprob), "bytes": own}


class Spelled:
    """The log probabilities of a choice as JSON, which grows by small pieces: a long prompt with twenty of them a token
    would hold up the event loop for seconds."""

    def __init__(self, spelling: Spelling, is_chat: bool) -> None:
        self._spelling, self._is_chat = spelling, is_chat
        self._offset = 0  # characters of the tokens so far
        self._nothing: dict[str, list[Any]] = spelling.chat([]) if is_chat else spelling.completion([], 0)
        self._parts: dict[str, list[bytes]] = {}

    async def add(self, logprobs: Sequence[Logprob | int]) -> None:
        """Goes on with these. The first token of a prompt is its id."""
        for start in range(0, len(logprobs), SLICE):
            some = logprobs[start : start + SLICE]
            if self._is_chat:
                found = self._spelling.chat([each for each in some if isinstance(each, Logprob)])
            else:
                found = self._spelling.completion(some, self._offset)
                self._offset += sum(map(len, found["tokens"]))
            for name, values in found.items():
                self._parts.setdefault(name, []).append(as_json(values)[1:-1])
            await sleep(0)

    def copy(self) -> Spelled:
        """Another choice's, with the same so far."""
        other = Spelled(self._spelling, self._is_chat)
        other._offset, other._parts = self._offset, {name: list(each) for name, each in self._parts.items()}
        return other

    def take(self) -> bytes:
        """What was added since it was asked last."""
        parts, self._parts = self._parts or self._nothing, {}
        found = [b'"%s":[%s]' % (name.encode(), b",".join(each)) for name, each in parts.items()]
        return b"{" + b",".join([*found, b'"refusal":null'] if self._is_chat else found) + b"}"
