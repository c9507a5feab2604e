"""The paired round-robin: every method on every batch of prompts, in turns, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forerun.bench.datasets import Prompt
from forerun.bench.records import Group, Margins, Record, Records, first_difference
from forerun.bench.runners import Outcome, Run
from forerun.engine.stats import times, work
from forerun.model.causal_lm import CausalLM

WARM_UP = 16  # tokens


def measure(
    runs: dict[str, Run],
    datasets: dict[str, list[Prompt]],
    records: Records,
    *,
    rounds: int,
    batch: int,
    seed: int,
    reference: str | None,
    max_new_tokens: int,
    warm_up: int = WARM_UP,
    say: Callable[[str], None],
) -> None:
    """Measures what `records` does not have yet.

    The order of the methods turns by one from batch to batch and is reversed in every other round, so that none of
    them always comes first or always behind the same other. `reference` names the method that greedy outputs are
    compared with.
    """
    first = next(iter(datasets.values()))[:batch]
    for run in runs.values():
        run([_ids(row) for row in first], [seed + i for i in range(len(first))], min(warm_up, max_new_tokens))
    names, done = list(runs), records.groups
    for number in range(rounds):
        for dataset, prompts in datasets.items():
            for index, start in enumerate(range(0, len(prompts), batch)):
                if (number, dataset, index) in done:
                    continue
                rows = prompts[start : start + batch]
                seeds = [seed + 1000 * number + start + i for i in range(len(rows))]
                order = turned(names, number, index)
                outcomes = {name: runs[name]([_ids(row) for row in rows], seeds, None) for name in order}
                records.add(group_records((number, dataset, index), rows, outcomes, reference))
                say(f"round {number + 1} of {rounds}, {dataset}: {start + len(rows)} of {len(prompts)} prompts")


def turned(names: Sequence[str], number: int, index: int) -> list[str]:
    """The order of the methods in a round, for the batch of that index."""
    turn = (number // 2 + index) % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if number % 2 else order


def group_records(
    group: Group, prompts: Sequence[Prompt], outcomes: dict[str, Outcome], reference: str | None
) -> list[Record]:
    """The records of one batch in one round, in the order in which the methods ran."""
    records = []
    for name, outcome in outcomes.items():
        differences: list[dict[str, Any]] = []
        equal = None
        if reference is not None:
            pairs = zip(outcome.tokens, outcomes[reference].tokens, strict=True)
            found = [first_difference(ours, theirs) for ours, theirs in pairs]
            equal = [each is None for each in found]
            differences = [{"row": row} | each for row, each in enumerate(found) if each is not None]
        stats = outcome.stats
        spent = times(outcome.steps) if outcome.steps is not None else None
        records.append(
            Record(
                round=group[0],
                dataset=group[1],
                batch=group[2],
                prompts=[prompt.id for prompt in prompts],
                method=name,
                stats=stats,
                times=spent,
                work=work(outcome.steps, outcome.pads) if outcome.steps is not None else None,
                prefill_seconds=round(outcome.seconds - spent.seconds, 6) if spent else None,
                equal=equal,
                differences=differences,
            )
        )
    return records


@torch.inference_mode()
def margins(target: CausalLM, datasets: dict[str, list[Prompt]], records: Sequence[Record]) -> Margins:
    """The difference of the target's logits of the reference's token and of the output's, where the two outputs part:
    about 1e-5 is a tie that rounding decides, more is a fault. Where one of them has ended, the difference of the two
    highest logits."""
    model = target.fresh()
    prompts = {(dataset, prompt.id): prompt for dataset, rows in datasets.items() for prompt in rows}
    found: Margins = {}
    for record in records:
        for difference in record.differences:
            name = record.prompts[difference["row"]]
            token, wanted = difference["token"], difference["reference"]
            key = record.dataset, name, difference["at"], token
            if key not in found:
                ids = _ids(prompts[record.dataset, name]) + difference["before"]
                deque(model.prefill(ids[:-1], 512), maxlen=0)
                model.join(0, 1)
                logits = model.extend([0], [ids[-1:]])[0][-1].float()
                model.drop(0)
                pair = logits.topk(2).values if None in (token, wanted) else logits[[wanted, token]]
                found[key] = (pair[0] - pair[1]).item()
    return found


def _ids(prompt: Prompt) -> list[int]:
    assert prompt.tokens is not None
    return list(prompt.tokens)
