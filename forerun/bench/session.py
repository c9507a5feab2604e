"""A whole run: prompts, models, measurements, results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forerun.api.profiles import identity
from forerun.backends.facts import facts_of
from forerun.bench.datasets import Prompt
from forerun.bench.measure import WARM_UP, margins, measure
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan, Runner, check_folder
from forerun.bench.records import Records
from forerun.bench.report import results, versions
from forerun.bench.runners import Loaded, Run, decoder_run
from forerun.files import read_text, write_text
from forerun.methods import REMOVED_SETTINGS


def bench(
    plan: Plan,
    files: dict[str, list[Prompt]],
    out: Path | None = None,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures what the plan says and returns the results; with `out` they are also there as files.

    `files` are the prompts of `read_files`.

    Raises:
        ValueError: prompts, models or a folder that cannot be used. Prompts and folder are checked before the models'
            weights are loaded.
    """
    datasets, tokenizer = load_prompts(plan, files)
    facts = claimed(plan, datasets, out, resume)
    records = Records(out / "records.jsonl" if out is not None else None)
    if resume:
        records.resume(list(plan.methods))
    decoders, target, costs = load_decoders(plan, tokenizer, out)
    loaded = Loaded(plan, datasets, tokenizer, target)
    runs = {
        name: each.make(loaded) if isinstance(each, Runner) else decoder_run(decoders[name], plan.params())
        for name, each in plan.methods.items()
    }
    _teach_oracles(plan, runs, datasets, say)
    measure(
        runs,
        datasets,
        records,
        rounds=plan.rounds,
        batch=plan.batch,
        seed=plan.seed,
        reference=plan.reference if not plan.temperature else None,
        max_new_tokens=plan.max_new_tokens,
        warm_up=WARM_UP,
        say=say,
    )
    found = results(plan, facts, records.all, margins(target, datasets, records.all), costs)
    found["models"] = {"target": facts_of(target)}
    draft = next((each.draft for each in decoders.values() if each.draft is not None), None)
    if draft is not None:
        found["models"]["draft"] = facts_of(draft)
    if out is not None:
        write_text(out / "results.json", json.dumps(found, indent=1) + "\n")
    return found


def claimed(
    plan: Plan, datasets: dict[str, list[Prompt]], out: Path | None, resume: bool = False
) -> dict[str, dict[str, Any]]:
    """Makes the folder this run's own, or checks that it is; returns what the prompts are."""
    facts = {name: _facts(prompts) for name, prompts in datasets.items()}
    if out is not None:
        _claim(out, plan.arguments() | {"prompts": facts} | _surroundings(plan), resume)
    return facts


def _claim(out: Path, arguments: dict[str, Any], resume: bool) -> None:
    """Makes the folder this run's own, or sees that it is."""
    check_folder(out, resume)
    arguments = json.loads(json.dumps(arguments))
    path = out / "run.json"
    if not resume:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {out}: {error.strerror}") from None
        write_text(path, json.dumps(arguments, indent=1) + "\n")
        return
    try:
        before = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{path} is damaged; give another --out")
    was = {name: value for name, value in _leaves(before) if (name.rpartition(".")[2], value) not in REMOVED_SETTINGS}
    now = dict(_leaves(arguments))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            raise ValueError(
                f"{out} holds a run with other arguments: {name} was {json.dumps(was.get(name))}, "
                f"not {json.dumps(now.get(name))}"
            )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no dict with entries, by its keys with dots between them."""
    if not (isinstance(value, dict) and value):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}" if name else key)


def _surroundings(plan: Plan) -> dict[str, Any]:
    """What a run has to go on with beside its arguments. Not the commit: a run may be mended and gone on with."""
    models = {"target": identity(plan.target, "target")}
    if plan.needs_draft and plan.draft is not None:
        models["draft"] = identity(plan.draft, "draft")
    return {"models": models, "versions": {key: value for key, value in versions().items() if key != "commit"}}


def _teach_oracles(
    plan: Plan, runs: dict[str, Run], datasets: dict[str, list[Prompt]], say: Callable[[str], None]
) -> None:
    """Runs oracles, which alone refuse sampling, once on everything: no measurement holds the time in which they learn
    the truth."""
    for name, method in plan.ours.items():
        if not method.greedy_only:
            continue
        for dataset, prompts in datasets.items():
            say(f"{name} learns the target's output for {dataset}")
            for start in range(0, len(prompts), plan.batch):
                rows = [list(prompt.tokens or ()) for prompt in prompts[start : start + plan.batch]]
                runs[name](rows, [plan.seed + row for row in range(len(rows))], None)


def _facts(prompts: list[Prompt]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([(prompt.id, prompt.tokens) for prompt in prompts]).encode()).hexdigest()
    return {"prompts": len(prompts), "cut": sum(prompt.cut for prompt in prompts), "sha256": digest[:16]}
