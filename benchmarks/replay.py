"""The speedups that a recorded run would have at other costs of forwards, without running anything.

    python -m benchmarks.replay RUN [COSTS.json]

RUN is a folder of `forerun bench --out`. Its records say what each step was: rows, tokens that the target looked at,
forwards of the draft. COSTS.json has milliseconds by tokens, {"target": {"1": ms, ...}, "draft": {...}, ...}, with the
fields of `forerun.engine.costs.Costs`; without it the costs are those that the run measured. Forwards are all that
takes time.
Methods that go by costs went by those of the machine that they ran on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forerun.bench.records import Record, parse
from forerun.bench.report import summary
from forerun.engine.costs import Costs, costs_of
from forerun.files import read_text
from forerun.methods import Method, is_method, method, method_class, settings_of

USUAL_BLOCK = 4  # tokens a call of Pacer's layer, where it chooses for itself


def replayed(folder: Path, costs: Costs | None = None) -> dict[str, dict[str, Any]]:
    """What `forerun.bench.report.summary` has of our methods at these costs, by dataset.

    Raises ValueError where the folder holds no such run, where a clock decided when to draft, and for a table without
    the costs of a draft or a head that a method needs.
    """
    try:
        results = json.loads(read_text(folder / "results.json"))
        arguments, measured = results["arguments"], costs_of(results["costs"])
        methods = {
            name: _method(own, settings)
            for name, settings in arguments["methods"].items()
            if is_method(own := name.partition("=")[0].rpartition(".")[0] if "=" in name else name)
        }
        records = [parse(line) for line in read_text(folder / "records.jsonl").splitlines()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} holds no finished run of `forerun bench --out`: {error}") from None
    records = [record for record in records if record.method in methods]
    if arguments["guard"] or not all(record.work for record in records):
        raise ValueError(f"{folder} cannot be replayed: its records do not say what steps were, or a guard chose them")
    table = costs or measured
    table = table.sampled if arguments["temperature"] else table
    for name, each in methods.items():
        for part, needed in (("draft", each.needs_draft), ("head", each.head is not None)):
            if needed and not getattr(table, part):
                raise ValueError(f"method {name!r} needs the costs of a {part}; the table has none")
    repriced = [replace(each, stats=replace(each.stats, seconds=seconds(each, methods, table))) for each in records]
    datasets = dict.fromkeys(record.dataset for record in repriced)
    return {name: summary([each for each in repriced if each.dataset == name]) for name in datasets}


def _method(name: str, settings: Mapping[str, Any]) -> Method:
    """Return a method with those settings that it still has: results may be of an older version."""
    known = settings_of(method_class(name))
    return method(name, **{key: value for key, value in settings.items() if key in known})


def seconds(record: Record, methods: Mapping[str, Method], costs: Costs) -> float:
    """The time of a record's steps."""
    own, ms = methods[record.method], 0.0
    policy = costs.policy / (getattr(own, "block", None) or USUAL_BLOCK) if own.layer else 0.0
    for count, rows, nodes, forwards in record.work or ():
        draft = costs.heading(rows) if own.head is not None else costs.drafting(rows) if costs.draft else 0.0
        ms += count * (costs.verify(rows * nodes) + forwards * (draft + policy))
    return ms / 1000


def main(folder: str, file: str | None = None) -> None:
    costs = costs_of(asdict(Costs({}, {})) | json.loads(Path(file).read_text())) if file is not None else None
    for dataset, methods in replayed(Path(folder), costs).items():
        print(dataset)
        for name, each in methods.items():
            low, high = each["speedup_p10"], each["speedup_p90"]
            print(f"  {name:20} {each['speedup']:6.2f} ({low:.2f}-{high:.2f}), tau {each['tau']:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
