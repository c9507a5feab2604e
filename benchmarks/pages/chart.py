"""Draws docs/speedup.svg, the README's chart, from the results of the Qwen pair. `benchmarks/page.py` does it too.

python -m benchmarks.pages.chart
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "speedup.svg"
RUNS = {"greedy": "qwen-coder/greedy.json", "temperature 1": "qwen-coder/temperature-1.json"}
DATASETS = {"test.jsonl": ("own prompts", "#0072b2"), "humaneval": ("HumanEval as chat", "#e69f00")}
METHODS = {
    "llama-cpp": "llama.cpp",
    **{name: name for name in ("ar", "sd", "pacer", "suffix", "pacer-lyanna", "hybrid")},
}
LEFT, SCALE, BAR, GROUP, PANEL = 90, 100, 11, 30, 380  # pixels; SCALE is that of a speedup of 1


def chart() -> str:
    """The SVG: for both ways of decoding a panel of speedups over `ar`, two bars a method."""
    parts, top = [], 52
    bottom = top + GROUP * len(METHODS)
    for column, (name, file) in enumerate(RUNS.items()):
        found = json.loads((ROOT / "benchmarks" / file).read_text())["datasets"]
        left = LEFT + column * PANEL
        parts.append(label(left, 40, name, "start", 'font-weight="bold"'))
        for line in (0.5, 1.0, 1.5, 2.0):
            x = left + line * SCALE
            dashes = "" if line == 1 else ' stroke-dasharray="2 3"'
            parts.append(f'<path d="M{x:.0f} {top}V{bottom}" stroke="#999"{dashes}/>')
            parts.append(label(x, bottom + 14, f"{line:g}", "middle"))
        for row, (method, shown) in enumerate(METHODS.items()):
            y = top + 4 + row * GROUP
            if not column:
                parts.append(label(left - 8, y + BAR + 4, shown, "end"))
            for number, (dataset, (_, colour)) in enumerate(DATASETS.items()):
                figures = found[dataset]["methods"].get(method)
                if figures is None:
                    continue
                width, at = figures["speedup"] * SCALE, y + number * BAR
                parts.append(
                    f'<rect x="{left}" y="{at}" width="{width:.0f}" height="{BAR - 1}" fill="{colour}"/>'
                )
                parts.append(
                    label(
                        left + width + 4,
                        at + 9,
                        f"{figures['speedup']:.2f}",
                        "start",
                        'font-size="10"',
                    )
                )
    for number, (shown, colour) in enumerate(DATASETS.values()):
        parts.append(
            f'<rect x="{LEFT + 170 * number}" y="8" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(label(LEFT + 16 + 170 * number, 17, shown, "start"))
    wide, high = LEFT + PANEL * len(RUNS), bottom + 22
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    title = "<title>Speedup over plain decoding: Qwen2.5-Coder 1.5B</title>"
    return "\n".join(
        [
            f"{head} {style}>",
            title,
            '<rect width="100%" height="100%" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {more}>{text}</text>'.replace(
        " >", ">"
    )


if __name__ == "__main__":
    OUT.write_text(chart(), encoding="utf-8")
    print(OUT)
