"""The folder of a run: run.json has what it goes by, records.jsonl grows a batch at a time. A stopped run goes on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forerun.bench.plan import Plan
from forerun.bench.records import Record, parse
from forerun.bench.report import versions
from forerun.files import read_text, write_text


def open_folder(out: Path, plan: Plan, prompts: dict[str, Any], resume: bool) -> list[Record]:
    """Make the folder of a run and return no records; with `resume`, those of the run there, if it has any.

    Batches are compared as wholes: records of one without all methods, and a torn line, leave the file. Raises
    ValueError if the folder cannot be made, holds a run without `resume`, is damaged, or holds a run of anything else.
    """
    path, claim, now = out / "records.jsonl", out / "run.json", _goes_by(plan, prompts)
    if not path.exists():
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {out}: {error.strerror}") from None
        write_text(claim, json.dumps(now, indent=1) + "\n")
        return []
    if not resume:
        raise ValueError(f"{out} holds a run already: give --resume to go on with it, or another --out")
    text, lines = read_text(claim), read_text(path).split("\n")[:-1]
    lines = lines[: len(lines) // len(plan.methods) * len(plan.methods)]  # those of a batch follow each other
    try:
        before, records = dict(json.loads(text)), [parse(line) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{out} is damaged ({error}): give another --out") from None
    for name in sorted(now.keys() | before.keys()):
        was, given = (json.dumps(each.get(name)) for each in (before, now))
        if was != given:
            raise ValueError(f"{out} holds another run: {name} was {was}, not {given}; give another --out")
    write_text(path, "".join(f"{line}\n" for line in lines))
    return records


def _goes_by(plan: Plan, prompts: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same when a run goes on, as JSON has it: all but the commit, as that may mend what
    stopped it."""
    models = {"target": plan.target, "draft": plan.draft, "pre_verifier": plan.pre_verifier}
    written = {name: _written(source) for name, source in (models | {each: each for each in plan.head}).items()}
    parts = plan.arguments() | {"prompts": prompts, "versions": versions() | {"commit": None}, "written": written}
    flat = {f"{part}.{name}": one for part, each in parts.items() if type(each) is dict for name, one in each.items()}
    return json.loads(json.dumps(flat | {name: one for name, one in parts.items() if type(one) is not dict}))


def _written(source: str | Path | None) -> str | None:
    """Return when the newest file of a model's folder was written; None for what is no file or folder here."""
    path = Path(source or "nothing").expanduser()
    times = [each.stat().st_mtime for each in ([path] if path.is_file() else path.glob("*"))]
    return datetime.fromtimestamp(max(times), UTC).isoformat() if times else None
