"""How `forerun demo` shows a race: one answer streams after the other, under a clock."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from forerun.cli.writing import tinted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forerun.api.completion import Chunk
    from forerun.engine.stats import Stats

FRAMES_PER_SECOND = 12.0
MARGIN_LINES = 4  # of the terminal that an answer on its way leaves free


@dataclass(frozen=True)
class Run:
    """One decoded answer.

    Attributes:
        tokens: of the answer.
        stats: its figures; the seconds leave out what drawing took.
    """

    tokens: list[int]
    stats: Stats


def run(chunks: Iterable[Chunk], lane: Lane | None = None) -> Run:
    """Decode a stream to its end, shown in a lane if one is given, and return the answer.

    Only the seconds inside the decoder count, so that a slow terminal slows down nobody.
    """
    from forerun.engine.stats import summarise

    seconds = 0.0
    steps = []
    stream = iter(chunks)
    while True:
        started_at = perf_counter()
        chunk = next(stream, None)
        seconds += perf_counter() - started_at
        if chunk is None:
            break
        steps.append(chunk.step)
        if lane is not None:
            lane.add(chunk, seconds)
    tokens = [token for step in steps for token in step.tokens]
    answer = Run(tokens, summarise(steps, seconds))
    if lane is not None:
        lane.finish(answer)
    return answer


class Lane:
    """One answer of the race: a clock, and below it the text as far as it is decoded.

    On a terminal both are drawn while the answer comes. Elsewhere only the end is printed.

    Attributes:
        text: what was decoded, in the colours of its tokens' origins.
    """

    def __init__(self, console: Console, name: str, *, shows_text: bool = True) -> None:
        """Create an empty lane.

        Args:
            console: where it is drawn.
            name: of what decodes, before the clock.
            shows_text: whether the text is printed at the end; the clock always is.
        """
        self.text = Text()
        self._console = console
        self._name = name
        self._shows_text = shows_text
        self._tokens = 0
        self._drawn_at = 0.0
        self._live: Any = None
        if console.is_terminal and not console.quiet:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def add(self, chunk: Chunk, seconds: float) -> None:
        """Add what a forward gave, `seconds` of decoding after the question."""
        self.text.append_text(tinted(chunk.pieces))
        self._tokens += len(chunk.step.tokens)
        now = perf_counter()
        if self._live is not None and now - self._drawn_at > 1 / FRAMES_PER_SECOND:
            self._drawn_at = now
            clock = self._clock(seconds, self._tokens)
            self._live.update(Group(clock, self._last_lines()), refresh=True)

    def finish(self, answer: Run) -> None:
        """Replace what was drawn by the whole answer."""
        if self._live is not None:
            self._live.stop()
        self._console.print(self._clock(answer.stats.seconds, answer.stats.tokens))
        if self._shows_text:
            self._console.print(self.text, end="\n\n")

    def _clock(self, seconds: float, tokens: int) -> Text:
        """Return the line over the text."""
        speed = f"{tokens / seconds:5.1f} tokens/s" if seconds else ""
        return Text.assemble((f"{self._name:20}", "bold"), f"{seconds:5.1f} s   {speed}")

    def _last_lines(self) -> Text:
        """Return the end of the text, as much as the terminal has room for."""
        lines = self.text.wrap(self._console, self._console.width)
        room = max(self._console.height - MARGIN_LINES, 1)
        return Text("\n").join(lines[-room:])
