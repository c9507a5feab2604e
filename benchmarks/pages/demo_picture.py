"""Draws docs/images/demo.svg for the README: the same tokens plainly and with drafts.

    python benchmarks/pages/demo_picture.py

It says how many forwards each took. It has no times, so it is the same on every machine with this
Python's standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import forerun
from forerun.cli.common import STYLES
from forerun.train.corpus import held_out_prompts

OUT = Path(__file__).parents[2] / "docs" / "images" / "demo.svg"
PROMPT = 8  # of the held-out prompts
TOKENS = 96


@dataclass(frozen=True)
class Output:
    """One way to decode, and its output."""

    text: Text
    tokens: list[int]
    forwards: int
    tau: float

    def panel(self, name: str) -> Panel:
        return Panel(self.text, title=f"{name}: {self.forwards} forwards, tau {self.tau:.2f}")


def decoded(method: str) -> tuple[Output, str]:
    """Return the output of a method, and the prompt's text."""
    decoder = forerun.load(method=method)
    assert decoder.tokenizer is not None
    prompt = held_out_prompts(decoder.tokenizer, "test", count=PROMPT + 1)[PROMPT]
    text = Text()
    for chunk in decoder.stream(prompt, max_new_tokens=TOKENS):
        for piece, origin in chunk.pieces:
            text.append(piece, style="" if method == "ar" else STYLES.get(origin, ""))
    result = decoder.generate(prompt, max_new_tokens=TOKENS)
    output = Output(text, result.tokens, result.stats.target_forwards, result.stats.tau)
    return output, str(decoder.tokenizer.decode(prompt))


def main() -> None:
    plain, prompt = decoded("ar")
    drafted, _ = decoded("sd")
    assert plain.tokens == drafted.tokens
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(plain.panel("plain decoding"), drafted.panel("with drafts"))
    shown = Panel(Text(prompt, style="dim"), title="prompt (held-out stdlib code)")
    verdict = Text(
        f"the same {len(plain.tokens)} tokens by {drafted.forwards} forwards of the model instead "
        f"of {plain.forwards}; "
    )
    verdict.append("green: drafted", style="green").append(", ")
    verdict.append("red: corrected", style="bold red")
    console = Console(record=True, width=120, force_terminal=True, color_system="truecolor")
    console.print(Group(shown, grid, verdict))
    OUT.write_text(console.export_svg(title="forerun"))


if __name__ == "__main__":
    main()
