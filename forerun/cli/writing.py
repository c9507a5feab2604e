"""Answers as they come: tinted text on a terminal, plain text elsewhere, and progress while a prompt is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from time import perf_counter
from typing import Any

from forerun.cli.common import STYLES

PATIENCE = 0.5  # seconds after which a line says that the prompt is still being read
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}  # they steer terminals


class Reading:
    """A line on stderr that says how much of a long prompt is read, if stderr is a terminal."""

    def __init__(self) -> None:
        self.begun, self.shown = perf_counter(), False

    def __call__(self, read: int, total: int) -> None:
        if sys.stderr.isatty() and perf_counter() - self.begun > PATIENCE:
            self.shown = True
            print(f"\r\033[Kreading the prompt: {read} of {total} tokens", end="", file=sys.stderr, flush=True)

    def erase(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = False


class Answer:
    """What has been written of an answer, also if it breaks off.

    Attributes:
        text: all of it.
        steps: the target forwards that gave it.
        first, seconds: from the question to the first token, and to the last.
        finish_reason: None if it broke off.
    """

    def __init__(self) -> None:
        self.text, self.finish_reason = "", None
        self.steps: list[Any] = []
        self.begun, self.first, self.seconds = perf_counter(), 0.0, 0.0

    def write(self, chunks: Iterator[Any], console: Any, reading: Reading) -> None:
        """Write a decoder's stream to the console, which is that of stdout."""
        from rich.text import Text

        try:
            with closing(chunks):  # type: ignore[type-var]
                for chunk in chunks:
                    reading.erase()
                    self.seconds = perf_counter() - self.begun
                    self.first = self.first or self.seconds
                    self.text += chunk.text
                    self.steps.append(chunk.step)
                    self.finish_reason = chunk.finish_reason
                    if console.is_terminal:
                        for piece, origin in chunk.pieces:
                            style = STYLES.get(origin, "")
                            console.print(Text(piece.translate(_CONTROLS), style=style), end="")
                    else:
                        print(chunk.text, end="", flush=True)
        finally:
            reading.erase()
