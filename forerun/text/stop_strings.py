"""Tokens to text as they come, without half characters and without anything of a stop string."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTEXT = 4  # prompt tokens to decode along, so that a first word keeps its space
LATE = 16  # tokens without new text, after which no more are gathered: each one decodes all of them
HALF = "\ufffd"  # what part of a character is decoded to
_BYTES = {
    char: byte for byte, char in bytes_to_unicode().items()
}  # byte-level vocabularies spell bytes like this


class StopStrings:
    """Whether the last of some tokens completes a stop string, as transformers' StopStringCriteria has it.

    A stop string may begin in the prompt or inside a token, and has to end in the last token. Bytes are compared, so
    characters may be split over tokens. A token's bytes are found when it first comes, not for a whole vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, [text.encode() for text in strings]
        self._longest = max(map(len, self.strings), default=0)
        self._bytes: dict[int, bytes] = {}
        # After another token, so that decoders neither add nor strip a space.
        self._base = list(
            tokenizer.convert_ids_to_tokens(tokenizer.encode("abcdef", add_special_tokens=False))
        )
        self._skip = len(tokenizer.convert_tokens_to_string(self._base))

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether a stop string ends in the last one of all tokens so far."""
        last, tail = len(self.bytes_of(tokens[-1])), b""
        for token in reversed(tokens):
            tail = self.bytes_of(token) + tail
            if len(tail) >= last + self._longest - 1:
                break
        before = len(tail) - last
        return last > 0 and any(
            tail.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self.strings
        )

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find(self.tokenizer.convert_ids_to_tokens(token))
        return found

    def _find(self, token: Any) -> bytes:
        if token is None:  # padding of the embedding: a byte that is in no text
            return b"\xff"
        text = self.tokenizer.convert_tokens_to_string([*self._base, token])[self._skip :]
        if HALF in text:  # not whole characters: the name of the token says which bytes
            if re.fullmatch("<0x[0-9a-fA-F]{2}>", token):
                return bytes.fromhex(token[3:5])
            if all(char in _BYTES for char in token):
                return bytes(_BYTES[char] for char in token)
        return text.encode()


class TextStream:
    """Turns one sequence's output tokens into pieces of text, each with the origin of the token that completed it.

    Text that may be the beginning of a stop string is held back until that is known. From the first stop string on,
    which may begin in the prompt, no text comes. Special tokens are no text, but for those whose text `shown` has. All
    count in stop strings as in `StopStrings`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self.tokenizer, self.stop, self._shown = tokenizer, tuple(stop), shown or {}
        # A tenth of the time where the class adds nothing of its own to what its backend decodes.
        kind = type(tokenizer)
        plain = kind.decode is PreTrainedTokenizerFast.decode and (
            getattr(kind, "_decode", None) is PreTrainedTokenizerFast._decode
        )
        self._backend = tokenizer.backend_tokenizer if plain else None
        self._ids = list(
            prompt[-CONTEXT:]
        )  # the tokens of the last piece, and those that no piece has yet
        self._known = self._decode(self._ids)  # the text of the first `_read` of them
        if self._known.endswith(HALF):
            self._ids, self._known = [], ""
        self._read = len(self._ids)
        self.stopped = False
        self._given: list[str] = []
        reach = max((len(text.encode()) for text in stop), default=0)
        tail = self._overlap(self._decode(prompt[-reach:], special=True)) if reach else ""
        self._prompt = len(tail)  # characters of the prompt that are held
        self._held: list[tuple[str, str | None]] = [
            (tail, None)
        ]  # without an origin: not to be given out

    @property
    def text(self) -> str:
        """All text of the pieces so far."""
        return "".join(self._given)

    def _decode(self, ids: Sequence[int], special: bool = False) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=not special))
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _overlap(self, text: str) -> str:
        """Return the longest end of `text` that is a proper beginning of a stop string."""
        beginnings = (stop[:n] for stop in self.stop for n in range(1, len(stop)))
        return max(filter(text.endswith, beginnings), key=len, default="")

    def push(
        self, tokens: Sequence[int], origins: Sequence[str], finished: bool
    ) -> list[tuple[str, str]]:
        """Return pieces (text, origin) that are certain now; with `finished`, all that is left."""
        for left, (token, origin) in enumerate(zip(tokens, origins, strict=True), 1 - len(tokens)):
            if token in self._shown:
                rest = self._decode(self._ids)[len(self._known) :]
                self._held += [(rest, origin), (self._shown[token], origin)]
                self._ids, self._read, self._known = [], 0, ""
                continue
            self._ids.append(token)
            whole, late = self._decode(self._ids), len(self._ids) - self._read >= LATE
            certain = whole
            if whole.endswith(HALF) and (left or not finished):
                if not late:
                    continue
                certain = whole[:-1] if len(whole) > len(self._known) + 1 else whole
            if len(certain) > len(self._known):
                self._held.append((certain[len(self._known) :], origin))
                self._ids = self._ids[self._read :]
                self._read, self._known = len(self._ids), self._decode(self._ids)
                if (
                    certain is not whole
                ):  # what the last of many halves is part of may yet become a character
                    self._known = self._known[:-1]
                continue
            if late:  # special tokens and the like, which add nothing to what comes either
                del self._ids[self._read :]
            if self.stop:
                self._held.append((self._decode([token], special=True), None))
        return self._release(finished)

    def _release(self, finished: bool) -> list[tuple[str, str]]:
        held, pieces = "" if self.stopped else "".join(text for text, _ in self._held), []
        # A stop string that stands wholly in the prompt does not count.
        found = [held.find(stop, max(0, self._prompt - len(stop) + 1)) for stop in self.stop]
        certain = min((at for at in found if at >= 0), default=-1)
        self.stopped = self.stopped or certain >= 0
        if certain < 0:
            certain = len(held) - (0 if finished else len(self._overlap(held)))
        self._prompt = max(0, self._prompt - certain)
        rest = []
        for text, origin in self._held:
            if text[:certain] and origin is not None:
                pieces.append((text[:certain], origin))
            if text[certain:] and not self.stopped:
                rest.append((text[certain:], origin))
            certain = max(0, certain - len(text))
        self._held = rest
        self._given += [text for text, _ in pieces]
        return pieces
