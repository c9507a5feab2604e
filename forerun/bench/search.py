"""The search of `forerun tune`: prices from a few steps, and settings that are dropped as more prompts are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from random import Random

from forerun.bench.prices import Prices, drafting, forwards_of, kind
from forerun.bench.runners import Outcome, Run
from forerun.costs import Costs
from forerun.methods import AR, Method
from forerun.runtime.costs import QUIET

FINALISTS = 3


def calibrate(costs: Costs, runs: Mapping[str, Run], prompts: Sequence[Sequence[int]], tokens: int) -> Prices:
    """Prices from decoding prompts one by one, in turns, with one method of each kind; `ar` is among them."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    for run in runs.values():
        run([prompts[0]], [0], min(tokens, 8))  # the first call is slow
    for seed, prompt in enumerate(prompts):
        for name, run in runs.items():
            outcomes[name].append(run([prompt], [seed], tokens))
    steps = {name: [step for each in own for row in each.steps or [] for step in row] for name, own in outcomes.items()}
    step_ms = undisturbed([1000 * step.seconds for step in steps[AR.name]]) - costs.verify(1)
    token_ms = {}
    for name, own in steps.items():
        draft_ms = drafting(costs, name)
        each = [
            (1000 * step.seconds - costs.verify(step.drafted + 1) - step_ms) / forwards_of(name, step) - draft_ms
            for step in own
            if forwards_of(name, step)
        ]
        if each:
            token_ms[name] = max(undisturbed(each), -draft_ms)
    start_ms = {name: 1000 * undisturbed([_start(each) for each in own]) for name, own in outcomes.items()}
    prices = Prices(costs, step_ms, token_ms=token_ms, start_ms=start_ms)
    took = sum(1000 * step.seconds for own in steps.values() for step in own)
    modelled = sum(prices.step(name, step) for name, own in steps.items() for step in own)
    return replace(prices, load=max(1.0, took / max(modelled, 1e-9)))


def undisturbed(values: Sequence[float]) -> float:
    """As `measure_costs` has it."""
    return sorted(values)[int(QUIET * len(values))]


def singly(run: Run) -> Run:
    """The rows one after the other, for rules that look at costs, as these would stop earlier in a batch, and for
    phrases, as a batch does not show how many forwards a row needed."""

    def decoded(prompts: Sequence[Sequence[int]], seeds: Sequence[int], tokens: int | None = None) -> Outcome:
        each = [run([prompt], [seed], tokens) for prompt, seed in zip(prompts, seeds, strict=True)]
        return Outcome(
            tokens=[row for one in each for row in one.tokens],
            seconds=sum(one.seconds for one in each),
            target_forwards=sum(one.target_forwards for one in each),
            draft_forwards=sum(one.draft_forwards for one in each),
            steps=[row for one in each for row in one.steps or []],
        )

    return decoded


def _start(outcome: Outcome) -> float:
    """Seconds before the first step."""
    return outcome.seconds - sum(step.seconds for row in outcome.steps or [] for step in row)


def screen(
    methods: Mapping[str, Method],
    runs: Mapping[str, Run],
    turns: Sequence[Sequence[Sequence[int]]],
    prices: Prices,
    tokens: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, float], dict[str, float]]:
    """Predicted speedups: of the better third, best first, and of the others.

    All methods decode the first turn's prompts, the better third decodes those of the others too, until it is late.
    Where that is so during the first turn, the methods that are left out are a bit of everything.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in methods}
    going, speedups, seed = list(methods), {}, 0
    Random(0).shuffle(going)
    for number, rows in enumerate(turns):
        if number and is_late():
            break
        for place, name in enumerate(going):
            if not number and place >= 2 * FINALISTS and is_late():
                going = going[:place]
                break
            outcomes[name].append(runs[name](rows, range(seed, seed + len(rows)), tokens))
            speedups[name] = prices.speedup(kind(methods[name]), outcomes[name])
        seed += len(rows)
        going.sort(key=lambda name: -speedups[name])
        if not number:
            going = going[: max(FINALISTS, ceil(len(going) / 3))]
    return {name: speedups[name] for name in going}, {n: s for n, s in speedups.items() if n not in going}


def finalists(methods: Mapping[str, Method], ranked: Sequence[str]) -> list[str]:
    """The names to measure: the best of each method first, as the model may wrong a whole method but hardly one
    setting beside the next; then the others."""
    firsts = {methods[name].name: name for name in reversed(ranked)}.values()
    return sorted(ranked, key=lambda name: (name not in firsts, ranked.index(name)))[:FINALISTS]
