"""Writes docs/results/serving.md, and its picture, from what the scripts of this folder measured.

    python -m benchmarks.serving.results_page --load FILE... --overhead FILE... --soak FILE --out docs/results/serving.md

What is not given is left out. Several files of a kind, as of other temperatures or threads, get a section each.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from forerun.files import write_text

NAMES = {
    "forerun": "**forerun**",
    "forerun-ar": "forerun, `--method ar`",
    "llama-cpp": "llama-cpp-python",
    "transformers": "transformers serve",
}
FRONT = """# The server under load

What `forerun serve` brings on smollm2 (135M, its GGUF file of 4 bits) on a CPU, beside two other servers, over the bare
engine, and for an hour with clients that misbehave. `benchmarks/serving` has the scripts and their results.
"""
LOAD = """- A client asks its next question when the last one was answered. Questions are those of
  `benchmarks/chat/test.jsonl`; from the second time on a number stands before one, so that no server knows a prompt.
- All servers have the same cores, a thread each. The load runs on {cores}; the last column says how many it kept
  busy, in the mean.
- llama-cpp-python reads the same file and answers one request after the other. transformers has its weights in
  float32, and its cache is as large as the clients need: a larger one makes it slower.
- Tokens are counted in the texts, with one tokenizer. First token: from the request to its first text. A token: the
  rest of the time by the rest of the tokens. What is open at the end is read to its end, and counts as far as it came
  in time.
- Queue: until a request's prompt was begun, as forerun says it. Same texts: the share that are those of forerun without
  drafts. Others round otherwise.
"""
OVERHEAD = """The same questions through the engine in one process and over HTTP, in turns. At most 5 % less was asked.
The clients are on the same cores, which is part of the difference.
"""
SOAK = """Of ten requests one is left in mid-stream, one is read slowly, one is rubbish. Halfway the server is killed
and started again.
"""


def cell(value: float | None, form: str = ".0f") -> str:
    return "" if value is None else f"{value:{form}}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def made_by(found: dict[str, Any]) -> list[str]:
    versions, given = found["versions"], found["arguments"]
    told = [
        f"{name} {versions[name]}"
        for name in ("forerun", "torch", "transformers", "llama-cpp-python")
    ]
    parts = found.get("cells", [found])  # which may have been measured at other times
    commits = ", ".join(sorted({each["versions"]["commit"] for each in parts}))
    where = f"{versions['cpu']}, {len(given['cores'])} threads"
    return [
        "```",
        found["command"],
        "```",
        "",
        f"{min(each['date'] for each in parts)}, {where}, {', '.join(told)}, {commits}.",
        "",
    ]


def middle(cells: list[dict[str, Any]], name: str) -> float | None:
    """The median over rounds; None where one has none."""
    values = [each[name] for each in cells]
    return None if None in values else median(values)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def load_section(found: dict[str, Any]) -> list[str]:
    given, cells = found["arguments"], found["cells"]
    drawn = f"temperature {given['temperature']:g}" if given["temperature"] else "greedy"
    lines = [f"## Load, {drawn}", "", *made_by(found), LOAD.format(cores="the same"), ""]
    if given["client_cores"] != given["cores"]:
        lines[-2] = LOAD.format(cores=f"{len(given['client_cores'])} of its own")
    header = [
        "",
        "tokens/s",
        "over llama.cpp",
        "over transformers",
        "requests/s",
        "first token, ms (p50, p99)",
    ]
    header += [
        "ms a token (p50, p99)",
        "queue, ms (p50, p99)",
        "errors",
        "same texts",
        "cores of the load",
    ]
    for clients in sorted({each["clients"] for each in cells}):
        groups = {
            name: [e for e in cells if e["clients"] == clients and e["system"] == name]
            for name in NAMES
        }
        speeds = {name: middle(group, "tokens_per_s") for name, group in groups.items() if group}
        rows = []
        for name, group in groups.items():
            if not group:
                continue
            over = [
                ratio(speeds[name], speeds.get(other)) for other in ("llama-cpp", "transformers")
            ]
            pairs = [
                ", ".join(cell(middle(group, f"{key}_p{rank}"), form) for rank in (50, 99)).strip(
                    ", "
                )
                for key, form in (("ttft_ms", ".0f"), ("tpot_ms", ".1f"), ("queue_ms", ".0f"))
            ]
            rows.append(
                [
                    NAMES[name],
                    cell(speeds[name], ".1f"),
                    *(cell(each, ".2f") for each in over),
                    cell(middle(group, "requests_per_s"), ".2f"),
                    *pairs,
                    str(sum(each["errors"] for each in group)),
                    cell(middle(group, "same_text"), ".3f"),
                    cell(middle(group, "client_cores"), ".2f"),
                ]
            )
        rounds = max(len(group) for group in groups.values())
        title = f"{clients} client" + "s" * (clients > 1)
        lines += [
            f"### {title}" + f", medians of {rounds} rounds" * (rounds > 1),
            "",
            *table(header, rows),
        ]
    return lines


def overhead_section(found: dict[str, Any]) -> list[str]:
    given = found["arguments"]
    plain = ", without drafts" if given["system"] == "forerun-ar" else ""
    lines = [
        f"## Over the bare engine, {len(given['cores'])} threads{plain}",
        "",
        *made_by(found),
        OVERHEAD,
    ]
    header = [
        "rows",
        "engine, tokens/s",
        "server",
        "ratio",
        "quarters",
        "rounds",
        "cores of the clients",
    ]
    rows = [
        [
            name,
            cell(each["engine_tokens_per_s"], ".1f"),
            cell(each["http_tokens_per_s"], ".1f"),
            cell(each["ratio"], ".3f"),
            f"{each['ratio_p25']:.3f}, {each['ratio_p75']:.3f}",
            str(each["rounds"]),
            cell(each["client_cores"], ".2f"),
        ]
        for name, each in found["rows"].items()
    ]
    same = all(each["same_lengths"] for each in found["rows"].values())
    return [
        *lines,
        *table(header, rows),
        f"All answers have the same lengths in both: {'yes' if same else 'no'}.",
        "",
    ]


def soak_section(found: dict[str, Any], shown: str) -> list[str]:
    lines = ["## Soak", "", *made_by(found), SOAK]
    kinds = {
        kind: ", ".join(f"{n} {each}" for each, n in done.items())
        for kind, done in found["outcomes"].items()
    }
    lines += table(
        ["requests", "what became of them"], [[kind, told] for kind, told in sorted(kinds.items())]
    )
    lines += [
        f"- {'Yes' if is_true else '**No**'}: {name}." for name, is_true in found["checks"].items()
    ]
    grown = ", ".join("?" if each is None else f"{100 * each:.1f} %" for each in found["growth"])
    lines += [f"- Greedy answers compared with `decoder.chat`: {found['compared']}."]
    lines += [
        f"- Growth of memory behind the first ten minutes (or a third) of each server's life: {grown}.",
        "",
    ]
    lines += [f"![Memory, rows, queue, tokens/s over time]({shown})", ""]
    return lines


def picture(found: dict[str, Any], path: Path) -> None:
    """Memory, rows, queue and tokens/s over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    samples = found["samples"]
    figure, axes = plt.subplots(4, figsize=(8, 7), sharex=True)
    named = (
        ("rss_mb", "MB in memory"),
        ("num_requests_running", "rows"),
        ("num_requests_waiting", "queue"),
    )
    for (name, label), own in zip(named, axes[:3], strict=True):
        own.plot(
            [each["t"] for each in samples],
            [each.get(name, None) for each in samples],
            color="#264653",
        )
        own.set(ylabel=label, ylim=(0, None))
    rates = []
    for early, late in pairwise(samples):
        more = late.get("generation_tokens_total", 0) - early.get("generation_tokens_total", 0)
        rates.append(more / (late["t"] - early["t"]) if more >= 0 else 0)
    axes[3].plot([each["t"] for each in samples[1:]], rates, color="#264653")
    axes[3].set(ylabel="tokens/s", xlabel="seconds", ylim=(0, None))
    for own in axes:
        own.axvline(found["killed"], color="#e76f51", linewidth=1, linestyle="--")
    axes[0].set_title("dashed: killed", loc="left", fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, nargs="*", default=[])
    parser.add_argument("--overhead", type=Path, nargs="*", default=[])
    parser.add_argument("--soak", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/serving.md"))
    asked = parser.parse_args()
    lines = [FRONT]
    for path in asked.load:
        lines += load_section(json.loads(path.read_text()))
    for path in asked.overhead:
        lines += overhead_section(json.loads(path.read_text()))
    if asked.soak is not None:
        found = json.loads(asked.soak.read_text())
        shown = asked.out.with_suffix("") / "soak.png"
        shown.parent.mkdir(parents=True, exist_ok=True)
        picture(found, shown)
        lines += soak_section(found, f"{shown.parent.name}/{shown.name}")
    write_text(asked.out, "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
