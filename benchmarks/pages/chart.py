"""Draws docs/speedup.svg, the README's chart, from the results of the Qwen pair.

    python -m benchmarks.pages.chart

`benchmarks/page.py` does it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "speed" / "qwen-coder"
OUT = ROOT / "docs" / "speedup.svg"
RUNS = {"greedy": "greedy.json", "temperature 1": "temperature-1.json"}
DATASETS = {"test.jsonl": ("own prompts", "#0072b2"), "humaneval": ("HumanEval as chat", "#e69f00")}
METHODS = {
    "llama-cpp": "llama.cpp",
    **{name: name for name in ("ar", "sd", "pacer", "suffix", "pacer-lyanna", "hybrid")},
}
LINES = (0.5, 1.0, 1.5, 2.0)  # speedups that have a line

# Pixels.
LEFT = 90  # of the names
TOP = 52
SPEEDUP = 100  # of a speedup of 1
BAR = 11
GROUP = 30  # of the bars of a method
PANEL = 380
KEY = 170  # of an entry of the key
BOTTOM = TOP + GROUP * len(METHODS)
WIDTH = LEFT + PANEL * len(RUNS)
HEIGHT = BOTTOM + 22


def chart() -> str:
    """Return the SVG: a panel of speedups over `ar` for both ways of decoding."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>',
        "<title>Speedup over plain decoding: Qwen2.5-Coder 1.5B</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for column, (title, file) in enumerate(RUNS.items()):
        datasets = json.loads((RESULTS / file).read_text())["datasets"]
        lines += panel(column, title, datasets)
    return "\n".join([*lines, *key(), "</svg>", ""])


def panel(column: int, title: str, datasets: dict[str, Any]) -> list[str]:
    """Return the panel of one run, with two bars for each method; the first one names them."""
    left = LEFT + column * PANEL
    lines = [label(left, 40, title, "start", 'font-weight="bold"')]
    for speedup in LINES:
        x = left + speedup * SPEEDUP
        dashes = "" if speedup == 1 else ' stroke-dasharray="2 3"'
        lines.append(f'<path d="M{x:.0f} {TOP}V{BOTTOM}" stroke="#999"{dashes}/>')
        lines.append(label(x, BOTTOM + 14, f"{speedup:g}", "middle"))
    for row, (method, name) in enumerate(METHODS.items()):
        top = TOP + 4 + row * GROUP
        if column == 0:
            lines.append(label(left - 8, top + BAR + 4, name, "end"))
        for number, (dataset, (_, colour)) in enumerate(DATASETS.items()):
            figures = datasets[dataset]["methods"].get(method)
            if figures is not None:
                lines += bar(left, top + number * BAR, figures["speedup"], colour)
    return lines


def bar(left: int, y: int, speedup: float, colour: str) -> list[str]:
    """Return a bar and its figure."""
    width = speedup * SPEEDUP
    shape = f'x="{left}" y="{y}" width="{width:.0f}" height="{BAR - 1}"'
    figure = label(left + width + 4, y + 9, f"{speedup:.2f}", "start", 'font-size="10"')
    return [f'<rect {shape} fill="{colour}"/>', figure]


def key() -> list[str]:
    """Return the names of the datasets, with their colours."""
    lines = []
    for number, (name, colour) in enumerate(DATASETS.values()):
        left = LEFT + KEY * number
        lines.append(f'<rect x="{left}" y="8" width="10" height="10" fill="{colour}"/>')
        lines.append(label(left + 16, 17, name, "start"))
    return lines


def label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    """Return a text at a place."""
    attributes = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {more}'.rstrip()
    return f"<text {attributes}>{text}</text>"


if __name__ == "__main__":
    OUT.write_text(chart(), encoding="utf-8")
    print(OUT)
