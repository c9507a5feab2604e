"""The speedups that recorded runs would have at other costs, without running anything.

A run's records hold the size of each step: how many tokens the target looked at, and how many forwards the draft made.
Which tokens were accepted depends on the models alone. How long each step would take follows from a cost table.
Methods that go by costs should have gone by those costs: `forerun bench --costs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.bench.choose import is_llama
from forerun.bench.prices import Prices, fitted, kind
from forerun.bench.records import Record, Records
from forerun.bench.report import summary
from forerun.bench.roofline import check_costs
from forerun.costs import Costs
from forerun.files import read_text
from forerun.methods import Method, drop_removed, method
from forerun.profiles import costs_of

USUAL_BLOCK = 4  # tokens a call of Pacer's layer, where it chooses for itself


@dataclass(frozen=True)
class RecordedRun:
    """A run of `forerun bench --out`.

    Attributes:
        methods: of ours, by the names that results use.
        records: of these.
        costs, given: what forwards cost, or what --costs gave for them, and the name of that.
        batch, samples: of the run.
        source: its arguments, versions and date.
    """

    methods: dict[str, Method]
    records: list[Record]
    costs: Costs
    given: str | None
    batch: int
    samples: bool
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        return {name: kind(each) for name, each in self.methods.items()}


def read_run(folder: Path) -> RecordedRun:
    """Raises ValueError where the folder holds no finished run, or one from before runs kept what this needs."""
    try:
        results = json.loads(read_text(folder / "results.json"))
        arguments, costs = results["arguments"], costs_of(results["costs"])
        methods = {
            name: method(name.partition(".")[0], **drop_removed(settings))
            for name, settings in arguments["methods"].items()
            if not (name.startswith("hf-") or is_llama(name))
        }
        records = Records(folder / "records.jsonl")
        records.resume(list(arguments["methods"]), mend=False)
        own = [record for record in records.all if record.method in methods]
        if not own or not all(record.work for record in own):
            raise ValueError("its records do not say what steps were")
        if arguments["guard"]:
            raise ValueError("a clock decided when it drafted (--guard)")
        given, batch, samples = arguments["costs"], arguments["batch"], arguments["temperature"] > 0
        source = {key: results.get(key) for key in ("arguments", "versions", "date")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} holds no run of `forerun bench --out` that can be simulated: {error}") from None
    return RecordedRun(methods, own, costs, given, batch, samples, source)


def simulated(run: RecordedRun, costs: Costs) -> dict[str, Any]:
    """Speedups of the run's methods on a machine with these costs, where nothing else takes time; by dataset, as
    `forerun.bench.report.summary` has them. Heads of all kinds cost one of the table.

    Raises ValueError for a table without a draft or a head that a method needs.
    """
    check_costs(costs, run.methods)
    costs = costs.sampled if run.samples else costs
    layered = [each for each in run.methods.values() if each.layer]
    policies = {kind(each): costs.policy / (getattr(each, "block", None) or USUAL_BLOCK) for each in layered}
    return _summaries(repriced(run.records, Prices(costs, token_ms=policies), run.kinds), run.batch)


def check(run: RecordedRun, other: RecordedRun | None = None) -> dict[str, Any]:
    """Measured and predicted speedups of prompts that the prediction knows nothing of but their steps: what steps take
    beyond forwards is learnt from every other batch of the run, or from `other`, and the rest is predicted.

    Raises ValueError for a run that went by other costs than its machine's, for one with fewer than two batches, and
    for an `other` that lacks a kind of method.
    """
    for each in filter(None, (run, other)):
        if each.given is not None:
            raise ValueError(f"its methods went by {each.given}, not by what forwards cost there: give --costs")
    source, learnt, asked = other or run, (other or run).records, run.records
    if other is None:
        learnt, asked = ([record for record in asked if record.batch % 2 == part] for part in (0, 1))
    if not asked:
        raise ValueError("there is nothing to check on: the run has a single batch of each dataset")
    for name, its in run.kinds.items():
        if its not in source.kinds.values():
            raise ValueError(f"nothing is known of {name!r}: the run to learn from has no method of its kind")
    prices = replace(fitted(source.costs, learnt, source.kinds), costs=run.costs)
    predicted = _summaries(repriced(asked, prices, run.kinds), run.batch)
    found = _summaries(asked, run.batch)
    rows = {
        dataset: {
            name: {
                "measured": each["speedup"],
                "predicted": predicted[dataset][name]["speedup"],
                "error": round(predicted[dataset][name]["speedup"] / each["speedup"] - 1, 4),
            }
            for name, each in methods.items()
        }
        for dataset, methods in found.items()
    }
    return {"datasets": rows, "prices": asdict(prices)}


def repriced(records: Sequence[Record], prices: Prices, kinds: Mapping[str, str]) -> list[Record]:
    """Records as if they had taken the time that the prices give."""

    def seconds(record: Record) -> float:
        kind = kinds[record.method]
        return (prices.steps_ms(kind, record) + prices.start_ms.get(kind, 0.0)) / 1000

    return [replace(record, stats=replace(record.stats, seconds=seconds(record))) for record in records]


def _summaries(records: Sequence[Record], batch: int) -> dict[str, Any]:
    datasets = dict.fromkeys(record.dataset for record in records)
    return {name: summary([each for each in records if each.dataset == name], {}, batch) for name in datasets}
