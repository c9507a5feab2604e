"""Draws docs/images/race.svg, the picture of README, from the results of Qwen2.5-Coder 1.5B.

    python -m benchmarks.pages.race

Each bar takes the time that 128 tokens took, so the picture is a race at true speed. A viewer that
does not animate shows how it ends. `benchmarks/page.py` writes it too.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "speed" / "qwen-coder" / "greedy.json"
OUT = ROOT / "docs" / "images" / "race.svg"
DATASET = "humaneval"
TOKENS = 128
RUNNERS = {
    "hybrid": ("forerun", "#0072b2"),
    "ar": ("plain decoding", "#999999"),
    "llama-cpp": ("llama.cpp", "#e69f00"),
}
PAUSE = 2.0  # seconds between two races

# Pixels.
LEFT = 120  # of the names
SECOND = 90  # of a second
TOP = 46
LANE = 40
BAR = 24
WIDTH = 860


def race() -> str:
    """Return the SVG: a lane for each runner, and a clock at its end."""
    methods = json.loads(RESULTS.read_text())["datasets"][DATASET]["methods"]
    seconds = {name: TOKENS / methods[name]["tokens_per_s"] for name in RUNNERS}
    lap = max(seconds.values()) + PAUSE
    height = TOP + LANE * len(RUNNERS) + 8
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    title = f"{TOKENS} tokens of Qwen2.5-Coder 1.5B on two CPU cores"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15">',
        f"<title>{title}</title>",
        '<rect width="100%" height="100%" rx="6" fill="#fff"/>',
        f'<text x="{LEFT}" y="28" fill="#222" font-weight="bold">{title}</text>',
    ]
    for number, (method, (name, colour)) in enumerate(RUNNERS.items()):
        speedup = seconds["ar"] / seconds[method]
        ending = f"{seconds[method]:.1f} s" + ("" if method == "ar" else f", {speedup:.1f} times")
        lines += lane(number, name, colour, seconds[method], lap)
        x = LEFT + seconds[method] * SECOND + 8
        lines.append(f'<text x="{x:.0f}" y="{text_line(number)}" fill="#222">{ending}</text>')
    return "\n".join([*lines, "</svg>", ""])


def lane(number: int, name: str, colour: str, seconds: float, lap: float) -> list[str]:
    """Return the name of a runner and its bar, which grows for `seconds` of each `lap`."""
    width = seconds * SECOND
    shape = f'x="{LEFT}" y="{TOP + number * LANE}" width="{width:.0f}" height="{BAR}" rx="3"'
    times = f'keyTimes="0;{seconds / lap:.4f};1" dur="{lap:.2f}s" repeatCount="indefinite"'
    return [
        f'<text x="{LEFT - 10}" y="{text_line(number)}" text-anchor="end">{name}</text>',
        f'<rect {shape} fill="{colour}">',
        f'<animate attributeName="width" values="0;{width:.0f};{width:.0f}" {times}/>',
        "</rect>",
    ]


def text_line(number: int) -> int:
    """Return the baseline of a lane's texts."""
    return TOP + number * LANE + 17


if __name__ == "__main__":
    OUT.write_text(race(), encoding="utf-8")
    print(OUT)
