"""Prompts of four kinds, from code that repeats little to code that repeats much, and their plot.

    python -m benchmarks.speed.prompt_kinds write KINDS     # code, edit, repeat and tables .jsonl
    forerun bench --dataset KINDS/code.jsonl,KINDS/edit.jsonl --dataset KINDS/repeat.jsonl \
        --dataset KINDS/tables.jsonl --out OUT ...
    python -m benchmarks.speed.prompt_kinds plot OUT docs/results/ouroboros/kinds.png

All text is from files that nothing was trained on: the test split, and for tables the library's
encodings, which the corpus leaves out.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections import Counter, defaultdict
from keyword import iskeyword
from pathlib import Path
from statistics import median

COUNT = 16  # prompts of a kind
KINDS = ("code", "edit", "repeat", "tables")
TABLE_START = "decoding_table = ("


def write(folder: Path) -> None:
    """Write a file of prompts for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for function in functions():
        head = "\n".join(function.split("\n")[:3]) + "\n"
        name = frequent_name(function)
        edited = re.sub(rf"\b{name}\b", f"new_{name}", head)
        prompts["code"].append(function[:500])
        prompts["repeat"].append(f"{function}\n\n# The same again:\n\n{head}")
        prompts["edit"].append(f"{function}\n\n# The same with {name} as new_{name}:\n\n{edited}")
    prompts["tables"] = tables()
    for kind, texts in prompts.items():
        rows = [{"id": f"{kind}-{number}", "prompt": text} for number, text in enumerate(texts)]
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spread_out(items: list[str]) -> list[str]:
    """Return COUNT items that are spread over a list."""
    return items[:: max(1, len(items) // COUNT)][:COUNT]


def functions() -> list[str]:
    """Return functions and classes of a fair size, at most one of each file."""
    from forerun.train.corpus import source_files

    first_ones = []
    for _, text in source_files("test"):
        parts = re.split(r"(?m)^(?=(?:def|class) )", text)[1:]
        fair = [part for part in parts if 500 < len(part) < 1100]
        first_ones += fair[:1]
    return spread_out(first_ones)


def frequent_name(function: str) -> str:
    """Return the most frequent name of a function."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", function))
    return next(name for name, _ in names.most_common() if name != "self" and not iskeyword(name))


def tables() -> list[str]:
    """Return beginnings of the decoding tables of the library's encodings."""
    library = Path(sysconfig.get_paths()["stdlib"]) / "encodings"
    texts = [path.read_text("utf-8") for path in sorted(library.glob("*.py"))]
    starts = [text[text.index(TABLE_START) :][:900] for text in texts if TABLE_START in text]
    return spread_out(starts)


def plot(out: Path, picture: Path) -> None:
    """Plot and print the gains of each method by the kind of prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gains = gains_by_kind(out)
    methods = sorted(gains[KINDS[0]])
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for name in methods:
        axes.plot(KINDS, [gains[kind][name] for kind in KINDS], "o-", label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(ylabel="tokens/s over plain decoding", ylim=(0, None))
    axes.legend(ncol=2, fontsize=8)
    figure.savefig(picture, dpi=120)
    print("| kind | " + " | ".join(methods) + " |")
    print("|---|" + "---:|" * len(methods))
    for kind in KINDS:
        cells = [f"{gains[kind][name]:.2f}" for name in methods]
        print(f"| {kind} | {' | '.join(cells)} |")


def gains_by_kind(out: Path) -> dict[str, dict[str, float]]:
    """Return the median tokens/s over `ar` of each method, for each kind."""
    from forerun.bench.records import parse

    speeds: dict[tuple, dict[str, float]] = defaultdict(dict)
    for record in map(parse, (out / "records.jsonl").read_text().splitlines()):
        speeds[record.group][record.method] = record.stats.tokens_per_s
    methods = [name for name in next(iter(speeds.values())) if name != "ar"]
    gains: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        groups = [speed for group, speed in speeds.items() if group[1] == f"{kind}.jsonl"]
        gains[kind] = {}
        for name in methods:
            gains[kind][name] = median(speed[name] / speed["ar"] for speed in groups)
    return gains


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        plot(Path(sys.argv[2]), Path(sys.argv[3]))
