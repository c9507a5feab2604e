"""The figures of README and of docs/results/README.md are those of the JSON files that they were written from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun.methods import METHODS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Table:
    """A table of a page: columns after the first, the file in benchmarks/ and the dataset of each, and the method of
    each row by its first cell. `hf-lookup` is one with any settings."""

    page: str
    header: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    rows: dict[str, str]


def columns(datasets: tuple[str, ...], *files: str) -> tuple[tuple[str, str], ...]:
    return tuple((file, dataset) for file in files for dataset in datasets)


def own(*names: str) -> dict[str, str]:
    """Return rows that are named as their methods."""
    return {f"`{name}`": name for name in names}


CODE, TALK = ("stdlib-test", "humaneval"), ("test.jsonl", "humaneval", "gsm8k")
OURS = ("ar", "sd", "cumulative", "confidence", "pacer", "lookup", "suffix", "hybrid", "ouroboros")
README, RESULTS = "README.md", "docs/results/README.md"
TABLES = [
    Table(
        README,
        ("own prompts", "HumanEval as chat", "GSM8K as chat"),
        columns(TALK, "chat/greedy.json"),
        {"llama.cpp": "llama-cpp", "llama.cpp, prompt lookup (2 tokens after 3)": "llama-cpp-lookup/2/3"} | own(*OURS),
    ),
    Table(
        RESULTS,
        ("0.7, top-p 0.9: own prompts", "HumanEval", "GSM8K", "1: own prompts", "HumanEval", "GSM8K"),
        columns(TALK, "chat/nucleus.json", "chat/temperature-1.json"),
        own("ar", "sd", "cumulative", "pacer", "lookup", "suffix", "hybrid"),
    ),
    Table(
        RESULTS,
        ("128 tokens: stdlib", "HumanEval", "512 tokens: stdlib", "HumanEval", "temperature 1: stdlib", "HumanEval"),
        columns(CODE, "embedded/greedy.json", "embedded/greedy-512.json", "embedded/temperature-1.json"),
        {
            "transformers `generate`": "hf-ar",
            "transformers, prompt lookup": "hf-lookup",
            "transformers, `assistant_model`": "hf-assisted",
            "`ar`, transformers' forward": "hf-forward/ar",
            "`sd`, transformers' forwards": "hf-forward/sd",
        }
        | own(*OURS, "pacer-ouroboros", "lyanna", "pacer-lyanna"),
    ),
    Table(
        RESULTS,
        ("batches of 4: stdlib", "HumanEval"),
        columns(CODE, "embedded/batch-4.json"),
        own(*OURS, "pacer-ouroboros", "lyanna", "pacer-lyanna"),
    ),
]
# Tables of words, without figures.
WORDS = {README: {("read",), ("who proposes", "settings")}, RESULTS: {("what it has", "processor")}}
Pages = dict[str, dict[tuple[str, ...], dict[str, list[str]]]]


def tables(text: str) -> dict[tuple[str, ...], dict[str, list[str]]]:
    """Every table of a page: its header after the first column, and the cells of each row by its first."""
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


def is_of(row: str, name: str) -> bool:
    return name == row or name.startswith(f"{row}/")


def wrong(table: Table, rows: dict[str, list[str]]) -> list[str]:
    """Return what differs from the files."""
    found = [f"a row {name!r}" for name in sorted(rows.keys() ^ table.rows.keys())]
    ran: set[str] = set()
    for column, (file, dataset) in enumerate(table.sources):
        methods = measured(file, dataset)
        ran |= methods.keys()
        for name in sorted(rows.keys() & table.rows.keys()):
            method = next((figures for each, figures in methods.items() if is_of(table.rows[name], each)), None)
            wanted = f"{method['tokens_per_s']:.0f} ({method['speedup']:.2f})" if method is not None else ""
            if rows[name][column] != wanted:
                found.append(f"{name}, {table.header[column]}: {rows[name][column]!r} and not {wanted!r}")
    rowless = sorted(name for name in ran if not any(is_of(row, name) for row in table.rows.values()))
    return found + [f"a method without a row: {name}" for name in rowless]


@pytest.fixture(scope="module")
def pages() -> Pages:
    return {page: tables((ROOT / page).read_text(encoding="utf-8")) for page in (README, RESULTS)}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.header[0])
def test_figures_are_those_of_the_files(table: Table, pages: Pages) -> None:
    assert wrong(table, pages[table.page][table.header]) == []


def test_every_table_is_looked_at_and_methods_are_those_of_the_package(pages: Pages) -> None:
    for page, words in WORDS.items():
        assert pages[page].keys() == {table.header for table in TABLES if table.page == page} | words
    assert {name.strip("`") for name in pages[README]["who proposes", "settings"]} == METHODS.keys()
    assert len((ROOT / README).read_text(encoding="utf-8").splitlines()) <= 200
