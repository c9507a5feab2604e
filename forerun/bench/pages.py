"""A run as something to read: report.md, and the tables of the command line."""

from __future__ import annotations

from typing import Any

from forerun.bench.choose import (
    ASSISTED,
    FORWARD,
    LLAMA_NGRAM,
    LLAMA_TOKENS,
    is_llama,
    is_transformers,
    on_their_forward,
)
from forerun.bench.margins import explained

COLUMNS = ("method", "tokens/s", "speedup", "10-90 %", "tau", "alpha", "utilisation", "overhead", "same tokens")


def row(name: str, method: dict[str, Any]) -> list[str]:
    """One method's line of a table, in the order of COLUMNS."""
    return [
        f"{name} ({method['schedule']})" if "schedule" in method else name,
        f"{method['tokens_per_s']:.1f}",
        f"{method['speedup']:.2f}",
        f"{method['speedup_p10']:.2f}-{method['speedup_p90']:.2f}",
        f"{method['tau']:.2f}",
        *("" if method[key] is None else f"{method[key]:.2f}" for key in ("alpha", "utilisation", "overhead_share")),
        "" if method["exact_match"] is None else f"{100 * method['exact_match']:.4g} %",
    ]


def console_tables(results: dict[str, Any]) -> list[Any]:
    """Rich tables: one a dataset, and one of all where there are several."""
    return [
        table_of(
            title,
            [list(COLUMNS), *(row(name, method) for name, method in methods.items())],
            "\n".join(_differences(results, methods)),
        )
        for title, methods in _sections(results)
    ]


def _differences(results: dict[str, Any], methods: dict[str, Any]) -> list[str]:
    """A line for each method whose greedy outputs differ from the reference's. The best of hf-assisted has one already
    under its own name."""
    return [
        f"{name}: {explained(method['differences'], results['reference'])}"
        for name, method in methods.items()
        if method["differences"] is not None and "schedule" not in method
    ]


def table_of(title: str, rows: list[list[str]], caption: str = "") -> Any:
    """A rich table; the first row is its header."""
    from rich.table import Table

    table = Table(title=title, caption=caption or None, caption_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "method" else "right")
    for each in rows[1:]:
        table.add_row(*each)
    return table


def markdown(results: dict[str, Any], command: str, pictures: list[str]) -> str:
    """report.md."""
    lines = _front(results, command)
    for title, methods in _sections(results):
        lines += [f"## {title}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        lines += ["| " + " | ".join(row(name, method)) + " |" for name, method in methods.items()]
        lines.append("")
    if "tuned" in results:
        lines += [f"Best by median speedup: `{results['tuned']}`.", ""]
    lines += ["## How to read it", "", *_notes(results), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    return "\n".join(lines).rstrip() + "\n"


def _front(results: dict[str, Any], command: str) -> list[str]:
    """Title, where it was measured, and the command."""
    arguments, versions = results["arguments"], results["versions"]
    return [
        f"# Benchmark of {arguments['target']}" + (f" with {arguments['draft']}" if arguments["draft"] else ""),
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


LOAD_COLUMNS = {
    "tokens/s": "tokens_per_s",
    "first token, ms, p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99",
    "token, ms, p50": "tpot_ms_p50",
    "p99 ": "tpot_ms_p99",
    "longest gap, ms": "gap_ms_max",
}


def load_tables(results: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Title and rows of a table for each load, the header first."""
    tables = []
    for kind in ("clients", "rate"):
        for size in results.get(kind, {}):
            title = f"{size} clients" if kind == "clients" else f"{size} requests a second"
            rows = [["method", *map(str.strip, LOAD_COLUMNS), "over ar", "same tokens"]]
            for name, method in results["methods"].items():
                each = method[kind][size]
                same = "" if "exact_match" not in each else f"{100 * each['exact_match']:.4g} %"
                rows.append([name, *(f"{each[key]:.1f}" for key in LOAD_COLUMNS.values())])
                rows[-1] += [f"{each['over']['ar']:.2f}", same]
            tables.append((title, rows))
    return tables


def load_markdown(results: dict[str, Any], command: str, pictures: list[str]) -> str:
    """report.md of a run under load."""
    lines = _front(results, command)
    for title, (header, *rows) in load_tables(results):
        lines += [f"## {title}", "", "| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
        lines += [*("| " + " | ".join(row) + " |" for row in rows), ""]
    arguments = results["arguments"]
    lines += [
        "## How to read it",
        "",
        f"- Each load has {arguments['requests']} requests of {arguments['new_tokens']} new tokens. Figures are "
        "medians over rounds; percentiles are over the requests of a round. Methods take turns on the same requests.",
        "- A closed loop keeps that many requests open. In an open loop they come by a clock (Poisson), and the time "
        "to the first token counts from when a request was due.",
        "- gap: the time between two steps that brought a request's tokens. `static` starts a batch of 16 when the one "
        "before has ended. `hf-batch` is transformers' continuous batching, plain decoding.",
        "",
        *(f"![{name}]({name})" for name in pictures),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _sections(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    sections = []
    for name, dataset in results["datasets"].items():
        cut = f", {dataset['cut']} cut to the context" if dataset["cut"] else ""
        sections.append((f"{name} ({dataset['prompts']} prompts{cut})", dataset["methods"]))
    return sections + ([("all datasets", results["methods"])] if len(sections) > 1 else [])


def _notes(results: dict[str, Any]) -> list[str]:
    notes = [
        "- tokens/s is the median over prompts and rounds, prefill included. speedup is the median of tokens/s over "
        "`ar`'s on the same prompts in the same round, with its 10th and 90th percentile.",
        "- tau: tokens a target forward, of a row. alpha: accepted / tested draft tokens. utilisation: accepted / "
        "drafted. overhead: share of step time outside the models' forwards, its median over the measurements.",
    ]
    methods = results["methods"]
    if results["reference"]:
        notes.append(f"- same tokens: share of outputs equal to greedy `{results['reference']}`, token for token.")
        lines = _differences(results, methods)
        if lines:
            notes += [f"- {line}." for line in lines]
            notes.append(
                "- A margin is how far apart the target's logits of the two tokens are where an output first differs: "
                "about 1e-5 where float32's rounding decides, more where another program rounds more: llama.cpp has "
                "activations in 8 bits."
            )
    else:
        notes.append("- Sampled: outputs are from one distribution and differ from method to method.")
    if any(map(is_transformers, methods)):
        notes.append(
            "- `hf-` methods are transformers' own `generate` on the same weights, loaded apart. `hf-assisted` is the "
            "best of its settings by median tokens/s, chosen in each table after the run, which favours it."
        )
        if results["versions"]["scikit-learn"] is None and any(name.startswith(ASSISTED) for name in methods):
            notes.append("- Without scikit-learn the threshold of transformers' assistant stays as it is.")
    if any(map(on_their_forward, methods)):
        notes.append(
            f"- `{FORWARD}/METHOD` is our method on transformers' own forwards of target and draft: the speedup that "
            "it has there does not come from our forwards. A file in few bits is in float32 there."
        )
    if any(is_llama(name) for name in methods):
        notes.append(
            "- `llama-cpp` is llama.cpp, through llama-cpp-python, on the same file, token ids and number of threads; "
            f"`llama-cpp-lookup/TOKENS/NGRAM` is its prompt lookup ({LLAMA_TOKENS} and {LLAMA_NGRAM} where none are "
            "given). Neither keeps anything of the prompts before."
        )
    if results["arguments"]["batch"] > 1 and any(method["rows_one_by_one"] for method in methods.values()):
        names = ", ".join(f"`{name}`" for name, method in methods.items() if method["rows_one_by_one"])
        notes.append(f"- transformers refuses batches for {names}: their rows ran one after another.")
    return notes
