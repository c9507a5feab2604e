"""Writes docs/results/kernels.md, shapes.md and restart.md from the results of their benchmarks.

python -m benchmarks.pages.results
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"
KERNELS = PAGES / "kernels.md"
SHAPES = PAGES / "shapes.md"
RESTART = PAGES / "restart.md"
FORWARDS = ROOT / "benchmarks" / "kernels" / "context.json"
MODELS = ROOT / "benchmarks" / "speed" / "shapes.json"
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
SHAPES_FRONT = """# How fast are models of other shapes?

The files have the shapes and types of known models, and random weights, because speed does not
depend on what weights say. Matrices are of Q4_K_M's types, and gpt-oss has those that it is
published in. Where memory asks for it, a file has fewer layers than its model; the output matrix,
which every file has whole, then takes a larger share than in the model.
"""
PLAIN_FRONT = """## Plain decoding, beside llama.cpp

Both programs decode tokens greedily behind the same context, in turns. llama.cpp runs in its best
build for the processor. Ratios are medians over rounds, with the lowest and the highest one.
"""
MORE_FRONT = """## Forwards of several tokens

Milliseconds of a forward, and its time over that of a forward of a single token. A forward of
several tokens verifies a draft. AVX2 multiplies four rows no faster than 32 GB of weights a second
here, so that its ratio grows where memory is faster than that; the memory of this machine, which is
shared, gave from 44 to 62 GB/s.
"""
EXPERTS_FRONT = """## Experts

How many times as fast is a forward of several tokens as that many single ones? Tokens are random
here and choose experts almost independently; those of a text share more experts.
"""
LIMITS_FRONT = """## Limits

The command asks that plain decoding is at least 1.2 times as fast as llama.cpp's; that a forward of
four tokens takes at most 1.35 times the time of one (1.5 with AVX2 alone), in dense models; and
that with experts it takes no more than four single ones, and one of eight at most two thirds of
eight single ones.
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


def shapes_page() -> str:
    """Return the page about models of other shapes."""
    models = json.loads(MODELS.read_text())
    return "\n".join(
        [
            SHAPES_FRONT,
            *block("python -m benchmarks.speed.shapes", "python -m benchmarks.pages.results"),
            *measured_when(models),
            "",
            PLAIN_FRONT,
            "| model | layers | forerun | llama.cpp | times as fast |",
            "|---|---:|---:|---:|---:|",
            *(plain_row(name, results) for name, results in models.items()),
            "",
            MORE_FRONT,
            "| model | 1 | 4 | 8 | 4 over 1 | AVX2 alone: 1 | 4 | 4 over 1 |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *(forwards_row(name, results) for name, results in models.items()),
            "",
            EXPERTS_FRONT,
            "| model | 4 tokens | 8 tokens |",
            "|---|---:|---:|",
            *(singles_row(name, row) for name, row in models.items() if has_experts(row)),
            "",
            LIMITS_FRONT,
            *missed(models),
            "",
        ]
    )


def plain_row(name: str, results: Results) -> str:
    """Return a model's row about plain decoding."""
    ms = results["ms"]
    layers = "{} of {}".format(*results["layers"])
    ratio = spread(results["ratios"]["plain over llama.cpp"])
    return f"| {name} | {layers} | {ms['forerun']:.1f} ms | {ms['llama.cpp']:.1f} ms | {ratio} |"


def forwards_row(name: str, results: Results) -> str:
    """Return a model's row about forwards of several tokens."""
    cells = []
    for variant, counts in (("avx512vnni", (1, 4, 8)), ("avx2", (1, 4))):
        cells += [f"{results['ms'][f'{count}, {variant}']:.1f} ms" for count in counts]
        cells.append(f"{results['ratios'][f'4 over 1, {variant}']['median']:.2f}")
    return f"| {name} | {' | '.join(cells)} |"


def singles_row(name: str, results: Results) -> str:
    """Return a model's row about forwards of several tokens and single ones."""
    ratios = results["ratios"]
    cells = [spread(ratios[f"{count} single ones over {count}, avx512vnni"]) for count in (4, 8)]
    return f"| {name} | {' | '.join(cells)} |"


def missed(models: dict[str, Results]) -> list[str]:
    """Return a line for each limit that does not hold."""
    lines = []
    for name, results in models.items():
        for limit in results["limits"]:
            if not limit["holds"]:
                side = "at most" if "at most" in limit else "at least"
                bound = f"{side} {limit[side]:.2f}"
                lines.append(f"- {name}: {limit['name']} is {limit['measured']:.2f}, not {bound}.")
    return lines or ["All of them hold."]


def has_experts(results: Results) -> bool:
    """Return whether a model of `shapes.json` has experts: these have limits of their own."""
    return any("single" in limit["name"] for limit in results["limits"])


def spread(ratio: Results) -> str:
    """Return a ratio with its lowest and its highest value in brackets."""
    return "{median:.2f} ({lowest:.2f}, {highest:.2f})".format(**ratio)


def measured_when(models: dict[str, Results]) -> list[str]:
    """Return a line for each time, commit and machine that models were measured with."""
    names: dict[str, list[str]] = {}
    for name, results in models.items():
        given = results["arguments"]
        said = (
            f"{results['date'].split()[0]}, {measured(results['versions'])}, node-llama-cpp "
            f"{results['llama.cpp']['node-llama-cpp']}, {given['rounds']} rounds after "
            f"{given['context']} tokens"
        )
        names.setdefault(said, []).append(name)
    if len(names) == 1:
        return [f"{said}." for said in names]
    return [f"- {', '.join(some)}: {said}." for said, some in names.items()]


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
    for path, page in (
        (KERNELS, kernels_page),
        (SHAPES, shapes_page),
        (RESTART, restart_page),
    ):
        path.write_text(page(), encoding="utf-8")
        print(path)
