"""The records of a run, and the folder that holds them.

A record is what one method did with one batch of prompts in one round.
"""

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

Group = tuple[int, str, int]  # round, dataset, batch: records of one group are compared


@dataclass(frozen=True)
class Times:
    """Where the time of decoding steps went, in seconds.

    A step of a batch counts once.

    Attributes:
        draft: drafting.
        policy: deciding how long to draft.
        verify: the target's forward with its verdicts.
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
        """Return the time of whole steps."""
        return self.draft + self.policy + self.verify + self.rest

    @property
    def overhead_share(self) -> float:
        """Return the share of step time outside the models' forwards."""
        return 1 - self.forward / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        prompts: ids of the batch's prompts.
        stats: counts of all rows.
        times: step times of all rows; None if the method keeps no steps.
        equal: for each row whether it is the reference's greedy output; None when sampling.
        decoding_tokens_per_s: tokens/s without the time of reading prompts; None if the method does
            not tell it.
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
        """Return the group to which the record belongs."""
        return self.round, self.dataset, self.batch

    def line(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def parse(line: str) -> Record:
    """Return the record of a line."""
    entry = json.loads(line)
    stats: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in entry["stats"].items()
    }
    step_times = Times(**entry["times"]) if entry["times"] is not None else None
    return Record(**entry | {"stats": Stats(**stats), "times": step_times})


def open_folder(out: Path, plan: Plan, facts: dict[str, Any], resume: bool) -> list[Record]:
    """Make the folder of a run and return no records; with `resume` return those that it has.

    The file run.json identifies the run: it has the plan, the `facts` of prompts and versions, and
    when the models were written. Batches are compared as wholes, so records of a batch without all
    methods leave the file, and so does a torn line.

    Raises:
        ValueError: the folder cannot be made, holds a run without `resume`, is damaged, or holds a
            run of anything else.
    """
    path = out / "records.jsonl"
    identity_path = out / "run.json"
    identity = _identity(plan, facts)
    if not path.exists():
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {out}: {error.strerror}") from None
        write_text(identity_path, json.dumps(identity, indent=1) + "\n")
        return []
    if not resume:
        raise ValueError(
            f"{out} holds a run already: give --resume to go on with it, or another --out"
        )
    text = read_text(identity_path)
    lines = read_text(path).split("\n")[:-1]
    # The records of a batch follow each other.
    lines = lines[: len(lines) // len(plan.methods) * len(plan.methods)]
    try:
        before = dict(json.loads(text))
        records = [parse(line) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{out} is damaged ({error}): give another --out") from None
    for name in sorted(identity.keys() | before.keys()):
        old = json.dumps(before.get(name))
        new = json.dumps(identity.get(name))
        if old != new:
            raise ValueError(
                f"{out} holds another run: {name} was {old}, not {new}; give another --out"
            )
    write_text(path, "".join(f"{line}\n" for line in lines))
    return records


def _identity(plan: Plan, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a run, as JSON reads it back."""
    models = {"target": plan.target, "draft": plan.draft, "pre_verifier": plan.pre_verifier}
    models |= {model_name(folder): folder for folder in plan.head}
    written = {name: _written(source) for name, source in models.items() if source is not None}
    identity: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for part, value in (plan.arguments() | facts | {"written": written}).items():
        if type(value) is dict:
            identity |= {f"{part}.{name}": inner for name, inner in value.items()}
        else:
            plain[part] = value
    return json.loads(json.dumps(identity | plain))


def _written(source: str | Path) -> str | None:
    """Return when a model's newest file was written; None if it is no file or folder here."""
    path = Path(source).expanduser()
    times = [file.stat().st_mtime for file in (path, *path.glob("*")) if file.is_file()]
    return datetime.fromtimestamp(max(times), UTC).isoformat() if times else None


def total(parts: Sequence[Stats]) -> Stats:
    """Return the statistics of several calls together."""
    return Stats(
        tokens=sum(part.tokens for part in parts),
        target_forwards=sum(part.target_forwards for part in parts),
        draft_forwards=sum(part.draft_forwards for part in parts),
        drafted=sum(part.drafted for part in parts),
        tested=sum(part.tested for part in parts),
        accepted=sum(part.accepted for part in parts),
        seconds=sum(part.seconds for part in parts),
        reached=_sums([part.reached for part in parts]),
        kept=_sums([part.kept for part in parts]),
    )


def _sums(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sums of counts by place; shorter counts are 0 at later places."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def times(rows: Sequence[Sequence[Step]]) -> Times:
    """Return the time of a batch from the steps of its rows.

    Steps with the same number are one step of the engine.
    """
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
