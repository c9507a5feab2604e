"""Answers that stream: coloured on a terminal, plain elsewhere, after the progress of reading."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.cli.common import STYLES, say

if TYPE_CHECKING:
    from forerun.api.completion import Chunk
    from forerun.engine.step import Step

READING_DELAY = 0.5  # seconds after which a line says that the prompt is still being read
# Characters that steer a terminal, for `str.translate`, which leaves them out.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def say_default(target: str) -> None:
    """Say on stderr which target was chosen, because the user named none."""
    say(f"the target is {target}, the best known model that is fetched (--target takes another)")


def say_loading(*models: str | None) -> None:
    """Say on a terminal's stderr what is loaded.

    It is called before torch is imported, because that takes seconds.
    """
    if sys.stderr.isatty():
        say(f"loading {' and '.join(model for model in models if model)} ...")


class Reading:
    """A line on stderr with the progress of reading a long prompt, if stderr is a terminal.

    Attributes:
        started_at: when the reading began, by `perf_counter`.
        is_shown: whether the line is on the terminal.
    """

    def __init__(self) -> None:
        self.started_at = perf_counter()
        self.is_shown = False

    def __call__(self, read: int, total: int) -> None:
        """Show that `read` of `total` tokens are read."""
        if sys.stderr.isatty() and perf_counter() - self.started_at > READING_DELAY:
            self.is_shown = True
            line = f"reading the prompt: {read} of {total} tokens"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def erase(self) -> None:
        """Remove the line from the terminal."""
        if self.is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.is_shown = False


class Answer:
    """An answer as far as it was written, whole or cut off.

    Attributes:
        text: what was written.
        steps: the target forwards that gave the text.
        seconds: the time from the question to the last token.
        finish_reason: None if the answer was cut off.
    """

    def __init__(self) -> None:
        self.text = ""
        self.steps: list[Step] = []
        self.seconds = 0.0
        self.finish_reason: str | None = None

    def figures(self, method: str) -> str:
        """Return a line: tokens, tokens per target forward, tokens/s, and the method.

        If drafts were left out in most steps, the line says so instead of tokens per forward.
        """
        from forerun.engine.stats import summarise

        stats = summarise(self.steps, self.seconds)
        was_guarded = 2 * sum(step.rests for step in self.steps) > len(self.steps)
        gain = "drafts rest: they were slower" if was_guarded else f"tau {stats.tau:.2f}"
        return f"{stats.tokens} tokens, {gain}, {stats.tokens_per_s:.1f} tokens/s, {method}"

    def write(
        self,
        chunks: Any,
        console: Console,
        reading: Reading,
        show: Callable[[Chunk], None] | None = None,
    ) -> None:
        """Write a decoder's stream to the console, which is that of stdout, or by `show`."""
        try:
            with closing(chunks):
                for chunk in chunks:
                    reading.erase()
                    self._take(chunk, perf_counter() - reading.started_at)
                    if show is None:
                        write_chunk(chunk, console)
                    else:
                        show(chunk)
        finally:
            reading.erase()

    def _take(self, chunk: Chunk, seconds: float) -> None:
        """Add a piece of the stream, which came `seconds` after the question."""
        self.seconds = seconds
        self.text += chunk.text
        self.steps.append(chunk.step)
        self.finish_reason = chunk.finish_reason


def write_chunk(chunk: Chunk, console: Console) -> None:
    """Write a piece of a stream: coloured on a terminal, plain elsewhere."""
    if console.is_terminal:
        console.print(tinted(chunk.pieces), end="")
    else:
        print(chunk.text, end="", flush=True)


def without_controls(text: str) -> str:
    """Return a text without the characters that steer a terminal."""
    return text.translate(_CONTROLS)


def tinted(pieces: Iterable[tuple[str, str]]) -> Text:
    """Return pieces (text, origin), each in the colour of its token's origin.

    Characters that steer a terminal are left out.
    """
    return Text.assemble(
        *((without_controls(piece), STYLES.get(origin, "")) for piece, origin in pieces)
    )
