"""The lines of records.jsonl: what one method did with one batch of prompts in one round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.engine.stats import Stats, Times, Work
from forerun.files import read_text, write_text

Group = tuple[int, str, int]  # round, dataset, batch: what is compared with each other
Margins = dict[tuple[str, str, int, int | None], float]  # by dataset, prompt, position and the token there


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        prompts: ids of the batch's prompts.
        stats, times: counts and step times (seconds) of all rows; times is None where the method keeps no steps.
        work: what the steps were (`forerun.engine.stats.work`), for benchmarks/replay.py; None likewise.
        prefill_seconds: time of the call outside of steps: prefill and set-up; None likewise.
        equal: for each row whether it is the reference's greedy output; None when sampling.
        differences: where rows differ: row, position, both tokens (None behind the end) and the tokens before.
    """

    round: int
    dataset: str
    batch: int
    prompts: list[str]
    method: str
    stats: Stats
    times: Times | None
    work: Work | None
    prefill_seconds: float | None
    equal: list[bool] | None
    differences: list[dict[str, Any]]

    @property
    def group(self) -> Group:
        return self.round, self.dataset, self.batch

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def parse(line: str) -> Record:
    entry = json.loads(line)
    stats: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry["stats"].items()
    }
    times = Times(**entry["times"]) if entry["times"] is not None else None
    work = tuple((count, rows, nodes, forwards) for count, rows, nodes, forwards in entry.get("work") or ())
    return Record(**entry | {"stats": Stats(**stats), "times": times, "work": work or None})


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> dict[str, Any] | None:
    """Where two outputs part, None where they do not."""
    at = next((i for i, pair in enumerate(zip(ours, reference, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        if len(ours) == len(reference):
            return None
        at = min(len(ours), len(reference))
    return {
        "at": at,
        "token": ours[at] if at < len(ours) else None,
        "reference": reference[at] if at < len(reference) else None,
        "before": list(reference[:at]),
    }


class Records:
    """All records of a run, kept in a file where there is a folder for it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.all: list[Record] = []

    def resume(self, methods: Sequence[str]) -> None:
        """Takes up what an earlier process finished. Drops a torn last line, and groups that are not complete, in the
        file too: what is compared must have been measured in one go."""
        if self.path is None or not self.path.exists():
            return
        lines = read_text(self.path).split("\n")
        whole, torn = lines[:-1], lines[-1]
        records = []
        for number, line in enumerate(whole, 1):
            try:
                records.append(parse(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{self.path}, line {number}: not a record of this program") from None
        found: dict[Group, set[str]] = {}
        for record in records:
            found.setdefault(record.group, set()).add(record.method)
        complete = {group for group, names in found.items() if names == set(methods)}
        self.all = [record for record in records if record.group in complete]
        if torn or len(self.all) < len(records):
            kept = [line for line, record in zip(whole, records, strict=True) if record.group in complete]
            write_text(self.path, "".join(f"{line}\n" for line in kept))

    @property
    def groups(self) -> set[Group]:
        return {record.group for record in self.all}

    def add(self, group: Sequence[Record]) -> None:
        """Appends the records of one group and puts them on disk at once."""
        self.all += group
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(record.line() for record in group))
