"""Draws docs/demo.svg for the README: the same tokens plainly and with drafts, and how many forwards each took.

    python benchmarks/pages/demo_picture.py

It has no times, so it is the same on every machine with this Python's standard library.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import forerun
from forerun.cli.common import STYLES
from forerun.train.corpus import held_out_prompts

PROMPT = 8  # of the held-out prompts


def main() -> None:
    panes, forwards, outputs = [], [], []
    for method in ("ar", "sd"):
        decoder = forerun.load(method=method)
        assert decoder.tokenizer is not None
        prompt = held_out_prompts(decoder.tokenizer, "test", count=PROMPT + 1)[PROMPT]
        text = Text()
        for chunk in decoder.stream(prompt, max_new_tokens=96):
            for piece, origin in chunk.pieces:
                text.append(piece, style=STYLES.get(origin, "") if method != "ar" else "")
        result = decoder.generate(prompt, max_new_tokens=96)
        forwards.append(result.stats.target_forwards)
        outputs.append(result.tokens)
        name = "plain decoding" if method == "ar" else "with drafts"
        panes.append(
            Panel(text, title=f"{name}: {forwards[-1]} forwards, tau {result.stats.tau:.2f}")
        )
    assert outputs[0] == outputs[1]
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*panes)
    console = Console(record=True, width=120, force_terminal=True, color_system="truecolor")
    shown = Panel(
        Text(str(decoder.tokenizer.decode(prompt)), style="dim"),
        title="prompt (held-out stdlib code)",
    )
    verdict = Text(
        f"the same {len(outputs[0])} tokens by {forwards[1]} forwards of the model instead of {forwards[0]}; "
    )
    verdict.append("green: drafted", style="green").append(", ").append(
        "red: corrected", style="bold red"
    )
    console.print(Group(shown, grid, verdict))
    (Path(__file__).parents[2] / "docs" / "demo.svg").write_text(
        console.export_svg(title="forerun")
    )


if __name__ == "__main__":
    main()
