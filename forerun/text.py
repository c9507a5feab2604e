"""Tokens to text as they come, without half characters and without anything of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

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


class SplitStopCriteria(StoppingCriteria):
    """Stops at stop strings with characters beyond ASCII, which may be split over tokens.

    transformers' StopStringCriteria works on whole tokens' text and does not see those. Reads the output's last
    tokens only: each is at least one byte.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, stop: Sequence[str]) -> None:
        self.tokenizer, self.prompt_length, self.stop = tokenizer, prompt_length, stop
        self.reach = max(len(text.encode()) for text in stop) + CONTEXT

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # type: ignore[override]
        """[B] bool for token ids [B, n]."""
        begin = max(self.prompt_length, input_ids.shape[1] - self.reach)
        tails = (str(self.tokenizer.decode(row)) for row in input_ids[:, begin:])
        return torch.tensor([any(text in tail for text in self.stop) for tail in tails])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
