"""A run as something to read: report.md and pictures, from the results.json in its folder.

python -m benchmarks.speed.report RUN
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.peers.runners import (
    ASSISTED,
    FORWARD,
    LLAMA_NGRAM,
    LLAMA_TOKENS,
    is_llama,
    is_transformers,
)
from forerun.bench.plan import Plan
from forerun.bench.report import COLUMNS, PHASES, row, sections
from forerun.files import read_text, write_text
from forerun.zoo import EMBEDDED


def write_report(out: Path) -> None:
    """Writes report.md and the pictures into the folder of a run."""
    results = json.loads(read_text(out / "results.json"))
    write_text(out / "report.md", markdown(results, save_plots(results["methods"], out)))


def markdown(results: dict[str, Any], pictures: list[str]) -> str:
    """report.md."""
    lines = front(results, command(results["arguments"]))
    for title, methods in sections(results):
        lines += [f"## {title}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        lines += [
            "| " + " | ".join(named_row(name, method)) + " |" for name, method in methods.items()
        ]
        lines.append("")
    if "tuned" in results:
        lines += [f"Best by median speedup: `{results['tuned']}`.", ""]
    lines += ["## How to read it", "", *_notes(results), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    return "\n".join(lines).rstrip() + "\n"


def named_row(name: str, method: dict[str, Any]) -> list[str]:
    """One method's line of a table; the best of several settings with what these are."""
    return row(f"{name} ({method['schedule']})" if "schedule" in method else name, method)


def command(arguments: dict[str, Any]) -> str:
    """The command that makes such a run, with names instead of paths."""
    words = ["python", "-m", "benchmarks.peers.bench"]
    tuned = arguments["tune"].partition("=")[0] if arguments["tune"] else None
    words += (
        ["--tune", arguments["tune"]] if tuned else ["--methods", ",".join(arguments["methods"])]
    )
    settings = {
        f"{own_name(name)}.{key}": value
        for name, each in arguments["methods"].items()
        if not is_llama(name) and not is_transformers(name)
        for key, value in each.items()
    }
    words += [
        word
        for key, value in settings.items()
        if key != tuned
        for word in ("--method-arg", f"{key}={value}")
    ]
    words += ["--dataset", ",".join(arguments["datasets"])]
    usual = {each.name: each.default for each in fields(Plan)}
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if name in ("methods", "datasets", "tune", "context", "reference") or value in (
            None,
            False,
            usual.get(name),
        ):
            continue
        if (name, value) == ("draft", EMBEDDED):
            continue
        if isinstance(value, list):
            words += [word for each in value for word in (option, str(each))]
        else:
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def own_name(name: str) -> str:
    """The method of ours that a run's name stands for: without its tuned value, and without what it runs on."""
    return name.removeprefix(f"{FORWARD}/").partition(".")[0]


def front(results: dict[str, Any], command: str) -> list[str]:
    """Title, where it was measured, and the command."""
    arguments, versions = results["arguments"], results["versions"]
    return [
        f"# Benchmark of {arguments['target']}"
        + (f" with {arguments['draft']}" if arguments["draft"] else ""),
        "",
        f"{results['date']}, {versions['gpu'] or versions['cpu']}, {versions['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, forerun {versions['forerun']}"
        f"{' at ' + versions['commit'] if versions['commit'] else ''}.",
        "",
        "```",
        command,
        "```",
        "",
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    notes = [
        "- tokens/s is the median over prompts and rounds, prefill included. speedup is the median of tokens/s over "
        "`ar`'s on the same prompts in the same round, with its 10th and 90th percentile.",
        "- decoding: the median of the same ratio without the time of reading prompts.",
        "- tau: tokens a target forward, of a row. alpha: accepted / tested draft tokens. utilisation: accepted / "
        "drafted. overhead: share of step time outside the models' forwards, its median over the measurements.",
    ]
    methods = results["methods"]
    if results["reference"]:
        notes.append(
            f"- same tokens: share of outputs equal to greedy `{results['reference']}`, token for token."
        )
    else:
        notes.append(
            "- Sampled: outputs are from one distribution and differ from method to method."
        )
    if any(map(is_transformers, methods)):
        notes.append(
            "- `hf-` methods are transformers' own `generate` on the same weights, loaded apart. `hf-assisted` is the "
            "best of its settings by median tokens/s, chosen in each table after the run, which favours it."
        )
        if results["versions"]["scikit-learn"] is None and any(
            name.startswith(ASSISTED) for name in methods
        ):
            notes.append(
                "- Without scikit-learn the threshold of transformers' assistant stays as it is."
            )
    if any(name.startswith(f"{FORWARD}/") for name in methods):
        notes.append(
            f"- `{FORWARD}/METHOD` is our method on transformers' own forwards of target and draft: the speedup that "
            "it has there does not come from our forwards. A file in few bits is in float32 there."
        )
    if any(is_llama(name) for name in methods):
        notes.append(
            "- `llama-cpp` is llama.cpp, in node-llama-cpp's build for this processor, on the same file, token ids and "
            f"number of threads; `llama-cpp-lookup/TOKENS/NGRAM` is its prompt lookup ({LLAMA_TOKENS} and "
            f"{LLAMA_NGRAM} if none are given), `llama-cpp-draft/TOKENS/CONFIDENCE` its draft model. None keeps "
            "anything of the prompts before."
        )
    if results["arguments"]["batch"] > 1 and any(
        method["rows_one_by_one"] for method in methods.values()
    ):
        names = ", ".join(
            f"`{name}`" for name, method in methods.items() if method["rows_one_by_one"]
        )
        notes.append(
            f"- transformers refuses batches for {names}: their rows ran one after another."
        )
    return notes


def save_plots(methods: dict[str, Any], folder: Path) -> list[str]:
    """Draws what there is to draw; returns the names of the files."""
    pictures = [_speedup(methods, folder)]
    if any(method["acceptance_by_position"] for method in methods.values()):
        pictures.append(_acceptance(methods, folder))
    return [*pictures, _time(methods, folder)]


def _speedup(methods: dict[str, Any], folder: Path) -> str:
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(methods) + 1.2))
    for place, method in enumerate(methods.values()):
        middle, low, high = method["speedup"], method["speedup_p10"], method["speedup_p90"]
        axes.barh(
            place, middle, color=PHASES["draft"], xerr=[[middle - low], [high - middle]], capsize=3
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("tokens/s over plain decoding: median, 10th to 90th percentile")
    return _save(figure, axes, list(methods), folder / "speedup.png")


def _acceptance(methods: dict[str, Any], folder: Path) -> str:
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, method in methods.items():
        shares = method["acceptance_by_position"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set(
        xlabel="position in the draft", ylabel="accepted, of drafts that reached it", ylim=(0, 1.02)
    )
    axes.legend()
    figure.savefig(folder / "acceptance.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    return "acceptance.png"


def _time(methods: dict[str, Any], folder: Path) -> str:
    timed = {name: method["time"] for name, method in methods.items() if method["time"]}
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(timed) + 1.2))
    for place, phases in enumerate(timed.values()):
        left = 0.0
        for phase, colour in PHASES.items():
            axes.barh(
                place, phases[phase], left=left, color=colour, label=phase if place == 0 else None
            )
            left += phases[phase]
    axes.set_xlabel("share of step time")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, axes, list(timed), folder / "time.png")


def _save(figure: Any, axes: Any, names: list[str], path: Path) -> str:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path.name


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
