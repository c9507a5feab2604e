"""README's figures are those of the JSON files that it was written from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CELL = re.compile(r"(?P<rate>\d+) \((?P<ratio>\d+\.\d+)\)|(?P<alone>\d+\.\d+)")


@dataclass(frozen=True)
class Table:
    """A table of README, with a method a row.

    Attributes:
        header: of its columns behind the first, as they stand there.
        sources: for each of these the file below benchmarks/, and the dataset in it.
        rows: the method of each row, by the row's first cell.
        left_out: methods that ran and have no row: there should be none.
        over: the method that the ratios are to. Others than `ar` are checked where the file has them.
    """

    header: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    rows: dict[str, str]
    left_out: frozenset[str] = frozenset()
    over: str = "ar"


def both(*files: str) -> tuple[tuple[str, str], ...]:
    """Two columns a file."""
    return tuple((file, dataset) for file in files for dataset in ("stdlib-test", "humaneval"))


def own(*names: str) -> dict[str, str]:
    """Rows that are named as their methods."""
    return {f"`{name}`": name for name in names}


TABLES = [
    Table(
        ("own prompts", "HumanEval as chat", "GSM8K as chat"),
        tuple(("chat/greedy.json", dataset) for dataset in ("test.jsonl", "humaneval", "gsm8k")),
        {
            "llama.cpp": "llama-cpp",
            "llama.cpp, prompt lookup (2 tokens behind 3)": "llama-cpp-lookup/2/3",
            "forerun `hybrid`, suffixes and then `cumulative`": "hybrid",
        }
        | {
            f"forerun `{name}`": name
            for name in ("ar", "sd", "cumulative", "confidence", "pacer", "lookup", "suffix", "ouroboros")
        },
    ),
    Table(
        ("greedy: stdlib", "HumanEval", "temperature 1: stdlib", "HumanEval", "batch 8: stdlib", "HumanEval"),
        both("cpu/greedy.json", "cpu/sampling.json", "cpu/batch8.json"),
        {
            "transformers `generate`": "hf-ar",
            "transformers, `assistant_model` (best schedule)": "hf-assisted",
            "transformers, prompt lookup": "hf-lookup",
        }
        | {f"forerun `{name}`": name for name in ("ar", "sd", "lookup")},
    ),
    Table(
        ("128 new tokens: stdlib", "HumanEval", "512: stdlib", "HumanEval"),
        both("ouroboros/128.json", "ouroboros/512.json"),
        own("ar", "pacer", "ouroboros", "pacer-ouroboros")
        | {"`sd`, `gamma` 6": "sd", "`cumulative`, the best rule without training": "cumulative"},
        frozenset({"lookup"}),
        over="sd",
    ),
    Table(
        ("batch 4: stdlib", "HumanEval", "batch 16: stdlib", "HumanEval"),
        both("lyanna/batch-4.json", "lyanna/batch-16.json"),
        own("pacer", "pacer-ouroboros") | {"`sd`, the best `gamma` on validation prompts": "sd"},
        frozenset({"ar", "lookup", "medusa", "eagle", "lyanna", "pacer-lyanna"}),
    ),
]
# What else is in README's tables: words, and no figures.
WORDS = (("who proposes", "settings"), ("what the target is", "verified logits"))


def tables(text: str) -> dict[tuple[str, ...], dict[str, list[str]]]:
    """Every table of a page: its header behind the first column, and the cells of each row by its first."""
    found = {}
    for match in re.finditer(r"^\|.*\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in match[0].splitlines())
        assert all(len(row) == len(header) for row in rows)
        found[tuple(header[1:])] = {row[0].strip("*"): [cell.strip("*") for cell in row[1:]] for row in rows}
    return found


@cache
def measured(file: str, dataset: str) -> dict[str, Any]:
    """The methods of one dataset of a run."""
    return json.loads((ROOT / "benchmarks" / file).read_text())["datasets"][dataset]["methods"]


def wrong(table: Table, rows: dict[str, list[str]]) -> list[str]:
    """What is not as in the files."""
    found = [f"a row {name!r}" for name in sorted(rows.keys() ^ table.rows.keys())]
    for name in sorted(rows.keys() & table.rows.keys()):
        for column, (file, dataset), cell in zip(table.header, table.sources, rows[name], strict=True):
            method = measured(file, dataset).get(table.rows[name])
            figures = CELL.fullmatch(cell)
            if (method is None or figures is None) and (method is not None or cell):
                found.append(f"{name}, {column}: {cell!r}")
            if method is None or figures is None:
                continue
            ratio = method["speedup"] if table.over == "ar" else method.get("over", {}).get(table.over)
            said = figures["ratio"] or figures["alone"]
            if ratio is not None and said != f"{ratio:.2f}":
                found.append(f"{name}, {column}: {said} and not {ratio:.2f}")
            if figures["rate"] is not None and figures["rate"] != f"{method['tokens_per_s']:.0f}":
                found.append(f"{name}, {column}: {figures['rate']} and not {method['tokens_per_s']:.0f}")
    ran = {name for file, dataset in table.sources for name in measured(file, dataset) if "hf-assisted/" not in name}
    if ran - set(table.rows.values()) != table.left_out:
        found.append(f"methods without a row: {', '.join(sorted(ran - set(table.rows.values())))}")
    return found


@pytest.fixture(scope="module")
def page() -> dict[tuple[str, ...], dict[str, list[str]]]:
    return tables((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.header[0])
def test_figures_are_those_of_the_files(table: Table, page: dict[tuple[str, ...], dict[str, list[str]]]) -> None:
    assert wrong(table, page[table.header]) == []


def test_every_table_is_looked_at(page: dict[tuple[str, ...], dict[str, list[str]]]) -> None:
    assert page.keys() == {table.header for table in TABLES} | set(WORDS)


def test_a_wrong_figure_is_found(page: dict[tuple[str, ...], dict[str, list[str]]]) -> None:
    table = TABLES[1]
    rows = {name: list(cells) for name, cells in page[table.header].items()}
    rows["forerun `sd`"][:2] = ["463 (1.96)", "412 (1.97)"]
    rows["forerun `lookup`"][0] = "fast"
    assert wrong(table, rows) == [
        "forerun `lookup`, greedy: stdlib: 'fast'",
        "forerun `sd`, greedy: stdlib: 463 and not 462",
        "forerun `sd`, HumanEval: 1.97 and not 1.79",
    ]
    del rows["forerun `sd`"]
    assert "a row 'forerun `sd`'" in wrong(table, rows)
