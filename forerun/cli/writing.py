"""Answers that stream: tinted text on a terminal, plain text elsewhere, and progress before their first word."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.cli.common import STYLES, say

PATIENCE = 0.5  # seconds after which a line says that the prompt is still being read
_CONTROLS = {
    code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}  # they steer terminals


def say_loading(*models: str | None) -> None:
    """Say on a terminal's stderr what is loaded, before torch is imported, which takes seconds."""
    if sys.stderr.isatty():
        say(f"loading {' and '.join(each for each in models if each)} ...")


class Reading:
    """A line on stderr with the progress of reading a long prompt, if stderr is a terminal."""

    def __init__(self) -> None:
        self.begun, self.shown = perf_counter(), False

    def __call__(self, read: int, total: int) -> None:
        if sys.stderr.isatty() and perf_counter() - self.begun > PATIENCE:
            self.shown = True
            print(
                f"\r\033[Kreading the prompt: {read} of {total} tokens",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def erase(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = False


class Answer:
    """An answer as far as it was written, complete or broken off.

    Attributes:
        steps: the target forwards that gave the text.
        seconds: from the question to the last token.
        finish_reason: None if it broke off.
    """

    def __init__(self) -> None:
        self.text, self.seconds, self.finish_reason = "", 0.0, None
        self.steps: list[Any] = []

    def figures(self, method: str) -> str:
        """Return a line: tokens, tokens a target forward or that drafts rest, tokens/s, and the method."""
        from forerun.engine.stats import summarise

        stats = summarise(self.steps, self.seconds)
        rests = 2 * sum(step.rests for step in self.steps) > len(self.steps)
        gain = "drafts rest: they were slower" if rests else f"tau {stats.tau:.2f}"
        return f"{stats.tokens} tokens, {gain}, {stats.tokens_per_s:.1f} tokens/s, {method}"

    def write(self, chunks: Any, console: Console, reading: Reading) -> None:
        """Write a decoder's stream to the console, which is that of stdout."""
        try:
            with closing(chunks):
                for chunk in chunks:
                    reading.erase()
                    self.seconds = perf_counter() - reading.begun
                    self.text += chunk.text
                    self.steps.append(chunk.step)
                    self.finish_reason = chunk.finish_reason
                    if console.is_terminal:
                        console.print(tinted(chunk.pieces), end="")
                    else:
                        print(chunk.text, end="", flush=True)
        finally:
            reading.erase()


def tinted(pieces: Iterable[tuple[str, str]]) -> Text:
    """Return pieces of text, each in the colour of its token's origin, without characters that steer a terminal."""
    return Text.assemble(
        *((piece.translate(_CONTROLS), STYLES.get(origin, "")) for piece, origin in pieces)
    )
