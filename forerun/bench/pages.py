"""A run as something to read: report.md, and the tables of the command line."""

from __future__ import annotations

from typing import Any

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
    from rich.table import Table

    tables = []
    for title, methods in _sections(results):
        table = Table(title=title)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "method" else "right")
        for name, method in methods.items():
            table.add_row(*row(name, method))
        tables.append(table)
    return tables


def markdown(results: dict[str, Any], command: str, pictures: list[str]) -> str:
    """report.md."""
    arguments, versions = results["arguments"], results["versions"]
    lines = [
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
        parted = [each for method in methods.values() for each in method["mismatches"]]
        if parted:
            places = {(each["dataset"], each["prompt"], each["position"]) for each in parted}
            widest = max(abs(each["margin"]) for each in parted)
            notes.append(
                f"- Outputs part at {len(places)} places; the target's logits of the two tokens there are at most "
                f"{widest:.2g} apart (where rounding decides, about 1e-5 in float32)."
            )
    else:
        notes.append("- Sampled: outputs are draws from one law and differ from method to method.")
    if any(name.startswith("hf-") for name in methods):
        notes.append(
            "- `hf-` methods are transformers' own `generate` on the same weights, loaded apart. `hf-assisted` is the "
            "best of its schedules by median tokens/s, chosen in each table after the run, which favours it."
        )
    if results["arguments"]["batch"] > 1 and any(method["rows_one_by_one"] for method in methods.values()):
        names = ", ".join(f"`{name}`" for name, method in methods.items() if method["rows_one_by_one"])
        notes.append(f"- transformers refuses batches for {names}: their rows ran one after another.")
    return notes
