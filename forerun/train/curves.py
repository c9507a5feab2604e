"""Training curves of the pair as a picture."""

from __future__ import annotations

import json
from pathlib import Path

STAGES = {
    "target": "target, cross-entropy",
    "target-grown": "target at twice the depth",
    "draft-corpus": "draft on the corpus, cross-entropy",
    "draft": "draft distilled, KL to the target",
}


def read_log(path: Path) -> list[dict[str, float]]:
    """The records of a `log.jsonl` in step order; of steps that a resumed run did again, the later ones."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # cut by a kill
            continue
    return [record for _, record in sorted({record["step"]: record for record in records}.items())]


def plot_curves(work: Path, out: Path) -> None:
    """Draws loss (thin) and validation loss (dots) of each stage over the tokens it has seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = {stage: title for stage, title in STAGES.items() if (work / stage / "log.jsonl").exists()}
    figure, axes = pyplot.subplots(1, len(stages), figsize=(4.4 * len(stages), 3.6))
    for axis, (stage, title) in zip(axes, stages.items(), strict=True):
        seen, tokens, losses, held = 0.0, [], [], []
        for record in read_log(work / stage / "log.jsonl"):
            seen += record["tokens"] / 1e6
            tokens.append(seen)
            losses.append(record["loss"])
            if "validation" in record:
                held.append((seen, record["validation"]))
        axis.plot(tokens, losses, linewidth=0.5, alpha=0.6, label="training")
        axis.plot(*zip(*held, strict=True), marker="o", markersize=4, label="validation")
        axis.set(title=title, xlabel="million tokens", ylabel="nats a token")
        axis.set_ylim(0, min(max(losses), 1.6 * max(value for _, value in held)))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
