"""A recorded run at other costs, beside what its steps add up to by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.replay import replayed
from forerun.bench.records import Record, Times, Work
from forerun.engine.costs import Costs
from forerun.engine.stats import Stats

PACER = {"block": 2, "threshold": 0.5, "score": "last"}  # an older version had a score
LYANNA = {"depth": 4}
WORK: dict[str, list[Work]] = {  # of two batches: how many steps, rows, nodes of a row, forwards of the draft
    "ar": [((12, 1, 1, 0),), ((12, 1, 1, 0),)],
    "sd.gamma=2": [((3, 1, 3, 2), (3, 1, 1, 0)), ((4, 1, 3, 2),)],
    "pacer": [((4, 1, 4, 3),), ((4, 1, 4, 3),)],
    "lyanna": [((4, 2, 4, 3),), ((4, 2, 4, 3),)],
    "hf-forward/sd": [((4, 1, 4, 3),), ((4, 1, 4, 3),)],
}
SETTINGS = {"ar": {}, "sd.gamma=2": {"gamma": 2}, "pacer": PACER, "lyanna": LYANNA, "hf-forward/sd": {"gamma": 3}}
OWN = Costs({1: 4.0, 8: 4.0}, {1: 1.0}, policy=0.4, head={1: 0.5})


def run(folder: Path, records: dict[str, list[Work]] = WORK, **arguments: object) -> Path:
    """A folder as `forerun bench --out` leaves it. Every record took a second, whatever it did."""
    spent = Times(12, 0.0, 0.0, 1.0, 0.0, 1.0)
    with (folder / "records.jsonl").open("w") as file:
        for name, works in records.items():
            for batch, work in enumerate(works):
                stats = Stats(12, 12, 0, 0, 0, 0, 1.0, (), ())
                file.write(Record(0, "d", batch, ["p"], name, stats, spent, work, 0.0, None).line())
    usual = {"methods": {name: SETTINGS[name] for name in records}, "guard": False, "temperature": 0.0}
    (folder / "results.json").write_text(json.dumps({"arguments": usual | arguments, "costs": asdict(OWN)}))
    return folder


def speedups(folder: Path, costs: Costs | None = None) -> dict[str, float]:
    (methods,) = replayed(folder, costs).values()
    return {name: each["speedup"] for name, each in methods.items()}


def test_steps_take_what_the_table_says(tmp_path: Path) -> None:
    found = speedups(run(tmp_path))  # at the run's own costs
    sd = (48 / (6 * 4 + 6 * 1) + 48 / (4 * 4 + 8 * 1)) / 2  # the median of two
    assert found == pytest.approx({"ar": 1.0, "sd.gamma=2": sd, "pacer": 48 / (4 * (4 + 3 * 1.2)), "lyanna": 2.1818},
                                  abs=1e-4)  # fmt: skip
    other = Costs({1: 5.0, 4: 8.0}, {1: 2.0}, head={1: 1.0, 2: 1.5})
    found = speedups(tmp_path, other)
    assert found["lyanna"] == pytest.approx(60 / (4 * (12.0 + 3 * 1.5)), abs=1e-4)  # eight nodes, on the table's line
    assert found["pacer"] == pytest.approx(60 / (4 * (8 + 3 * 2)), abs=1e-4)


def test_sampled_steps_take_longer(tmp_path: Path) -> None:
    costs = Costs({1: 4.0, 8: 4.0}, {1: 1.0}, head={1: 0.5}, drawing=0.5, judging=1.0)
    greedy = speedups(run(tmp_path), costs)
    assert greedy["pacer"] == pytest.approx(48 / (4 * (4 + 3)), abs=1e-4)
    sampled = speedups(run(tmp_path, temperature=1.0), costs)
    assert sampled["pacer"] == pytest.approx(60 / (4 * (8 + 3 * 1.5)), abs=1e-4)


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no finished run"):
        replayed(tmp_path)
    with pytest.raises(ValueError, match="a guard chose them"):
        replayed(run(tmp_path, guard=True))
    with pytest.raises(ValueError, match="do not say what steps were"):
        replayed(run(tmp_path, {"ar": [()]}))
    with pytest.raises(ValueError, match="method 'lyanna' needs the costs of a head; the table has none"):
        replayed(run(tmp_path), Costs({1: 1.0}, {1: 1.0}))
