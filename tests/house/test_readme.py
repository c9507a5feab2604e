"""The figures of README, and what commands write into docs/, are up to date.

They must equal those of the JSON files that they were written from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import api, architectures, cli, methods, race, results
from forerun.methods import METHODS, settings_of

ROOT = Path(__file__).parents[2]
TALK = ("test.jsonl", "humaneval")
README = "README.md"


def columns(datasets: tuple[str, ...], *files: str) -> list[tuple[str, str]]:
    return [(file, dataset) for file in files for dataset in datasets]


# Tables of figures: by header (after its first column), each column's file in benchmarks/speed/ and
# its dataset. FEW has the file of rows that a column's own file lacks, of fewer prompts.
FEW = {"qwen-coder/long/known.json": "qwen-coder/long/known-peers.json"}
FIGURES = {
    "mixed questions | HumanEval as chat | prompts of 4,000 tokens"
    " | 4,000 tokens read before, and a question": [
        *columns(TALK, "qwen-coder/greedy.json"),
        ("qwen-coder/long/4000.json", "long-4000.jsonl.gz"),
        ("qwen-coder/long/known.json", "long-known.jsonl.gz"),
    ],
}
NAMES = {"llama.cpp": "llama-cpp", "plain decoding": "ar", "forerun": "hybrid"}  # of rows
WORDS = {"built | ran", "read"}  # tables without figures
Rows = dict[str, list[str]]


def tables(text: str) -> dict[str, Rows]:
    """Return each table of a page: its header without the first column, and rows by first cell."""
    by_header = {}
    for match in re.finditer(r"^\|.*\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in match[0].splitlines()
        )
        assert all(len(row) == len(header) for row in rows)
        by_header[" | ".join(header[1:])] = {
            row[0].strip("*"): [cell.strip("*") for cell in row[1:]] for row in rows
        }
    return by_header


@cache
def measured(file: str, dataset: str) -> dict[str, Any]:
    results = json.loads((ROOT / "benchmarks" / "speed" / file).read_text())
    methods = results["datasets"][dataset]["methods"]
    return measured(FEW[file], dataset) | methods if file in FEW else methods


def is_of(row: str, name: str) -> bool:
    method = NAMES.get(row, row.strip("`"))
    return name == method or name.startswith(f"{method}/")


def wrong(sources: list[tuple[str, str]], rows: Rows) -> list[str]:
    mistakes = []
    ran = set[str]()
    for column, source in enumerate(sources):
        methods = measured(*source)
        ran |= methods.keys()
        for row, cells in rows.items():
            method = next((figures for name, figures in methods.items() if is_of(row, name)), None)
            wanted = (
                f"{method['tokens_per_s']:.0f} ({method['speedup']:.2f})"
                if method is not None
                else ""
            )
            if cells[column] != wanted:
                mistakes.append(f"{row}, {source}: {cells[column]!r} and not {wanted!r}")
    mistakes += [
        f"a row without a method: {row}"
        for row in rows
        if not any(is_of(row, name) for name in ran)
    ]
    return mistakes


@pytest.fixture(scope="module")
def readme() -> dict[str, Rows]:
    return tables((ROOT / README).read_text(encoding="utf-8"))


@pytest.mark.parametrize("header", FIGURES)
def test_figures_are_those_of_the_files(header: str, readme: dict[str, Rows]) -> None:
    assert wrong(FIGURES[header], readme[header]) == []


def explained(method: str) -> set[str]:
    """Return the settings that a method's section names, itself or by naming another method."""
    names = set(re.findall(r"`([\w-]+)`", METHODS[method].__doc__ or ""))
    others = [explained(name) for name in names & METHODS.keys() - {method}]
    return names.union(*others)


@pytest.mark.parametrize("method", METHODS)
def test_the_page_of_methods_explains_each_setting(method: str) -> None:
    assert settings_of(METHODS[method]).keys() - explained(method) == set()


def test_every_table_is_looked_at(readme: dict[str, Rows]) -> None:
    assert readme.keys() == FIGURES.keys() | WORDS


@pytest.mark.parametrize(
    ("path", "made", "command"),
    [
        (api.OUT, api.page, "python -m benchmarks.pages.api"),
        (architectures.OUT, architectures.page, "python -m benchmarks.pages.architectures"),
        (cli.OUT, cli.page, "python -m benchmarks.pages.cli"),
        (methods.OUT, methods.page, "python -m benchmarks.pages.methods"),
        (results.KERNELS, results.kernels_page, "python -m benchmarks.pages.results"),
        (results.SHAPES, results.shapes_page, "python -m benchmarks.pages.results"),
        (results.RESTART, results.restart_page, "python -m benchmarks.pages.results"),
        (race.OUT, race.race, "python -m benchmarks.pages.race"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_commands_write_is_up_to_date(
    path: Path, made: Callable[[], str], command: str
) -> None:
    assert path.read_text(encoding="utf-8") == made(), f"{path} is old: {command}"
