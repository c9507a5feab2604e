"""Answers as they come: tinted text on a terminal, plain text elsewhere, and signs of life while a prompt is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from forerun.cli.common import STYLES

PATIENCE = 0.5  # seconds after which a user is told that a prompt is still being read


class Reading:
    """Says on stderr how far the reading of a prompt is, where stderr is a terminal and it takes a while."""

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


@dataclass(frozen=True)
class Figures:
    """What is said of an answer behind it. None is what nobody told.

    Attributes:
        tokens: of the answer.
        forwards: of the target.
        seconds: from the question to the last token.
        context: tokens of the conversation with the answer.
    """

    tokens: int | None
    forwards: int | None
    seconds: float
    context: int | None

    @property
    def tau(self) -> float | None:
        return self.tokens / max(1, self.forwards) if self.tokens is not None and self.forwards is not None else None

    @property
    def speed(self) -> float | None:
        """Tokens a second, with the reading of the prompt."""
        return self.tokens / self.seconds if self.tokens is not None and self.seconds else None

    def parts(self) -> list[str]:
        """What stands in a line."""
        found = [f"{self.seconds:.2f} s" if self.tokens is None else f"{self.tokens} tokens"]
        if self.tau is not None:
            found.append(f"tau {self.tau:.2f}")
        return [*found, f"{self.speed:.1f} tokens/s"] if self.speed is not None else found


def total(parts: list[Figures]) -> Figures:
    """Several answers together."""

    def add(name: str) -> Any:
        values = [getattr(each, name) for each in parts]
        return None if None in values else sum(values)

    return Figures(add("tokens"), add("forwards"), add("seconds"), None)


class Answer:
    """What has been written of an answer, whatever ends it.

    Attributes:
        text: all of it.
        steps: the target forwards behind it; None for a chunk of a server that does not tell.
        seconds: since it was asked for; `first` until its first token.
        finish_reason: None where it was cut.
    """

    def __init__(self) -> None:
        self.text, self.finish_reason = "", None
        self.steps: list[Any] = []
        self.begun, self.first, self.seconds = perf_counter(), 0.0, 0.0

    def write(self, chunks: Iterator[Any], console: Any, reading: Reading) -> None:
        """Writes a decoder's stream to the console, which is that of stdout."""
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
                            console.print(Text(_shown(piece), style=STYLES.get(origin, "")), end="")
                    else:
                        print(chunk.text, end="", flush=True)
        finally:
            reading.erase()


def show(chunks: Iterator[Any], reading: Reading) -> Answer:
    """Writes one answer, with a line end behind it, also where it breaks off."""
    from rich.console import Console

    answer = Answer()
    try:
        answer.write(chunks, Console(highlight=False, soft_wrap=True), reading)
    except ValueError:
        if answer.text:
            print(flush=True)
        raise
    print()
    return answer


_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def _shown(text: str) -> str:
    """Without what would steer a terminal."""
    return text.translate(_CONTROLS)


def as_object(result: Any, method: str) -> dict[str, Any]:
    """A Completion for --json."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "origins": result.origins,
        "finish_reason": result.finish_reason,
        "method": method,
        "stats": result.stats.as_dict(),
    }
