"""Where the time of a step goes, in figures and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.engine.engine import Step
from forerun.engine.stats import times

PHASES = {"draft": "#2a9d8f", "policy": "#e9c46a", "verify": "#264653", "rest": "#adb5bd"}


def profile_line(steps: Sequence[Step]) -> str:
    """One line: mean ms of a step, its phases, and the share that is not inside forwards of the models."""
    spent = times([steps])
    each = 1000 / max(1, spent.steps)
    split = ", ".join(f"{name} {each * getattr(spent, name):.2f}" for name in PHASES)
    return (
        f"{spent.steps} steps of {each * spent.seconds:.2f} ms: {split}; "
        f"outside model forwards {spent.overhead_share:.1%}"
    )


def plot_steps(steps: Sequence[Step], path: Path) -> None:
    """Draws the phases of every step as stacked bars, with the tokens that each committed above it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 3.5), layout="constrained")
    each, bottom = [times([[step]]) for step in steps], [0.0] * len(steps)
    for name, colour in PHASES.items():
        heights = [1000 * getattr(spent, name) for spent in each]
        axes.bar(range(len(steps)), heights, 0.9, bottom, color=colour, label=name)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    for number, (step, top) in enumerate(zip(steps, bottom, strict=True)):
        axes.text(number, top, str(len(step.tokens)), ha="center", va="bottom", fontsize=6)
    axes.set(xlabel="step (above it: tokens committed)", ylabel="ms", title=profile_line(steps))
    axes.title.set_fontsize(9)
    axes.legend(ncols=len(PHASES), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
