"""A report of a run: report.md and pictures, from the results.json in its folder.

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

# Arguments of a plan that `command` writes in another way, or that follow from the others.
WRITTEN_APART = ("methods", "datasets", "tune", "context", "reference")


def write_report(out: Path) -> None:
    """Write report.md and the pictures into the folder of a run."""
    results = json.loads(read_text(out / "results.json"))
    write_text(out / "report.md", markdown(results, save_plots(results["methods"], out)))


def markdown(results: dict[str, Any], pictures: list[str]) -> str:
    """Return the text of report.md."""
    lines = front(results, command(results["arguments"]))
    for title, methods in sections(results):
        lines += [f"## {title}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        lines += ["| " + " | ".join(named_row(*method)) + " |" for method in methods.items()]
        lines.append("")
    if "tuned" in results:
        lines += [f"Best by median speedup: `{results['tuned']}`.", ""]
    lines += ["## How to read it", "", *_notes(results), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    return "\n".join(lines).rstrip() + "\n"


def named_row(name: str, method: dict[str, Any]) -> list[str]:
    """Return the cells of one method; the best of several settings is named with its settings."""
    return row(f"{name} ({method['schedule']})" if "schedule" in method else name, method)


def command(arguments: dict[str, Any]) -> str:
    """Return the command that makes such a run, with names in place of paths."""
    words = ["python", "-m", "benchmarks.peers.bench"]
    tuned = arguments["tune"].partition("=")[0] if arguments["tune"] else None
    if tuned is not None:
        words += ["--tune", arguments["tune"]]
    else:
        words += ["--methods", ",".join(arguments["methods"])]
    for key, value in _settings(arguments["methods"]).items():
        if key != tuned:
            words += ["--method-arg", f"{key}={value}"]
    words += ["--dataset", ",".join(arguments["datasets"])]
    defaults = {field.name: field.default for field in fields(Plan)}
    for name, value in arguments.items():
        is_default = value in (None, False, defaults.get(name))
        if name in WRITTEN_APART or is_default or (name, value) == ("draft", EMBEDDED):
            continue
        words += _option("--" + name.replace("_", "-"), value)
    return shlex.join(words)


def _settings(methods: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of our methods, as --method-arg names them."""
    settings = {}
    for name, values in methods.items():
        if not is_llama(name) and not is_transformers(name):
            method = our_method(name)
            settings |= {f"{method}.{key}": value for key, value in values.items()}
    return settings


def _option(option: str, value: Any) -> list[str]:
    """Return the words that give an option its value."""
    if value is True:
        return [option]
    words = []
    for part in value if isinstance(value, list) else [value]:
        words += [option, str(part)]
    return words


def our_method(name: str) -> str:
    """Return the method of ours that a run's name stands for.

    A name may also have the value that is tuned, or the program whose forwards run.
    """
    return name.removeprefix(f"{FORWARD}/").partition(".")[0]


def front(results: dict[str, Any], command: str) -> list[str]:
    """Return the title, where the run was measured, and its command."""
    arguments = results["arguments"]
    versions = results["versions"]
    draft = f" with {arguments['draft']}" if arguments["draft"] else ""
    commit = f" at {versions['commit']}" if versions["commit"] else ""
    return [
        f"# Benchmark of {arguments['target']}{draft}",
        "",
        f"{results['date']}, {versions['gpu'] or versions['cpu']}, {versions['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"forerun {versions['forerun']}{commit}.",
        "",
        "```",
        command,
        "```",
        "",
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    """Return the lines that say how the tables are read."""
    methods = results["methods"]
    notes = [
        "- tokens/s is the median over prompts and rounds, prefill included. speedup is the median "
        "of tokens/s over `ar`'s on the same prompts in the same round, with its 10th and 90th "
        "percentile.",
        "- decoding: the median of the same ratio without the time of reading prompts.",
        "- tau: tokens per target forward and row. alpha: accepted / tested draft tokens. "
        "utilisation: accepted / drafted. overhead: share of step time outside the models' "
        "forwards, its median over the measurements.",
    ]
    if results["reference"]:
        notes.append(
            f"- same tokens: share of outputs equal to greedy `{results['reference']}`, token for "
            "token."
        )
    else:
        notes.append(
            "- Sampled: outputs are from one distribution and differ from method to method."
        )
    notes += _notes_on_transformers(results)
    if any(map(is_llama, methods)):
        notes.append(
            "- `llama-cpp` is llama.cpp, in node-llama-cpp's build for this processor, on the same "
            "file, token ids and number of threads; `llama-cpp-lookup/TOKENS/NGRAM` is its prompt "
            f"lookup ({LLAMA_TOKENS} and {LLAMA_NGRAM} if none are given), "
            "`llama-cpp-draft/TOKENS/CONFIDENCE` its draft model. None keeps anything of the "
            "prompts before."
        )
    slow = [f"`{name}`" for name, method in methods.items() if method["rows_one_by_one"]]
    if results["arguments"]["batch"] > 1 and slow:
        names = ", ".join(slow)
        notes.append(
            f"- transformers refuses batches for {names}: their rows ran one after another."
        )
    return notes


def _notes_on_transformers(results: dict[str, Any]) -> list[str]:
    methods = results["methods"]
    notes = []
    if any(map(is_transformers, methods)):
        notes.append(
            "- `hf-` methods are transformers' own `generate` on the same weights, loaded apart. "
            "`hf-assisted` is the best of its settings by median tokens/s, chosen in each table "
            "after the run, which favours it."
        )
        has_assistant = any(name.startswith(ASSISTED) for name in methods)
        if has_assistant and results["versions"]["scikit-learn"] is None:
            notes.append(
                "- Without scikit-learn the threshold of transformers' assistant does not adapt."
            )
    if any(name.startswith(f"{FORWARD}/") for name in methods):
        notes.append(
            f"- `{FORWARD}/METHOD` is our method on transformers' own forwards of target and "
            "draft: its speedup there does not come from our forwards. A file in few bits is in "
            "float32 there."
        )
    return notes


def save_plots(methods: dict[str, Any], folder: Path) -> list[str]:
    """Draw what there is to draw, and return the names of the files."""
    pictures = [_speedup(methods, folder)]
    if any(method["acceptance_by_position"] for method in methods.values()):
        pictures.append(_acceptance(methods, folder))
    return [*pictures, _time(methods, folder)]


def _speedup(methods: dict[str, Any], folder: Path) -> str:
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(methods) + 1.2))
    for place, method in enumerate(methods.values()):
        middle = method["speedup"]
        low = method["speedup_p10"]
        high = method["speedup_p90"]
        error = [[middle - low], [high - middle]]
        axes.barh(place, middle, color=PHASES["draft"], xerr=error, capsize=3)
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
            label = phase if place == 0 else None
            axes.barh(place, phases[phase], left=left, color=colour, label=label)
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
