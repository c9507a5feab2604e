"""Writes the pages of results from the files that run.py left, and the README's chart.

    python -m benchmarks.page

The pages are docs/results/chat.md, embedded.md and qwen-coder.md. Runs that are not there are left
out. The end of a page, notes.md, is written by hand: what was wished for, what was missed, and why.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.pages.chart import OUT as CHART
from benchmarks.pages.chart import chart
from benchmarks.speed.report import named_row, save_plots
from forerun.bench.report import COLUMNS
from forerun.files import write_text
from forerun.zoo import FOLDERS, QWEN_CODER

Results = dict[str, Any]
# Positions that a head was trained on, and the shares accepted at each place by source.
Curve = list[tuple[int, dict[str, list[float]]]]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "speed"
PAGES = ROOT / "docs" / "results"
CHAT_TITLES = {
    "greedy": "Greedy, 128 new tokens",
    "greedy-xeon": "Greedy on an Intel Xeon (Emerald Rapids)",
    "greedy-avx2": "Greedy with AVX2 alone (`FORERUN_KERNELS=avx2`)",
    "greedy-512": "Greedy, 512 new tokens",
    "heads": "Heads over hidden states, greedy",
    "heads-1000": "Heads of 1,000 steps each, before the present one of Lyanna's",
    "nucleus": "Temperature 0.7, top-p 0.9",
    "temperature-1": "Temperature 1",
    "batch-4": "Batches of 4",
    "batch-8": "Batches of 8",
    "batch-8-1": "Batches of 8, temperature 1",
    "batch-16": "Batches of 16",
    "repeats": "Tasks that repeat themselves: a request after another one like it",
    "repeats-1": "The same at temperature 1",
    "repeats-8": "The same in batches of 8",
    "repeats-8-1": "The same in batches of 8, temperature 1",
    "transformers": "Beside transformers, in float32 what it decodes",
    "float32": "The target in float32",
}
CHAT_FRONT = """# A chat model

SmolLM2-135M-Instruct (30 layers, 49,152 tokens) from its GGUF file of 4 bits, on a CPU, with the
draft, layers and heads that come with forerun for it. `test` has prompts that the model wrote
itself, on which nothing was trained or tuned (`benchmarks/speed/chat/test.jsonl`). HumanEval's and
GSM8K's problems are put as messages. Answers end where the model ends them. `python
benchmarks/run.py --data DATA --only chat` makes the runs, `python -m benchmarks.page` this page.

`speedup` is the median over prompts and rounds of tokens/s over those of `ar` on the same prompt in
the same round, 10-90 % its spread; `decoding` is the same ratio without the time of reading
prompts. `by place` is the share of drafts that reached a place and were accepted there. The last
columns say where the time of decoding went. In batches the guard is on, as it is by default: drafts
are left out while they do not pay. In the other tables it is off, so that slower methods show. For
the rest see [measure.md](../measure.md).
"""
EMBEDDED_TITLES = {
    "greedy": "Greedy, 128 new tokens",
    "greedy-512": "Greedy, 512 new tokens",
    "temperature-1": "Temperature 1",
    "batch-4": "Batches of 4",
    "batch-16": "Batches of 16",
}
EMBEDDED_FRONT = """# The embedded pair, all methods

The pair that comes with forerun (21.1M and 1.6M parameters, [how it was made](pair.md)) on prompts
of standard-library code that no training file shares 80 characters with (`stdlib-test`, 128 tokens
each) and on HumanEval, in float32, on a CPU. Greedy output of a model this small loops, which
flatters every method. All methods that ran have a row. `python benchmarks/run.py --data DATA --only
embedded` makes the runs, `python -m benchmarks.page` this page.

`speedup` is the median over prompts and rounds of tokens/s over those of `ar` on the same prompts
in the same round, 10-90 % its spread. The guard is off, so that slower methods show.
`hf-forward/ar` and `hf-forward/sd` are our methods on transformers' own forwards: their gain does
not come from our forwards. For the rest see [measure.md](../measure.md).
"""
QWEN_TITLES = {
    "greedy": "Greedy, 128 new tokens",
    "rounds": "Greedy, three rounds of the methods that draft with the head",
    "long/1000": "Prompts of 1,000 tokens, 256 new ones",
    "long/4000": "Prompts of 4,000 tokens, 384 new ones",
    "long/16000": "Prompts of 16,000 tokens, 128 new ones",
    "long/known": "A follow-up in a known text of 4,000 tokens, 384 new ones",
    "long/1000-peers": "Beside llama.cpp's own drafts: prompts of 1,000 tokens",
    "long/4000-peers": "Beside llama.cpp's own drafts: prompts of 4,000 tokens",
    "long/16000-peers": "Beside llama.cpp's own drafts: prompts of 16,000 tokens, 64 new ones",
    "long/known-peers": (
        "Beside llama.cpp's own drafts: a follow-up in a known text of 4,000 tokens"
    ),
    "long/4000-avx2": "Prompts of 4,000 tokens with AVX2 alone (`FORERUN_KERNELS=avx2`)",
    "greedy-avx2": "Greedy with AVX2 alone (`FORERUN_KERNELS=avx2`)",
    "heads": "Beside an EAGLE-like head of the same size, steps and data, greedy",
    "own-avx2": "Own prompts with AVX2 alone",
    "peers": "Beside llama.cpp's own drafts, with the best settings of validation prompts",
    "temperature-1": "Temperature 1",
    "nucleus": "Temperature 0.7, top-p 0.9",
    "repeats": "Tasks that repeat themselves: a request after another one like it",
    "batch-4": "Batches of 4",
    "batch-16": "Batches of 16, 64 new tokens",
    "transformers": "Beside transformers, in float32 what it decodes",
    "oracle": (
        "Beside a rule that knows what will be rejected (`SeeingOracle`), with the draft model"
    ),
}
QWEN_FRONT = """# Qwen2.5-Coder 1.5B

Qwen's own Q4_K_M files of the 1.5B and of its draft, the 0.5B (`forerun fetch qwen-coder`), on a
CPU, with the head and the layer that come with forerun. `test` has prompts that the target wrote
itself and questions about the standard library's code, held out from all training
(`benchmarks/speed/qwen-coder/test.jsonl`). HumanEval's problems are put as messages. Answers end
where the model ends them. `python benchmarks/run.py --data DATA --only qwen-coder` makes the runs,
`python -m benchmarks.page` this page.

`lyanna` and `pacer-lyanna` draft with the head, `hybrid` with suffixes and the head; `sd`,
`cumulative`, `pacer` and `pacer-ouroboros` draft with the 0.5B. `llama-cpp` is llama.cpp in its
best build for the processor, on the same files, in the same run. Columns are those of
[chat.md](chat.md); `draft`, `stop rule` and `verify` share the time after the prompt, `prompt` is
the share of the whole call that reading the prompt takes, which every speedup contains. In batches
the guard is on, elsewhere off, so that slower methods show.

Tables up to that with AVX2 alone are of 28 November 2026 and an AMD EPYC (Zen 5). The others are of
an Intel Xeon (Emerald Rapids) and of the kernels before; each names its processor. These machines
are shared: where tau is 1.00 a method decodes plainly, and the difference of its speedup from 1.00
is noise.
"""


@dataclass(frozen=True)
class Page:
    """A page of results.

    Attributes:
        name: of its file, and of the folder of its results.
        front: its beginning.
        titles: titles of its runs, by their names.
    """

    name: str
    front: str
    titles: dict[str, str]


ALL_PAGES = (
    Page("chat", CHAT_FRONT, CHAT_TITLES),
    Page("embedded", EMBEDDED_FRONT, EMBEDDED_TITLES),
    Page("qwen-coder", QWEN_FRONT, QWEN_TITLES),
)
DRAWN = ("greedy", "temperature-1", "heads", "batch-4")  # runs with pictures
SETTINGS = ("gamma", "threshold", "depth", "block", "reuse", "other")  # that a page names
VERSIONS = ("kernels", "torch", "transformers", "llama-cpp-python", "node-llama-cpp")
MORE_COLUMNS = ("by place", "draft", "stop rule", "verify", "prompt")
PLACES = 5  # of a draft, whose acceptance is shown


def section(page: str, name: str, title: str, results: Results) -> list[str]:
    """Return the section of a run, and write its pictures."""
    lines = [f"## {title}", "", measured_by(name, results), ""]
    for dataset, part in results["datasets"].items():
        lines += [f"### {dataset}, {part['prompts']} prompts", "", *table(part["methods"]), ""]
    if name in DRAWN:
        lines += pictures(page, name, title, results["methods"])
    return lines


def measured_by(name: str, results: Results) -> str:
    """Return when, where, with which software and with which settings a run was measured."""
    arguments = results["arguments"]
    versions = results["versions"]
    software = [f"{part} {versions[part]}" for part in VERSIONS if versions.get(part)]
    methods = []
    for method, chosen in arguments["methods"].items():
        settings = [f"{key} {value}" for key, value in chosen.items() if key in SETTINGS]
        if settings:
            methods.append(f"`{method}` {', '.join(settings)}")
    return (
        f"{results['date']}, {versions['cpu']}, {versions['threads']} threads, "
        f"{', '.join(software)}, {versions['commit']}; {arguments['rounds']} rounds; "
        f"`{name}.json`. Settings: {'; '.join(methods)}."
    )


def table(methods: dict[str, Results]) -> list[str]:
    """Return the table of one dataset."""
    lines = [
        "| " + " | ".join([*COLUMNS, *MORE_COLUMNS]) + " |",
        "|---" + "|---:" * (len(COLUMNS) + len(MORE_COLUMNS) - 1) + "|",
    ]
    for method, figures in methods.items():
        lines.append("| " + " | ".join([*named_row(method, figures), *more_cells(figures)]) + " |")
    return lines


def more_cells(figures: Results) -> list[str]:
    """Return the cells of acceptance by place, and of where the time went."""
    places = [f"{share:.2f}" for share in (figures["acceptance_by_position"] or [])[:PLACES]]
    time = figures["time"] or {}
    shares = [
        f"{100 * time[key]:.0f} %" if key in time else "" for key in ("draft", "policy", "verify")
    ]
    prompt = figures.get("prompt_share", figures.get("prefill_share"))  # the name in older results
    return [" ".join(places), *shares, "" if prompt is None else f"{100 * prompt:.0f} %"]


def pictures(page: str, name: str, title: str, methods: dict[str, Results]) -> list[str]:
    """Write the pictures of a run, and return the lines that show them."""
    lines = []
    (PAGES / page).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for picture in save_plots(methods, Path(folder)):
            kept = Path(page) / f"{name}-{picture}"
            (PAGES / kept).write_bytes((Path(folder) / picture).read_bytes())
            lines += [f"![{title}: {Path(picture).stem}]({kept})", ""]
    return lines


def ablation(results: Results) -> list[str]:
    """Return the section on each part of Lyanna (`benchmarks/speed/lyanna_parts.py`)."""
    arguments = results["arguments"]
    versions = results["versions"]
    lines = [
        "## What each part of Lyanna's head brings",
        "",
        f"`python benchmarks/speed/lyanna_parts.py --target smollm2 --depth {arguments['depth']} "
        f"--prompts {arguments['prompts']} --rounds {arguments['rounds']}`, validation prompts, "
        f"greedy, {versions['cpu']}, {versions['threads']} threads, {versions['commit']}; "
        "`ablation.json`. Ratios are medians over prompts. The last rows are other heads, by the "
        "names of their trainings, which the notes below tell.",
        "",
        "| way | tokens/s | over the chain | tau | drafted | draft ms a step | "
        "steps that run the head |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, way in results["ways"].items():
        lines.append(
            f"| {name} | {way['rate']:.0f} | {way['ratio']:.3f} | {way['tau']:.2f} | "
            f"{way['drafted']:.1f} | {way['draft_ms']:.2f} | {way['drafting']:.0%} |"
        )
    return [*lines, ""]


def plot_training(curve: Curve, path: Path) -> None:
    """Draw what a head accepts at its first place, by the positions that it was trained on."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    millions = [positions / 1e6 for positions, _ in curve]
    for source in curve[-1][1]:
        first_place = [shares[source][0] for _, shares in curve]
        axes.plot(millions, first_place, "o-", label=source)
    axes.set_xlabel("positions trained on, millions")
    axes.set_ylabel("accepted at place 1, held out")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def write_page(page: Page) -> None:
    """Write a page, if any of its runs is there."""
    folder = RESULTS / page.name
    lines = [page.front]
    for name, title in page.titles.items():
        path = folder / f"{name}.json"
        if path.is_file():
            lines += section(page.name, name, title, json.loads(path.read_text()))
    parts = folder / "ablation.json"
    if parts.is_file():
        lines += ablation(json.loads(parts.read_text()))
    if len(lines) == 1:
        return
    notes = folder / "notes.md"
    tail = "\n" + notes.read_text() if notes.is_file() else ""
    out = PAGES / f"{page.name}.md"
    write_text(out, "\n".join(lines).rstrip() + "\n" + tail)
    print(out)


def main() -> None:
    curve = json.loads((FOLDERS[QWEN_CODER] / "lyanna" / "curve.json").read_text())
    plot_training(next(iter(curve.values())), PAGES / "qwen-coder" / "training.png")
    for page in ALL_PAGES:
        write_page(page)
    write_text(CHART, chart())
    print(CHART)


if __name__ == "__main__":
    main()
