"""Prompts of four kinds, from code that repeats little to code that repeats much, and the plot over them.

    python -m benchmarks.speed.prompt_kinds write KINDS            # code.jsonl, edit.jsonl, repeat.jsonl, tables.jsonl
    forerun bench --dataset KINDS/code.jsonl,KINDS/edit.jsonl,KINDS/repeat.jsonl,KINDS/tables.jsonl --out OUT ...
    python -m benchmarks.speed.prompt_kinds plot OUT docs/results/ouroboros/kinds.png

All text is from files that nothing was trained on: the test split, and for tables the library's encodings, which the
corpus leaves out.
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

COUNT = 16
KINDS = ("code", "edit", "repeat", "tables")


def write(folder: Path) -> None:
    from forerun.train.corpus import source_files

    folder.mkdir(parents=True, exist_ok=True)
    functions = []
    for relative, text in source_files("test"):
        found = [
            each
            for each in re.split(r"(?m)^(?=(?:def|class) )", text)[1:]
            if 500 < len(each) < 1100
        ]
        if found:
            functions.append((relative, found[0]))
    step = max(1, len(functions) // COUNT)
    functions = functions[::step][:COUNT]
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for _, function in functions:
        kinds["code"].append(function[:500])
        head = "\n".join(function.split("\n")[:3]) + "\n"
        kinds["repeat"].append(f"{function}\n\n# The same again:\n\n{head}")
        names = Counter(re.findall(r"\b[a-z_]{4,}\b", function))
        name = next(
            each for each, _ in names.most_common() if each != "self" and not iskeyword(each)
        )
        edited = re.sub(rf"\b{name}\b", f"new_{name}", head)
        kinds["edit"].append(f"{function}\n\n# The same with {name} as new_{name}:\n\n{edited}")
    library = Path(sysconfig.get_paths()["stdlib"]) / "encodings"
    tables = [
        path
        for path in sorted(library.glob("*.py"))
        if "decoding_table = (" in path.read_text("utf-8")
    ]
    for path in tables[:: max(1, len(tables) // COUNT)][:COUNT]:
        text = path.read_text("utf-8")
        start = text.index("decoding_table = (")
        kinds["tables"].append(text[start : start + 900])
    for kind, texts in kinds.items():
        rows = [{"id": f"{kind}-{i}", "prompt": text} for i, text in enumerate(texts)]
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def plot(out: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from forerun.bench.records import parse

    speeds: dict[tuple, dict[str, float]] = defaultdict(dict)
    for record in map(parse, (out / "records.jsonl").read_text().splitlines()):
        speeds[record.group][record.method] = record.stats.tokens_per_s
    methods = [name for name in next(iter(speeds.values())) if name != "ar"]
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        mine = [each for key, each in speeds.items() if key[1] == f"{kind}.jsonl"]
        table[kind] = {name: median(each[name] / each["ar"] for each in mine) for name in methods}
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for name in sorted(methods):
        axes.plot(KINDS, [table[kind][name] for kind in KINDS], "o-", label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(ylabel="tokens/s over plain decoding", ylim=(0, None))
    axes.legend(ncol=2, fontsize=8)
    figure.savefig(picture, dpi=120)
    print("| kind | " + " | ".join(sorted(methods)) + " |")
    print("|---|" + "---:|" * len(methods))
    for kind in KINDS:
        print(
            f"| {kind} | "
            + " | ".join(f"{table[kind][name]:.2f}" for name in sorted(methods))
            + " |"
        )


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        plot(Path(sys.argv[2]), Path(sys.argv[3]))
