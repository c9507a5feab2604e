"""Gains by how much an output repeats itself, from a run of `forerun bench`.

    python -m benchmarks.speed.repetition OUT docs/results/ouroboros/repetition.png

The run must have prompt lookup (`benchmarks.baselines.lookup:Lookup`) among its methods, because
the tokens per forward of prompt lookup say how much an output repeats itself.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from forerun.bench.records import parse
from forerun.engine.stats import Stats

PARTS = 5  # of the outputs, from those that repeat least to those that repeat most
RATIOS = [
    ("ouroboros", "sd"),
    ("pacer", "sd"),
    ("pacer-ouroboros", "sd"),
    ("pacer-ouroboros", "pacer"),
]
LOOKUP = "benchmarks.baselines.lookup:Lookup"

Speeds = dict[str, float]


def parts_of(out: Path) -> list[list[tuple[float, Speeds]]]:
    """Return tau of prompt lookup and tokens/s of each method, in parts by growing tau."""
    groups: dict[tuple, dict[str, Stats]] = defaultdict(dict)
    for record in map(parse, (out / "records.jsonl").read_text().splitlines()):
        groups[record.group][record.method] = record.stats
    rows = []
    for group in groups.values():
        speeds = {name: stats.tokens_per_s for name, stats in group.items()}
        rows.append((group[LOOKUP].tau, speeds))
    rows.sort(key=lambda row: row[0])
    ends = [number * len(rows) // PARTS for number in range(PARTS + 1)]
    return [rows[ends[number] : ends[number + 1]] for number in range(PARTS)]


def middle_tau(part: list[tuple[float, Speeds]]) -> float:
    return median(tau for tau, _ in part)


def gain(part: list[tuple[float, Speeds]], one: str, other: str) -> float:
    """Return the median ratio of two methods' tokens/s."""
    return median(speeds[one] / speeds[other] for _, speeds in part)


def main(out: Path, picture: Path) -> None:
    """Plot and print the ratios of methods by how much outputs repeat themselves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = parts_of(out)
    middles = [middle_tau(part) for part in parts]
    titles = [f"`{one}` / `{other}`" for one, other in RATIOS]
    print(f"| tau of `lookup` | {' | '.join(titles)} |")
    print("|---|" + "---:|" * len(RATIOS))
    for part in parts:
        cells = [f"{gain(part, one, other):.2f}" for one, other in RATIOS]
        print(f"| {part[0][0]:.1f} to {part[-1][0]:.1f} | {' | '.join(cells)} |")
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for one, other in RATIOS:
        gains = [gain(part, one, other) for part in parts]
        axes.plot(middles, gains, "o-", label=f"{one} / {other}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(
        xlabel="tokens per forward of prompt lookup: how much the output repeats",
        ylabel="tokens/s, ratio",
    )
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
