"""Gains by how much an output repeats itself, from a run of `forerun bench` with prompt lookup
(`benchmarks.baselines.lookup:Lookup`) among its methods: the tokens that this gets
accepted a forward say how much that is.

    python -m benchmarks.speed.repetition OUT docs/results/ouroboros/repetition.png
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from forerun.bench.records import parse
from forerun.engine.stats import Stats

PARTS = 5
RATIOS = [
    ("ouroboros", "sd"),
    ("pacer", "sd"),
    ("pacer-ouroboros", "sd"),
    ("pacer-ouroboros", "pacer"),
]
LOOKUP = "benchmarks.baselines.lookup:Lookup"


def main(out: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple, dict[str, Stats]] = defaultdict(dict)
    for record in map(parse, (out / "records.jsonl").read_text().splitlines()):
        groups[record.group][record.method] = record.stats
    rows = [
        (
            group[LOOKUP].tau,
            {name: stats.tokens_per_s for name, stats in group.items()},
        )
        for group in groups.values()
    ]
    rows.sort(key=lambda row: row[0])
    parts = [rows[at * len(rows) // PARTS : (at + 1) * len(rows) // PARTS] for at in range(PARTS)]
    middles = [median(found for found, _ in part) for part in parts]
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    print(
        "| tau of `lookup` | " + " | ".join(f"`{one}` / `{other}`" for one, other in RATIOS) + " |"
    )
    print("|---|" + "---:|" * len(RATIOS))
    gains = [
        [median(speed[one] / speed[other] for _, speed in part) for one, other in RATIOS]
        for part in parts
    ]
    for part, row in zip(parts, gains, strict=True):
        print(
            f"| {part[0][0]:.1f} to {part[-1][0]:.1f} | "
            + " | ".join(f"{gain:.2f}" for gain in row)
            + " |"
        )
    for number, (one, other) in enumerate(RATIOS):
        axes.plot(middles, [row[number] for row in gains], "o-", label=f"{one} / {other}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(
        xlabel="tokens a forward that prompt lookup gets: how much the output repeats",
        ylabel="tokens/s, ratio",
    )
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
