"""Turns tokens into text as they come, without incomplete characters and stop strings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

PROMPT_TOKENS = 4  # decoded with the first output tokens, so that a first word keeps its space
# At most this many tokens without new text are gathered, because with each further token all of
# them are decoded again.
MAX_GATHERED = 16
HALF = "\ufffd"  # what an incomplete character is decoded to
# The characters with which byte-level vocabularies spell bytes.
_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}


class StopStrings:
    """Tells whether the last token completes a stop string.

    The rule is that of transformers' StopStringCriteria: a stop string may begin in the prompt or
    inside a token, and has to end in the last token. Bytes are compared, so characters may be split
    over tokens. The bytes of a token are computed when it first occurs, not for the whole
    vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = [text.encode() for text in strings]
        self._longest = max(map(len, self.strings), default=0)
        self._bytes: dict[int, bytes] = {}
        # Tokens are decoded behind this text, so that decoders neither add nor strip a space.
        base = tokenizer.encode("abcdef", add_special_tokens=False)
        self._base = list(tokenizer.convert_ids_to_tokens(base))
        self._skip = len(tokenizer.convert_tokens_to_string(self._base))

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether a stop string ends in the last of all tokens so far."""
        last = len(self.bytes_of(tokens[-1]))
        tail = b""
        for token in reversed(tokens):
            tail = self.bytes_of(token) + tail
            if len(tail) >= last + self._longest - 1:
                break
        before = len(tail) - last
        if not last:
            return False
        return any(tail.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self.strings)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
        if token not in self._bytes:
            self._bytes[token] = self._spell(self.tokenizer.convert_ids_to_tokens(token))
        return self._bytes[token]

    def _spell(self, token: Any) -> bytes:
        if token is None:  # padding of the embedding; this byte is in no text
            return b"\xff"
        text = self.tokenizer.convert_tokens_to_string([*self._base, token])[self._skip :]
        if HALF in text:  # a character is incomplete, so the bytes are read from the token's name
            if re.fullmatch("<0x[0-9a-fA-F]{2}>", token):
                return bytes.fromhex(token[3:5])
            if all(char in _BYTES for char in token):
                return bytes(_BYTES[char] for char in token)
        return text.encode()


@dataclass(frozen=True)
class LateStopStrings:
    """Stop strings that do not count before a text has a number of tokens.

    Attributes:
        strings: the stop strings.
        length: the first so many tokens, prompt included, complete none of them.
    """

    strings: StopStrings
    length: int

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether a stop string that counts ends in the last of all tokens so far."""
        return len(tokens) > self.length and self.strings(tokens)


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the class adds nothing to what its backend decodes.

    The backend alone decodes in a tenth of the time.
    """
    cls = type(tokenizer)
    if cls.decode is not PreTrainedTokenizerFast.decode:
        return False
    return getattr(cls, "_decode", None) is PreTrainedTokenizerFast._decode


class TextStream:
    """The text of one sequence's output tokens, in pieces.

    Each piece has the origin of the token that completed it. Text that may be the beginning of a
    stop string is held back until that is known. From the first stop string on, which may begin in
    the prompt, there is no text. Special tokens are not text, except those in `shown`. All tokens
    count in stop strings, as in `StopStrings`.

    Attributes:
        stop_string: the stop string that has come; None before that.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        shown: Mapping[int, str] | None = None,
        protected: int = 0,
    ) -> None:
        """Begin an output.

        Args:
            tokenizer: that of the model.
            prompt: the tokens before the output.
            stop: the stop strings.
            shown: the texts of special tokens that are text.
            protected: the first so many tokens of the output complete no stop string.
        """
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self._shown = shown or {}
        self._backend = tokenizer.backend_tokenizer if _is_plain(tokenizer) else None
        # The tokens of the last piece, and those that are in no piece yet.
        self._ids = list(prompt[-PROMPT_TOKENS:])
        self._known = self._decode(self._ids)  # the text of the first `_read` of them
        if self._known.endswith(HALF):
            self._ids = []
            self._known = ""
        self._read = len(self._ids)
        self.stop_string: str | None = None
        self._given: list[str] = []
        reach = max((len(text.encode()) for text in stop), default=0)
        tail = self._overlap(self._decode(prompt[-reach:], special=True)) if reach else ""
        self._protected = protected  # tokens of the output that are still to come
        self._free = len(tail)  # characters that are held and in which no stop string ends
        # Texts with their origins; a text without an origin is not given out.
        self._held: list[tuple[str, str | None]] = [(tail, None)]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """The text of all pieces so far."""
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
        """Return the pieces (text, origin) that are certain now.

        Args:
            tokens: the next tokens of the output.
            origins: their origins.
            finished: whether they are the last ones; then all text that is left is returned.
        """
        last = len(tokens) - 1
        for place, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            self._add(token, origin, is_last=finished and place == last)
            if self._protected:
                self._protected -= 1
                self._free = sum(len(text) for text, _ in self._held)
        return self._release(finished)

    def _add(self, token: int, origin: str, is_last: bool) -> None:
        """Hold the text that a token completes, if any."""
        if token in self._shown:
            rest = self._decode(self._ids)[len(self._known) :]
            self._held += [(rest, origin), (self._shown[token], origin)]
            self._ids = []
            self._read = 0
            self._known = ""
            return
        self._ids.append(token)
        whole = self._decode(self._ids)
        is_late = len(self._ids) - self._read >= MAX_GATHERED
        certain = whole
        if whole.endswith(HALF) and not is_last:
            if not is_late:
                return
            certain = whole[:-1] if len(whole) > len(self._known) + 1 else whole
        if len(certain) > len(self._known):
            self._held.append((certain[len(self._known) :], origin))
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._known = self._decode(self._ids)
            if certain is not whole:
                # The incomplete character at the end may still be completed.
                self._known = self._known[:-1]
            return
        if is_late:
            # Such tokens, special ones for example, do not change later text either.
            del self._ids[self._read :]
        if self.stop:
            self._held.append((self._decode([token], special=True), None))

    def _release(self, finished: bool) -> list[tuple[str, str]]:
        """Return the held pieces up to a stop string, or up to what may become one."""
        held = "" if self.stopped else "".join(text for text, _ in self._held)
        # A stop string that is wholly in the prompt, or in protected tokens, does not count.
        places = {stop: held.find(stop, max(0, self._free - len(stop) + 1)) for stop in self.stop}
        reached = [stop for stop, place in places.items() if place >= 0]
        certain = -1
        if reached:
            self.stop_string = min(reached, key=places.__getitem__)
            certain = places[self.stop_string]
        if certain < 0:
            certain = len(held) - (0 if finished else len(self._overlap(held)))
        self._free = max(0, self._free - certain)
        pieces = []
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
