"""Write the pages of results, and README's chart.

These are docs/results/chat.md, embedded.md and qwen-coder.md, from the results that run.py left.

    python -m benchmarks.page

Runs that are not there are left out.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.pages.chart import OUT, chart
from benchmarks.speed.report import named_row, save_plots
from forerun.bench.report import COLUMNS
from forerun.files import write_text
from forerun.zoo import FOLDERS, QWEN_CODER

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "results"
CHAT = {
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

SmolLM2-135M-Instruct (30 layers, 49,152 tokens) from its GGUF file of 4 bits, on a CPU, with what
comes with forerun for it. `test` is prompts that the model wrote itself, and that nothing was
trained or tuned on (`benchmarks/chat/test.jsonl`). HumanEval's and GSM8K's problems are put as
messages. Answers end where the model ends them. `python benchmarks/run.py --data DATA --only chat`
makes the runs, `page.py` beside it this page.

`speedup` is the median over prompts and rounds of tokens/s over those of `ar` on the same prompt in
the same round, 10-90 % its spread; `decoding` is the same ratio without the time of reading
prompts. `by place` is the share of drafts that reached a place and were accepted there. The last
columns are where the time of decoding went. In batches the guard is on, as it is wherever else
forerun decodes: drafts are left out while they do not pay. In the other tables it is off, so that
what is slower shows. All else is as in every bench: see [measure.md](../measure.md).
"""

DRAWN = ("greedy", "temperature-1", "heads", "batch-4")  # runs with pictures
SHOWN = ("gamma", "threshold", "depth", "block", "reuse", "other")  # settings

EMBEDDED = {
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
embedded` makes the runs, `page.py` beside it this page.

`speedup` is the median over prompts and rounds of tokens/s over those of `ar` on the same prompts
in the same round, 10-90 % its spread. The guard is off, so that what is slower shows.
`hf-forward/ar` and `hf-forward/sd` are our methods on transformers' own forwards: what drafting
gains there is not our forwards' doing. All else is as in every bench: see
[measure.md](../measure.md).
"""
QWEN = {
    "greedy": "Greedy, 128 new tokens",
    "rounds": "Greedy, three rounds of the methods that draft with the head",
    "long/1000": "Prompts of 1,000 tokens, 256 new ones",
    "long/4000": "Prompts of 4,000 tokens, 384 new ones",
    "long/16000": "Prompts of 16,000 tokens, 128 new ones",
    "long/known": "A follow-up in a known text of 4,000 tokens, 384 new ones",
    "long/1000-peers": "Beside llama.cpp's own drafts: prompts of 1,000 tokens",
    "long/4000-peers": "Beside llama.cpp's own drafts: prompts of 4,000 tokens",
    "long/16000-peers": "Beside llama.cpp's own drafts: prompts of 16,000 tokens, 64 new ones",
    "long/known-peers": "Beside llama.cpp's own drafts: a follow-up in a known text of 4,000 "
    "tokens",
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
    "oracle": "Beside a rule that knows what will be rejected (`SeeingOracle`), with the draft "
    "model",
}
QWEN_FRONT = """# Qwen2.5-Coder 1.5B

Qwen's own Q4_K_M files of the 1.5B and of its draft, the 0.5B (`forerun fetch qwen-coder`), on a
CPU, with the head and the layer that come with forerun. `test` is prompts that the target wrote
itself and questions about the standard library's code, held out from whatever is trained
(`benchmarks/qwen-coder/test.jsonl`). HumanEval's problems are put as messages. Answers end where
the model ends them. `python benchmarks/run.py --data DATA --only qwen-coder` makes the runs,
`page.py` beside it this page.

`lyanna` and `pacer-lyanna` draft with the head, `hybrid` with suffixes and the head; `sd`,
`cumulative`, `pacer` and `pacer-ouroboros` draft with the 0.5B. `llama-cpp` is llama.cpp in its
best build for the processor, on the same files, in the same run. Columns are those of
[chat.md](chat.md); `draft`, `stop rule` and `verify` share the time after the prompt, `prompt` is
the share of the whole call that reading the prompt takes, which every speedup contains. In batches
the guard is on, elsewhere off, so that slower methods show.

Tables up to that with AVX2 alone are of 28 November 2026 and an AMD EPYC (Zen 5). The others are of
an Intel Xeon (Emerald Rapids) and of the kernels before; each names its processor. These machines
are shared: where tau is 1.00 a method decodes plainly, and what its speedup differs from 1.00 by is
the noise of the cell.
"""
FRONTS = {
    "chat": (CHAT_FRONT, CHAT),
    "embedded": (EMBEDDED_FRONT, EMBEDDED),
    "qwen-coder": (QWEN_FRONT, QWEN),
}


def section(page: str, name: str, title: str, found: dict[str, Any]) -> list[str]:
    given, versions = found["arguments"], found["versions"]
    told = ", ".join(
        f"{each} {versions[each]}"
        for each in ("kernels", "torch", "transformers", "llama-cpp-python", "node-llama-cpp")
        if versions.get(each)
    )
    settings = {
        method: ", ".join(f"{key} {value}" for key, value in chosen.items() if key in SHOWN)
        for method, chosen in given["methods"].items()
    }
    lines = [f"## {title}", ""]
    lines += [
        f"{found['date']}, {versions['cpu']}, {versions['threads']} threads, {told}, "
        f"{versions['commit']}; "
        f"{given['rounds']} rounds; `{name}.json`. Settings: "
        + "; ".join(f"`{method}` {text}" for method, text in settings.items() if text)
        + ".",
        "",
    ]
    for dataset, part in found["datasets"].items():
        lines += [f"### {dataset}, {part['prompts']} prompts", ""]
        lines.append(
            "| "
            + " | ".join([*COLUMNS, "by place", "draft", "stop rule", "verify", "prompt"])
            + " |"
        )
        lines.append("|---" + "|---:" * (len(COLUMNS) + 4) + "|")
        for method, figures in part["methods"].items():
            places = " ".join(
                f"{each:.2f}" for each in (figures["acceptance_by_position"] or [])[:5]
            )
            time = figures["time"] or {}
            shares = [
                f"{100 * time[key]:.0f} %" if key in time else ""
                for key in ("draft", "policy", "verify")
            ]
            prompt = figures.get(
                "prompt_share", figures.get("prefill_share")
            )  # as older results call it
            shares.append("" if prompt is None else f"{100 * prompt:.0f} %")
            lines.append("| " + " | ".join([*named_row(method, figures), places, *shares]) + " |")
        lines.append("")
    if name in DRAWN:
        (PAGES / page).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            for picture in save_plots(found["methods"], Path(folder)):
                kept = Path(page) / f"{name}-{picture}"
                (PAGES / kept).write_bytes((Path(folder) / picture).read_bytes())
                lines += [f"![{title}: {Path(picture).stem}]({kept})", ""]
    return lines


def ablation(found: dict[str, Any]) -> list[str]:
    """What each part of Lyanna brings (`benchmarks/speed/lyanna_parts.py`)."""
    given, versions = found["arguments"], found["versions"]
    lines = [
        "## What each part of Lyanna's head brings",
        "",
        f"`python benchmarks/speed/lyanna_parts.py --target smollm2 --depth {given['depth']} "
        f"--prompts {given['prompts']} "
        f"--rounds {given['rounds']}`, validation prompts, greedy, {versions['cpu']}, "
        f"{versions['threads']} threads, "
        f"{versions['commit']}; `ablation.json`. Ratios are medians over prompts. The last "
        f"rows are other heads, "
        "by the names of their trainings, which the notes below tell.",
        "",
        "| way | tokens/s | over the chain | tau | drafted | draft ms a step | steps that run "
        "the head |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, way in found["ways"].items():
        lines.append(
            f"| {name} | {way['rate']:.0f} | {way['ratio']:.3f} | {way['tau']:.2f} | "
            f"{way['drafted']:.1f} | "
            f"{way['draft_ms']:.2f} | {way['drafting']:.0%} |"
        )
    return [*lines, ""]


def trained(curve: list[tuple[int, dict[str, list[float]]]], path: Path) -> None:
    """Draw what a head accepts at its first place against the positions that it was trained on."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for source in curve[-1][1]:
        axes.plot(
            [each / 1e6 for each, _ in curve],
            [shares[source][0] for _, shares in curve],
            "o-",
            label=source,
        )
    axes.set_xlabel("positions trained on, millions")
    axes.set_ylabel("accepted at place 1, held out")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    curve = json.loads((FOLDERS[QWEN_CODER] / "lyanna" / "curve.json").read_text())
    trained(next(iter(curve.values())), PAGES / "qwen-coder" / "training.png")
    for page, (front, titles) in FRONTS.items():
        lines = [front]
        for name, title in titles.items():
            path = HERE / page / f"{name}.json"
            if path.is_file():
                lines += section(page, name, title, json.loads(path.read_text()))
        path = HERE / page / "ablation.json"
        if path.is_file():
            lines += ablation(json.loads(path.read_text()))
        notes = (
            HERE / page / "notes.md"
        )  # what was wished for, what was missed, and why: written by hand
        if len(lines) > 1:
            tail = "\n" + notes.read_text() if notes.is_file() else ""
            write_text(PAGES / f"{page}.md", "\n".join(lines).rstrip() + "\n" + tail)
            print(PAGES / f"{page}.md")
    write_text(OUT, chart())
    print(OUT)


if __name__ == "__main__":
    main()
