"""Draws docs/demo.svg: what `forerun demo` shows on a terminal, for the README."""

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
    panes, rates, outputs = [], [], []
    for method in ("ar", "sd"):
        decoder = forerun.load(method=method)
        assert decoder.tokenizer is not None
        prompt = held_out_prompts(decoder.tokenizer, "test", count=PROMPT + 1)[PROMPT]
        decoder.generate(prompt, max_new_tokens=16)
        text = Text()
        for chunk in decoder.stream(prompt, max_new_tokens=96):
            for piece, origin in chunk.pieces:
                text.append(piece, style=STYLES.get(origin, "") if method != "ar" else "")
        result = decoder.generate(prompt, max_new_tokens=96)
        stats = result.stats
        rates.append(stats.tokens_per_s)
        outputs.append(result.tokens)
        panes.append(Panel(text, title=f"{method}: {stats.tokens_per_s:.0f} tokens/s, tau {stats.tau:.2f}"))
    assert outputs[0] == outputs[1]
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*panes)
    console = Console(record=True, width=120, force_terminal=True, color_system="truecolor")
    shown = Panel(Text(str(decoder.tokenizer.decode(prompt)), style="dim"), title="prompt (held-out stdlib code)")
    verdict = Text(f"the same tokens, {rates[1] / rates[0]:.2f} times as fast; green: drafted, red: corrected")
    console.print(Group(shown, grid, verdict))
    (Path(__file__).parents[1] / "docs" / "demo.svg").write_text(console.export_svg(title="forerun demo"))


if __name__ == "__main__":
    main()
