"""Writes docs/results/kernels.md and restart.md from the results of their benchmarks.

python -m benchmarks.pages.results
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"
KERNELS = PAGES / "kernels.md"
RESTART = PAGES / "restart.md"
FORWARDS = ROOT / "benchmarks" / "kernels" / "context.json"
ANSWERS = ROOT / "benchmarks" / "serving" / "restart.json"
LOSSES = {"SmolLM2-135M, Q4_1": "loss-smollm2.json", "Qwen2.5-Coder-1.5B, Q4_K_M": "loss-qwen.json"}
CURRENT_SINCE = "2026-11-28"  # the day from which on kernels are as they are today
TOKENS = ("1", "2", "4", "8")  # of a forward

Results = dict[str, Any]

KERNELS_FRONT = """# How long does a forward take, and what do few bits cost?

## A forward, by the length of the text

A draft pays if a forward of several tokens takes little more time than one of a single token. The
table has the milliseconds of forwards behind texts of some length, and the speed of reading 512
more tokens of a prompt, beside llama.cpp in its best build for the processor.
"""
LOSS_FRONT = """## What few bits cost

The loss of a file in its own bits is compared with that of the same weights in float32, in
transformers' own forward. The figures are nats per token in windows of 512 tokens, with the
standard error of the difference in brackets. The last column is the share of tokens whose most
probable successor changed.
"""
RESTART_FRONT = """# How fast does a server answer after it was killed?

A chat of 4,000 tokens is answered once, and then follow-ups of it are asked one after the other.
The server runs with `--prompt-cache`. It is killed with SIGKILL, started again, and asked the same.
"""


def kernels_page() -> str:
    """Return the page about kernels."""
    parts = json.loads(FORWARDS.read_text())["results"]["qwen-coder"]
    ours = parts["avx512vnni"]
    lines = [
        KERNELS_FRONT,
        *block(
            "python benchmarks/kernels/forward.py qwen-coder --context 512,2048,8192 \\",
            "    --variants avx512vnni --llama --no-whole",
        ),
        f"{measured(ours['versions'])}. Medians of two rounds in turns.",
        "",
        "| tokens before | | 1 token | 2 | 4 | 8 | prompt tokens/s |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for length in ours["contexts"]:
        for name, part in (("forerun", ours), ("llama.cpp", parts["llama.cpp"])):
            figures = part["contexts"][length]
            times = [f"{figures['ms'][n]:.1f} ms" if n in figures["ms"] else "" for n in TOKENS]
            speed = f"{figures['prompt_tokens_per_s_after']:.0f}"
            lines.append(f"| {int(length):,} | {name} | {' | '.join(times)} | {speed} |")
    lines += [
        "",
        LOSS_FRONT,
        *block(
            "python -m benchmarks.quality.loss FILE.gguf --kinds auto --tokens 2000 --answers 0"
        ),
    ]
    lines += ["| file, text | float32 | own bits | changed |", "|---|---:|---:|---:|"]
    for name, file in LOSSES.items():
        losses = json.loads((ROOT / "benchmarks" / "quality" / file).read_text())
        if losses["date"] >= CURRENT_SINCE:
            lines += loss_rows(name, losses)
    return "\n".join(lines) + "\n"


def loss_rows(name: str, results: Results) -> list[str]:
    """Return the rows of a file: one for each kind of text."""
    rows = []
    for kind, losses in results["loss"].items():
        bits = losses["auto"]
        more = f"{bits['more']:+.4f} ({bits['more_error']:.4f})"
        share = f"{100 * bits['other_argmax']:.1f} %"
        text = f"{name}, {losses['tokens']:,} tokens of {kind}"
        rows.append(f"| {text} | {losses['float32']['nats']:.4f} | {more} | {share} |")
    return rows


def restart_page() -> str:
    """Return the page about a server that was killed."""
    results = json.loads(ANSWERS.read_text())
    given = results["arguments"]
    target = f"--target {given['target']} --turns {given['turns']} --tokens {given['tokens']}"
    both = zip(results["before_seconds"], results["after_seconds"], strict=True)
    rows = [f"| {i} | {a:.2f} | {b:.2f} |" for i, (a, b) in enumerate(both, 1)]
    same = "All answers are the same." if results["same_answers"] else "Answers differ."
    return "\n".join(
        [
            RESTART_FRONT,
            *block(f"python -m benchmarks.serving.restart {target}"),
            f"{results['date']}, {measured(results['versions'])}. The first answer, which reads "
            f"the whole chat, takes {results['first_seconds']:.1f} s. The median follow-up takes "
            f"{results['after_over_before']:.2f} of its time before the kill. {same}",
            "",
            "| follow-up | seconds before the kill | after it |",
            "|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def block(*lines: str) -> list[str]:
    """Return a block of commands."""
    return ["```sh", "# takes minutes on a quiet machine", *lines, "```", ""]


def measured(versions: Results) -> str:
    """Return where and with which commit something was measured."""
    parts = versions["cpu"], f"{versions['threads']} threads", f"kernels {versions['kernels']}"
    return f"{', '.join(parts)}, commit {versions['commit']}"


if __name__ == "__main__":
    for path, page in ((KERNELS, kernels_page), (RESTART, restart_page)):
        path.write_text(page(), encoding="utf-8")
        print(path)
