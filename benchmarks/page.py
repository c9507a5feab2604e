"""Writes the pages of results from the files that run.py left, and the picture of the race.

    python -m benchmarks.page

The pages are docs/results/qwen-coder.md, chat.md and embedded.md. They show runs of today's code
only: what was measured before CURRENT_SINCE is left out, and so is a page without such a run. Pages
of older runs are kept by hand in docs/lab.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages.race import OUT as RACE
from benchmarks.pages.race import race
from benchmarks.speed.report import named_row, save_plots
from forerun.bench.report import COLUMNS
from forerun.files import write_text

Results = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "speed"
PAGES = ROOT / "docs" / "results"
CURRENT_SINCE = "2026-11-28"  # the day from which on kernels are as they are today
CHAT_TITLES = {
    "greedy": "Greedy, 128 new tokens",
    "greedy-xeon": "Greedy on an Intel Xeon (Emerald Rapids)",
    "greedy-avx2": "Greedy with AVX2 alone (`FORERUN_KERNELS=avx2`)",
    "greedy-512": "Greedy, 512 new tokens",
    "heads": "Heads over hidden states, greedy",
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
READING = """
`speedup` is the median, over prompts and rounds, of tokens/s over those of `ar` on the same prompt
in the same round. `10-90 %` is its spread. `decoding` is the same ratio without the time of reading
prompts. `draft` and `verify` are shares of the time after the prompt; `prompt` is the share of the
whole call that reading the prompt takes. The guard is off, so that slower methods show, except in
batches. [Measure](../guide/measure.md) defines all figures, and says where DATA comes from.
"""
CHAT_FRONT = f"""# How fast is a chat model of 135M?

The target is SmolLM2-135M-Instruct from its GGUF file of 4 bits, on a CPU, with the draft, layers
and heads that come with forerun. `test` has prompts that the model wrote itself and on which
nothing was trained or tuned (`benchmarks/speed/chat/test.jsonl`). HumanEval's and GSM8K's problems
are put as messages. Answers end where the model ends them. `python -m benchmarks.page` writes this
page.
{READING}"""
EMBEDDED_TITLES = {
    "greedy": "Greedy, 128 new tokens",
    "greedy-512": "Greedy, 512 new tokens",
    "temperature-1": "Temperature 1",
    "batch-4": "Batches of 4",
    "batch-16": "Batches of 16",
}
EMBEDDED_FRONT = f"""# How fast is the embedded pair?

The pair that comes with forerun has 21.1M and 1.6M parameters, in float32. Its prompts are
standard-library code that no training file shares 80 characters with (`stdlib-test`), and
HumanEval. Greedy output of a model this small loops, which flatters every method. `hf-forward/ar`
and `hf-forward/sd` are our methods on transformers' own forwards, so that the gain of our forwards
shows apart from that of drafts. `python -m benchmarks.page` writes this page.
{READING}"""
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
QWEN_FRONT = f"""# How fast is Qwen2.5-Coder 1.5B?

The target is Qwen's own Q4_K_M file of the 1.5B, on a CPU. `lyanna` and `pacer-lyanna` draft with
the head that comes with forerun, `hybrid` with suffixes and the head. `sd`, `cumulative`, `pacer`
and `pacer-ouroboros` draft with the 0.5B. `llama-cpp` is llama.cpp in its best build for the
processor, on the same file, in the same run. `test` has prompts that the target wrote itself and
questions about the standard library's code, held out from all training
(`benchmarks/speed/qwen-coder/test.jsonl`). HumanEval's problems are put as messages. Answers end
where the model ends them. `python -m benchmarks.page` writes this page.
{READING}"""


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
DRAWN = ("greedy",)  # runs with pictures
SETTINGS = ("gamma", "threshold", "depth", "block", "reuse", "other")  # that a page names
VERSIONS = ("kernels", "torch", "transformers", "llama-cpp-python", "node-llama-cpp")
HIDDEN_COLUMNS = {"utilisation", "overhead"}
MORE_COLUMNS = ("draft", "verify", "prompt")


def is_current(results: Results) -> bool:
    """Return whether a run measured today's code."""
    return results["date"] >= CURRENT_SINCE


def section(page: str, name: str, title: str, results: Results) -> list[str]:
    """Return the section of a run, and write its pictures."""
    command = f"python benchmarks/run.py --data DATA --only {page}/{name}"
    lines = [f"## {title}", "", "```", command, "```", "", measured_by(name, results), ""]
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
    shown = [column for column in COLUMNS if column not in HIDDEN_COLUMNS]
    lines = [
        "| " + " | ".join([*shown, *MORE_COLUMNS]) + " |",
        "|---" + "|---:" * (len(shown) + len(MORE_COLUMNS) - 1) + "|",
    ]
    for method, figures in methods.items():
        cells = dict(zip(COLUMNS, named_row(method, figures), strict=True))
        row = [cells[column] for column in shown] + more_cells(figures)
        lines.append("| " + " | ".join(row) + " |")
    return lines


def more_cells(figures: Results) -> list[str]:
    """Return the cells that say where the time went."""
    time = figures["time"] or {}
    shares = [f"{100 * time[key]:.0f} %" if key in time else "" for key in ("draft", "verify")]
    prompt = figures.get("prompt_share", figures.get("prefill_share"))  # the name in older results
    return [*shares, "" if prompt is None else f"{100 * prompt:.0f} %"]


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


def write_page(page: Page) -> None:
    """Write a page, if any of its runs is there and of today's code."""
    lines = [page.front]
    for name, title in page.titles.items():
        path = RESULTS / page.name / f"{name}.json"
        if path.is_file():
            results = json.loads(path.read_text())
            if is_current(results):
                lines += section(page.name, name, title, results)
    if len(lines) == 1:
        return
    out = PAGES / f"{page.name}.md"
    write_text(out, "\n".join(lines).rstrip() + "\n")
    print(out)


def main() -> None:
    for page in ALL_PAGES:
        write_page(page)
    write_text(RACE, race())
    print(RACE)


if __name__ == "__main__":
    main()
