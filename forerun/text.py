"""Tokens to text as they come, without half characters and without anything of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 4  # prompt tokens to decode along, so that a first word keeps its space


class TextStream:
    """Turns one sequence's output tokens into pieces of text, each with the origin of the token that completed it.

    Text that may turn out to be the beginning of a stop string is held back until it is known; from the first
    stop string on, nothing is emitted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.ids = list(prompt[-CONTEXT:])
        if self._decode(0).endswith("\ufffd"):
            self.ids = []
        self._from, self._read = 0, len(self.ids)
        self._held: list[tuple[str, str]] = []
        self.stopped = False
        self.text = ""  # all that was emitted

    def _decode(self, start: int, end: int | None = None) -> str:
        ids = self.ids[start:end]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, tokens: Sequence[int], origins: Sequence[str], finished: bool) -> list[tuple[str, str]]:
        """Pieces (text, origin) that are certain now; with `finished`, all that is left."""
        for left, (token, origin) in enumerate(zip(tokens, origins, strict=True), 1 - len(tokens)):
            self.ids.append(token)
            known, whole = self._decode(self._from, self._read), self._decode(self._from)
            last = finished and not left
            if len(whole) > len(known) and (last or not whole.endswith("\ufffd")):
                self._held.append((whole[len(known) :], origin))
                self._from, self._read = self._read, len(self.ids)
        return self._release(finished)

    def _release(self, finished: bool) -> list[tuple[str, str]]:
        if self.stopped:
            self._held = []
            return []
        held = "".join(text for text, _ in self._held)
        found = [at for at in (held.find(stop) for stop in self.stop) if at >= 0]
        if found:
            certain, self.stopped = min(found), True
        elif finished:
            certain = len(held)
        else:
            certain = len(held) - max((_overlap(held, stop) for stop in self.stop), default=0)
        pieces, rest = [], []
        for text, origin in self._held:
            now, later = text[:certain], text[certain:]
            certain -= len(now)
            if now:
                pieces.append((now, origin))
            if later:
                rest.append((later, origin))
        self._held = [] if self.stopped else rest
        self.text += "".join(text for text, _ in pieces)
        return pieces


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
