"""Writes docs/results/serving.md, and its picture, from what the scripts of this folder measured.

    python -m benchmarks.serving.results_page --load FILE... --overhead FILE... --soak FILE \
        --out docs/results/serving.md

Parts that are not given are left out. Several files of a kind, for example of other temperatures or
threads, get a section each.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from forerun.files import write_text

Facts = dict[str, Any]

NAMES = {
    "forerun": "**forerun**",
    "forerun-ar": "forerun, `--method ar`",
    "llama-server": "llama.cpp's `llama-server`",
    "transformers": "transformers serve",
}
PACKAGES = ("forerun", "torch", "transformers")
FRONT = """# The server under load

What `forerun serve` brings on a CPU, beside two other servers, over the bare engine, and for an
hour with clients that misbehave. `benchmarks/serving` has the scripts and their results.
"""
LOAD = """- A client asks its next question when the last one was answered. Questions are those of
  `benchmarks/speed/chat/test.jsonl`; from the second time on a number stands before one, so that no
  server knows a prompt.
- All servers have the same cores, a thread each. The load runs on {cores}; the last column says how
  many it kept busy, in the mean.
- llama.cpp's `llama-server` reads the same file and has a slot for each client; it is built for
  this processor (`GGML_NATIVE`). transformers has its weights in float32, and its cache is as large
  as the clients need, because a larger one makes it slower.
- Tokens are counted in the texts, with one tokenizer. First token: from the request to its first
  text. A token: the rest of the time by the rest of the tokens. Requests that are open at the end
  are read to their end, and count as far as they came in time.
- Queue: until a request's prompt was begun, as forerun reports it. Same texts: the share that are
  those of forerun without drafts. Other programs round in other places.
"""
LOAD_HEADER = (
    "",
    "tokens/s",
    "over llama.cpp",
    "over transformers",
    "requests/s",
    "first token, ms (p50, p95)",
    "ms a token (p50, p95)",
    "queue, ms (p50, p95)",
    "errors",
    "same texts",
    "cores of the load",
)
TIMES = (("ttft_ms", ".0f"), ("tpot_ms", ".1f"), ("queue_ms", ".0f"))
OVERHEAD = """The same questions through the engine in one process and over HTTP, in turns. At most
5 % less was asked. The clients are on the same cores, which is part of the difference.
"""
OVERHEAD_HEADER = (
    "rows",
    "engine, tokens/s",
    "server",
    "ratio",
    "quarters",
    "rounds",
    "cores of the clients",
)
SOAK = """Of ten requests one is left in mid-stream, one is read slowly, one is rubbish. Halfway the
server is killed and started again.
"""


def cell(value: float | None, form: str = ".0f") -> str:
    return "" if value is None else f"{value:{form}}"


def table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def made_by(results: Facts) -> list[str]:
    """Return the lines that say how, where and when results were made."""
    versions = results["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES)
    parts = results.get("cells", [results])  # which may have been measured at other times
    commits = ", ".join(sorted({part["versions"]["commit"] for part in parts}))
    where = f"{versions['cpu']}, {len(results['arguments']['cores'])} threads"
    date = min(part["date"] for part in parts)
    command = ["```", results["command"], "```", ""]
    return [*command, f"{date}, {where}, {packages}, {commits}.", ""]


def median_of(cells: list[Facts], name: str) -> float | None:
    """Return the median over rounds; None if one has no value."""
    values = [facts[name] for facts in cells]
    return None if None in values else median(values)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def load_section(results: Facts) -> list[str]:
    """Return the section of servers under load."""
    given = results["arguments"]
    drawn = f"temperature {given['temperature']:g}" if given["temperature"] else "greedy"
    cores = "the same"
    if given["client_cores"] != given["cores"]:
        cores = f"{len(given['client_cores'])} of its own"
    lines = [
        f"## Load on {given['target']}, {drawn}",
        "",
        *made_by(results),
        LOAD.format(cores=cores),
        "",
    ]
    for clients in sorted({facts["clients"] for facts in results["cells"]}):
        cells = [facts for facts in results["cells"] if facts["clients"] == clients]
        lines += load_table(clients, cells)
    return lines


def load_table(clients: int, cells: list[Facts]) -> list[str]:
    """Return the table of one number of clients."""
    groups: dict[str, list[Facts]] = {}
    for name in NAMES:
        group = [facts for facts in cells if facts["system"] == name]
        if group:
            groups[name] = group
    speeds = {name: median_of(group, "tokens_per_s") for name, group in groups.items()}
    rows = [load_row(name, group, speeds) for name, group in groups.items()]
    rounds = max(len(group) for group in groups.values())
    title = f"### {clients} client" + "s" * (clients > 1)
    title += f", medians of {rounds} rounds" * (rounds > 1)
    return [title, "", *table(LOAD_HEADER, rows)]


def load_row(name: str, cells: list[Facts], speeds: dict[str, float | None]) -> list[str]:
    """Return the row of one system; `speeds` are the tokens/s of all."""
    over = [ratio(speeds[name], speeds.get(other)) for other in ("llama-server", "transformers")]
    times = []
    for key, form in TIMES:
        ranks = [cell(median_of(cells, f"{key}_p{rank}"), form) for rank in (50, 95)]
        times.append(", ".join(ranks).strip(", "))
    return [
        NAMES[name],
        cell(speeds[name], ".1f"),
        *(cell(value, ".2f") for value in over),
        cell(median_of(cells, "requests_per_s"), ".2f"),
        *times,
        str(sum(facts["errors"] for facts in cells)),
        cell(median_of(cells, "same_text"), ".3f"),
        cell(median_of(cells, "client_cores"), ".2f"),
    ]


def overhead_section(results: Facts) -> list[str]:
    """Return the section of the server over the bare engine."""
    given = results["arguments"]
    plain = ", without drafts" if given["system"] == "forerun-ar" else ""
    title = f"## Over the bare engine, {len(given['cores'])} threads{plain}"
    rows = [
        [
            name,
            cell(facts["engine_tokens_per_s"], ".1f"),
            cell(facts["http_tokens_per_s"], ".1f"),
            cell(facts["ratio"], ".3f"),
            f"{facts['ratio_p25']:.3f}, {facts['ratio_p75']:.3f}",
            str(facts["rounds"]),
            cell(facts["client_cores"], ".2f"),
        ]
        for name, facts in results["rows"].items()
    ]
    same = all(facts["same_lengths"] for facts in results["rows"].values())
    verdict = f"All answers have the same lengths in both: {'yes' if same else 'no'}."
    lines = [title, "", *made_by(results), OVERHEAD]
    return [*lines, *table(OVERHEAD_HEADER, rows), verdict, ""]


def soak_section(results: Facts, shown: str) -> list[str]:
    """Return the section of the soak; `shown` is the path of its picture."""
    rows = []
    for kind, counts in sorted(results["outcomes"].items()):
        rows.append([kind, ", ".join(f"{n} {outcome}" for outcome, n in counts.items())])
    checks = [
        f"- {'Yes' if is_true else '**No**'}: {name}."
        for name, is_true in results["checks"].items()
    ]
    grown = ", ".join(
        "?" if share is None else f"{100 * share:.1f} %" for share in results["growth"]
    )
    return [
        "## Soak",
        "",
        *made_by(results),
        SOAK,
        *table(("requests", "what became of them"), rows),
        *checks,
        f"- Greedy answers compared with `decoder.chat`: {results['compared']}.",
        "- Growth of memory behind the first ten minutes (or a third) of each server's life: "
        f"{grown}.",
        "",
        f"![Memory, rows, queue, tokens/s over time]({shown})",
        "",
    ]


def picture(results: Facts, path: Path) -> None:
    """Draw memory, rows, queue and tokens/s over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    samples = results["samples"]
    times = [sample["t"] for sample in samples]
    figure, axes = plt.subplots(4, figsize=(8, 7), sharex=True)
    fields = (
        ("rss_mb", "MB in memory"),
        ("num_requests_running", "rows"),
        ("num_requests_waiting", "queue"),
    )
    for (name, label), panel in zip(fields, axes[:3], strict=True):
        panel.plot(times, [sample.get(name) for sample in samples], color="#264653")
        panel.set(ylabel=label, ylim=(0, None))
    axes[3].plot(times[1:], rates(samples), color="#264653")
    axes[3].set(ylabel="tokens/s", xlabel="seconds", ylim=(0, None))
    for panel in axes:
        panel.axvline(results["killed"], color="#e76f51", linewidth=1, linestyle="--")
    axes[0].set_title("dashed: killed", loc="left", fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def rates(samples: list[Facts]) -> list[float]:
    """Return tokens/s between samples; 0 where the server was started again."""
    speeds = []
    for early, late in pairwise(samples):
        name = "generation_tokens_total"
        tokens = late.get(name, 0) - early.get(name, 0)
        speeds.append(tokens / (late["t"] - early["t"]) if tokens >= 0 else 0.0)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, nargs="*", default=[])
    parser.add_argument("--overhead", type=Path, nargs="*", default=[])
    parser.add_argument("--soak", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/serving.md"))
    options = parser.parse_args()
    lines = [FRONT]
    for path in options.load:
        lines += load_section(json.loads(path.read_text()))
    for path in options.overhead:
        lines += overhead_section(json.loads(path.read_text()))
    if options.soak is not None:
        results = json.loads(options.soak.read_text())
        shown = options.out.with_suffix("") / "soak.png"
        shown.parent.mkdir(parents=True, exist_ok=True)
        picture(results, shown)
        lines += soak_section(results, f"{shown.parent.name}/{shown.name}")
    write_text(options.out, "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
