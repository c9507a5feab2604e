"""Markdown on a terminal while it is being written.

Blocks that are complete (a paragraph, a list, a block of code) are printed once and scroll away;
only the block at the end is drawn again as it grows, and of a long one only its last lines.
"""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from forerun.cli.writing import without_controls

# rich would leave HTML out, but what the model says must be seen.
_PARSER = MarkdownIt(options_update={"html": False}).enable(["table", "strikethrough"])
_REDRAW_SECONDS = 0.08  # between two drawings of the block at the end
_SPARE_LINES = 2  # of the terminal, which the block at the end leaves free


class MarkdownStream:
    """A text in Markdown that is written to a terminal as it grows; to be used in a `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""  # what is not printed for good yet
        self._lines = 0  # how many lines of it are on the terminal
        self._has_printed = False
        self._drawn_at = float("-inf")

    def __enter__(self) -> MarkdownStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Print what is left, also after an error, because the conversation keeps it."""
        self._erase()
        for block in blocks(self._rest):
            self._print(block)
        self._rest = ""

    def push(self, text: str) -> None:
        """Add text to the end."""
        self._rest += without_controls(text)
        *complete, self._rest = blocks(self._rest)
        if complete:
            self._erase()
        for block in complete:
            self._print(block)
        if complete or perf_counter() - self._drawn_at >= _REDRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        """Draw the block at the end in place of its last drawing."""
        self._erase()
        room = max(1, self._console.height - _SPARE_LINES)
        lines = self._render(self._rest)[-room:]
        self._write(lines)
        self._lines = len(lines)
        self._drawn_at = perf_counter()

    def _erase(self) -> None:
        """Remove the last drawing of the block at the end."""
        if self._lines:
            self._console.file.write(f"\x1b[{self._lines}F\x1b[J")
            self._lines = 0

    def _print(self, text: str) -> None:
        """Print a block for good."""
        lines = self._render(text)
        self._write(lines)
        self._has_printed = self._has_printed or bool(lines)

    def _render(self, text: str) -> list[list[Segment]]:
        """Return the lines of a text, behind an empty one if there is text above."""
        markdown = Markdown(text)
        markdown.parsed = _PARSER.parse(text)
        lines = self._console.render_lines(markdown, pad=False)
        blank = [_is_blank(line) for line in lines]
        if all(blank):
            return []
        first = blank.index(False)
        last = len(blank) - blank[::-1].index(False)
        above: list[list[Segment]] = [[]] if self._has_printed else []
        return above + lines[first:last]

    def _write(self, lines: list[list[Segment]]) -> None:
        for line in lines:
            self._console.print(Segments([*line, Segment.line()]), end="", soft_wrap=True)
        self._console.file.flush()


def _is_blank(line: list[Segment]) -> bool:
    """Return whether a line shows nothing."""
    return not any(segment.text.strip() for segment in line)


def blocks(text: str) -> list[str]:
    """Return the blocks of a text, which together are the text. Only the last may still change."""
    tokens = _PARSER.parse(text)
    starts = [token.map[0] for token in tokens if token.map and token.level == 0 and token.map[0]]
    lines = text.split("\n")
    parts = []
    for first, last in zip([0, *starts], [*starts, len(lines)], strict=True):
        part = "\n".join(lines[first:last])
        parts.append(part if last == len(lines) else part + "\n")
    return parts
