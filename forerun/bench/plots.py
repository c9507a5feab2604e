"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from forerun.bench.load import Served, rows_over_time
from forerun.bench.profile import PHASES


def save_plots(methods: dict[str, Any], folder: Path, profile: bool) -> list[str]:
    """Draws what there is to draw; returns the names of the files."""
    pictures = [_speedup(methods, folder)]
    if any(method["acceptance_by_position"] for method in methods.values()):
        pictures.append(_acceptance(methods, folder))
    pictures.append(_stacked(methods, folder, "time", "share of step time"))
    if profile:
        pictures.append(_stacked(methods, folder, "step_ms", "ms a step", "profile.png"))
    return pictures


def plot_rows(methods: dict[str, list[Served]], path: Path) -> None:
    """Draws how many requests of a load are open, and how many have their first token, over time."""
    figure, axes = plt.subplots(len(methods), figsize=(8, 1.6 * len(methods) + 0.6), sharex=True, squeeze=False)
    for (name, served), own in zip(methods.items(), axes[:, 0], strict=True):
        own.step(*rows_over_time(served, lambda one: one.due), where="post", color="#adb5bd", label="open")
        own.step(*rows_over_time(served, lambda one: one.times[0]), where="post", color="#264653", label="decoding")
        own.set(ylim=(0, None))
        own.set_title(name, loc="left", fontsize="small")
    axes[0, 0].legend(fontsize=8)
    axes[-1, 0].set_xlabel("seconds")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _speedup(methods: dict[str, Any], folder: Path) -> str:
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(methods) + 1.2))
    for place, method in enumerate(methods.values()):
        middle, low, high = method["speedup"], method["speedup_p10"], method["speedup_p90"]
        axes.barh(place, middle, color=PHASES["draft"], xerr=[[middle - low], [high - middle]], capsize=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("tokens/s over plain decoding: median, 10th to 90th percentile")
    return _save(figure, axes, list(methods), folder / "speedup.png")


def _acceptance(methods: dict[str, Any], folder: Path) -> str:
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, method in methods.items():
        shares = method["acceptance_by_position"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set(xlabel="position in the draft", ylabel="accepted, of drafts that reached it", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(folder / "acceptance.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    return "acceptance.png"


def _stacked(methods: dict[str, Any], folder: Path, key: str, label: str, file: str = "time.png") -> str:
    timed = {name: method[key] for name, method in methods.items() if method[key]}
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(timed) + 1.2))
    for place, phases in enumerate(timed.values()):
        left = 0.0
        for phase, colour in PHASES.items():
            axes.barh(place, phases[phase], left=left, color=colour, label=phase if place == 0 else None)
            left += phases[phase]
    axes.set_xlabel(label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, axes, list(timed), folder / file)


def _save(figure: Any, axes: Any, names: list[str], path: Path) -> str:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path.name
