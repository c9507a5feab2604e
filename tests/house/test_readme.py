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

from benchmarks.pages import api, race
from forerun.methods import METHODS

ROOT = Path(__file__).parents[2]
TALK = ("test.jsonl", "humaneval")
README = "README.md"


def columns(datasets: tuple[str, ...], *files: str) -> list[tuple[str, str]]:
    return [(file, dataset) for file in files for dataset in datasets]


# Tables of figures: by page and header (after its first column), each column's file in
# benchmarks/speed/ and its dataset.
FIGURES = {
    (
        README,
        "own prompts | HumanEval as chat | prompts of 4,000 tokens"
        " | a question about 4,000 known tokens",
    ): [
        *columns(TALK, "qwen-coder/greedy.json"),
        ("qwen-coder/long/4000.json", "long-4000.jsonl.gz"),
        ("qwen-coder/long/known.json", "long-known.jsonl.gz"),
    ],
}
NAMES = {"llama.cpp": "llama-cpp"}  # rows that are not named as their methods
# Tables of words, without figures.
LENGTHS = "1 token | 8 tokens | prompt tokens/s | llama.cpp: 1 token | its prompt tokens/s"
WORDS = {
    README: {"", "read", "take | by", "who proposes | settings", LENGTHS},
}
Rows = dict[str, list[str]]
Pages = dict[str, dict[str, Rows]]


def tables(text: str) -> dict[str, Rows]:
    """Return each table of a page: its header without the first column, and rows by first cell."""
    found = {}
    for match in re.finditer(r"^\|.*\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in match[0].splitlines()
        )
        assert all(len(row) == len(header) for row in rows)
        found[" | ".join(header[1:])] = {
            row[0].strip("*"): [cell.strip("*") for cell in row[1:]] for row in rows
        }
    return found


@cache
def measured(file: str, dataset: str) -> dict[str, Any]:
    results = json.loads((ROOT / "benchmarks" / "speed" / file).read_text())
    return results["datasets"][dataset]["methods"]


def is_of(row: str, name: str) -> bool:
    method = NAMES.get(row, row.strip("`"))
    return name == method or name.startswith(f"{method}/")


def wrong(sources: list[tuple[str, str]], rows: Rows) -> list[str]:
    found = []
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
                found.append(f"{row}, {source}: {cells[column]!r} and not {wanted!r}")
    found += [
        f"a row without a method: {row}"
        for row in rows
        if not any(is_of(row, name) for name in ran)
    ]
    return found + [
        f"a method without a row: {name}"
        for name in ran
        if not any(is_of(row, name) for row in rows)
    ]


@pytest.fixture(scope="module")
def pages() -> Pages:
    return {page: tables((ROOT / page).read_text(encoding="utf-8")) for page in (README,)}


@pytest.mark.parametrize(("page", "header"), FIGURES)
def test_figures_are_those_of_the_files(page: str, header: str, pages: Pages) -> None:
    assert wrong(FIGURES[page, header], pages[page][header]) == []


def test_forwards_by_length_are_those_of_the_file(pages: Pages) -> None:
    results = json.loads((ROOT / "benchmarks/kernels/context.json").read_text())["results"][
        "qwen-coder"
    ]
    ours, theirs = (results[name]["contexts"] for name in ("avx512vnni", "llama.cpp"))
    wanted = {}
    for length, forwards in ours.items():
        ms, peer = forwards["ms"], theirs[length]
        reading = [f"{each['prompt_tokens_per_s_after']:.0f}" for each in (forwards, peer)]
        wanted[f"{int(length):,}"] = [
            f"{ms['1']:.1f}",
            f"{ms['8']:.1f}",
            reading[0],
            f"{peer['ms']['1']:.1f}",
            reading[1],
        ]
    assert pages[README][LENGTHS] == wanted


@pytest.mark.parametrize(
    ("path", "made", "command"),
    [
        (api.OUT, api.page, "python -m benchmarks.pages.api"),
        (race.OUT, race.race, "python -m benchmarks.pages.race"),
    ],
    ids=("api", "race"),
)
def test_what_commands_write_is_up_to_date(
    path: Path, made: Callable[[], str], command: str
) -> None:
    assert path.read_text(encoding="utf-8") == made(), f"{path} is old: {command}"


def test_every_table_is_looked_at_and_methods_are_those_of_the_package(pages: Pages) -> None:
    for page, words in WORDS.items():
        assert pages[page].keys() == {header for name, header in FIGURES if name == page} | words
    assert {name.strip("`") for name in pages[README]["who proposes | settings"]} == METHODS.keys()
    assert len((ROOT / README).read_text(encoding="utf-8").splitlines()) <= 200
