"""The records of a run, what one method did with one batch of prompts in one round, and the folder that has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from forerun.bench.plan import Plan, model_name
from forerun.engine.engine import Step
from forerun.engine.stats import Stats
from forerun.files import read_text, write_text

Group = tuple[int, str, int]  # round, dataset, batch: what is compared with each other


@dataclass(frozen=True)
class Times:
    """Where the time of decoding steps went, in seconds; a step of a batch counts once.

    Attributes:
        draft, policy, verify: drafting, deciding how long to draft, and the target's forward with its verdicts.
        rest: everything else in a step.
        forward: inside forwards of the target and the draft; on a GPU the time to start them.
    """

    draft: float
    policy: float
    verify: float
    rest: float
    forward: float

    @property
    def seconds(self) -> float:
        return self.draft + self.policy + self.verify + self.rest

    @property
    def overhead_share(self) -> float:
        """Share of step time outside the models' forwards."""
        return 1 - self.forward / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        prompts: ids of the batch's prompts.
        stats, times: counts and step times of all rows; times is None if the method keeps no steps.
        equal: for each row whether it is the reference's greedy output; None when sampling.
        decoding_tokens_per_s: without the time of reading prompts; None if the method does not tell.
    """

    round: int
    dataset: str
    batch: int
    prompts: list[str]
    method: str
    stats: Stats
    times: Times | None
    equal: list[bool] | None
    decoding_tokens_per_s: float | None = None

    @property
    def group(self) -> Group:
        return self.round, self.dataset, self.batch

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def parse(line: str) -> Record:
    """Return the record of a line."""
    entry = json.loads(line)
    stats: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in entry["stats"].items()
    }
    times = Times(**entry["times"]) if entry["times"] is not None else None
    return Record(**entry | {"stats": Stats(**stats), "times": times})


def open_folder(out: Path, plan: Plan, found: dict[str, Any], resume: bool) -> list[Record]:
    """Make the folder of a run and return no records; with `resume`, those of the run there, if it has any. What a run
    goes by is in run.json: the plan, what was `found` of prompts and versions, and when the models were written.

    Batches are compared as wholes: records of one without all methods, and a torn line, leave the file. Raises
    ValueError if the folder cannot be made, holds a run without `resume`, is damaged, or holds a run of anything else.
    """
    path, claim, now = out / "records.jsonl", out / "run.json", _goes_by(plan, found)
    if not path.exists():
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {out}: {error.strerror}") from None
        write_text(claim, json.dumps(now, indent=1) + "\n")
        return []
    if not resume:
        raise ValueError(
            f"{out} holds a run already: give --resume to go on with it, or another --out"
        )
    text, lines = read_text(claim), read_text(path).split("\n")[:-1]
    lines = lines[
        : len(lines) // len(plan.methods) * len(plan.methods)
    ]  # those of a batch follow each other
    try:
        before, records = dict(json.loads(text)), [parse(line) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{out} is damaged ({error}): give another --out") from None
    for name in sorted(now.keys() | before.keys()):
        was, given = (json.dumps(each.get(name)) for each in (before, now))
        if was != given:
            raise ValueError(
                f"{out} holds another run: {name} was {was}, not {given}; give another --out"
            )
    write_text(path, "".join(f"{line}\n" for line in lines))
    return records


def _goes_by(plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    models = {"target": plan.target, "draft": plan.draft, "pre_verifier": plan.pre_verifier}
    models |= {model_name(folder): folder for folder in plan.head}
    written = {name: _written(source) for name, source in models.items() if source is not None}
    parts = plan.arguments() | found | {"written": written}
    flat = {
        f"{part}.{name}": one
        for part, each in parts.items()
        if type(each) is dict
        for name, one in each.items()
    }
    return json.loads(
        json.dumps(flat | {name: one for name, one in parts.items() if type(one) is not dict})
    )


def _written(source: str | Path) -> str | None:
    """Return when the newest file of a model's folder was written; None for what is no file or folder here."""
    path = Path(source).expanduser()
    times = [each.stat().st_mtime for each in (path, *path.glob("*")) if each.is_file()]
    return datetime.fromtimestamp(max(times), UTC).isoformat() if times else None


def total(parts: Sequence[Stats]) -> Stats:
    """Return the statistics of several calls together."""
    names = (
        "tokens",
        "target_forwards",
        "draft_forwards",
        "drafted",
        "tested",
        "accepted",
        "seconds",
    )
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Stats(
        **sums,
        reached=tuple(map(sum, zip_longest(*(part.reached for part in parts), fillvalue=0))),
        kept=tuple(map(sum, zip_longest(*(part.kept for part in parts), fillvalue=0))),
    )


def times(rows: Sequence[Sequence[Step]]) -> Times:
    """Return the time of a batch from the steps of its rows; steps of one number are one step of the engine."""
    steps = {step.number: step for row in rows for step in row}.values()
    draft = sum(step.draft_seconds for step in steps)
    policy = sum(step.policy_seconds for step in steps)
    verify = sum(step.verify_seconds for step in steps)
    return Times(
        draft=draft,
        policy=policy,
        verify=verify,
        rest=sum(step.seconds for step in steps) - draft - policy - verify,
        forward=sum(step.forward_seconds for step in steps),
    )
