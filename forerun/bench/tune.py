"""Choose the fastest method and settings for a pair of models on this machine, on validation prompts.

Every setting decodes a few prompts beside plain decoding, and the better third of each turn goes on to more prompts.
Successive halving is Karnin et al.'s (ICML 2013), with cuts to a third; the rest is ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from forerun.api.loading import load_config
from forerun.api.profiles import Choice, pair_of, save
from forerun.api.resolve import kind_of
from forerun.backends.costs import measure_costs
from forerun.bench.datasets import Prompt, dataset_name
from forerun.bench.measure import Outcome, Run, decoder_run
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan
from forerun.bench.report import provenance, versions
from forerun.heads.heads import KINDS
from forerun.methods import AR, METHODS, Method, Pacer
from forerun.model.causal_lm import context_of
from forerun.zoo import companion, own_draft

# What is tried: every combination of a method's values, for methods that fit the models and whose trained layer, if
# they have one, is there.
GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "sd": {"gamma": tuple(range(1, 13))},
    "pacer": {"block": (1, 2, 4), "threshold": (None, 0.3, 0.5, 0.7)},
    "cumulative": {"threshold": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
    "confidence": {"threshold": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
    "suffix": {"factor": (1.0, 2.0), "most": (8, 24)},
    "hybrid": {"threshold": (3.0, 6.0), "other": ("cumulative:threshold=0.2", "cumulative:threshold=0.5")},
    "ouroboros": {"gamma": (3, 6, 10, 16), "window": (0, 4), "suffixes": (0, 1)},
    "pacer-ouroboros": {"guesses": (1, 3), "ngram": (5, 9)},
    "lyanna": {"depth": (1, 2, 4, 8)},
    "eagle": {"depth": (1, 2, 4, 8)},
    "pacer-lyanna": {"block": (1, 2, 4), "width": (1, 2)},
    "pacer-eagle": {"block": (1, 2), "width": (1, 2)},
}
FINALISTS = 3  # settings of the last turn, at least
TURNS = (2, 4, 18)  # prompts that all settings decode, that the better third decodes too, and a third of that
TOKENS = (16, 128)  # fewest and most new tokens a prompt


def candidates(draft: bool, layers: Collection[str | None] = ()) -> dict[str, Method]:
    """Return the settings to try, by the names that tables show.

    Args:
        draft: whether there is a draft model.
        layers: kinds of trained layers and heads that there are.
    """
    found: dict[str, Method] = {}
    for name, grid in GRID.items():
        made = [METHODS[name](**dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
        if (draft or not made[0].needs_draft) and {made[0].layer, made[0].head} <= {None, *layers}:
            found |= {label(each): each for each in made}
    return found


def label(method: Method) -> str:
    """Return a method's name with the settings that its grid varies."""
    return " ".join([method.name, *(f"{key}={getattr(method, key)}" for key in GRID.get(method.name, ()))])


def new_tokens(budget: float, settings: int, plain_ms: float, most: int) -> int:
    """Return how many tokens of each prompt fit a budget in seconds."""
    prompts = sum(count * max(FINALISTS, settings / 3**turn) for turn, count in enumerate(TURNS))
    return min(max(int(1000 * budget / (prompts * plain_ms)), TOKENS[0]), TOKENS[1], most)


def rate(outcome: Outcome) -> float:
    """Return tokens a second of decoding, without reading the prompt."""
    steps = [step for row in outcome.steps or [] for step in row]
    return sum(len(step.tokens) for step in steps) / max(sum(step.seconds for step in steps), 1e-9)


def search(
    runs: Mapping[str, Run],
    turns: Sequence[Sequence[Sequence[int]]],
    tokens: int,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return median speedups over `ar`, which is among the runs: of the last turn's settings, best first, and of the
    rest.

    All settings decode the first turn's prompts, and the better third of each turn those of the next, until it is late.
    If that happens during the first turn, the settings tried so far are a random choice of all.
    """
    going, seed = [name for name in runs if name != AR.name], 0
    ratios: dict[str, list[float]] = {name: [] for name in going}
    order = Random(0)
    for number, prompts in enumerate(turns):
        if number:
            going = _ranked(going, ratios)[: max(FINALISTS, ceil(len(going) / 3))]
        for prompt in prompts:
            if seed and is_late():
                break
            order.shuffle(going)
            plain = rate(runs[AR.name]([prompt], [seed], tokens))
            for place, name in enumerate(going):
                if not seed and place >= 2 * FINALISTS and is_late():
                    going = going[:place]
                    break
                ratios[name].append(rate(runs[name]([prompt], [seed], tokens)) / plain)
            seed += 1
    going = _ranked(going, ratios)
    speedups = {name: median(each) for name, each in ratios.items() if each}
    return {name: speedups[name] for name in going}, {n: s for n, s in speedups.items() if n not in going}


def _ranked(names: Sequence[str], ratios: Mapping[str, Sequence[float]]) -> list[str]:
    return sorted(names, key=lambda name: -median(ratios[name]))


def tune(
    plan: Plan,
    files: dict[str, list[Prompt]],
    *,
    budget: float = 150.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Find the fastest method, store it in the pair's profile, and return the result for JSON.

    Args:
        plan: models, prompts, temperature, and `max_new_tokens` as the most for a prompt. Its methods only show whether
            there is a draft. A layer and a head that come with forerun are tried if none is given.
        files: prompts of `read_files`.
        budget: seconds; exceeded if the least work takes longer.
        say: called with lines of progress.

    Raises ValueError for prompts and models that cannot be used, the former before weights are loaded.
    """
    begun = perf_counter()
    context = context_of(load_config(plan.target, "target", trust_remote_code=plan.trust_remote_code))
    if context is not None:
        plan = replace(plan, max_new_tokens=max(1, min(plan.max_new_tokens, context // 2)))
    given = [kind_of(folder) for folder in plan.head]
    kinds = {*given, *(kind for kind in KINDS if companion(plan.target, kind))}
    folder = companion(plan.target, Pacer.layer) if plan.draft == own_draft(plan.target) else None
    layers = {Pacer.layer} if plan.draft is not None and (plan.pre_verifier or folder) else set()
    methods: dict[str, Method] = {AR.name: AR()} | candidates(plan.draft is not None, kinds | layers)
    plan = replace(plan, methods=methods)
    datasets, tokenizer = load_prompts(plan, files)
    ((dataset, prompts),) = datasets.items()
    decoders, target, costs = load_decoders(plan, tokenizer)
    if costs is None:
        costs = measure_costs(target, next((each.draft for each in decoders.values() if each.draft is not None), None))
    forwards = f"a forward of the target takes {costs.verify(1):.2f} ms"
    say(forwards + (f", of the draft {costs.draft[1]:.2f} ms, c = {costs.c:.3f}" if costs.draft else ""))

    rows = [list(prompt.tokens or ()) for prompt in prompts]
    tokens = new_tokens(budget - (perf_counter() - begun), len(methods), costs.verify(1), plan.max_new_tokens)
    plan = replace(plan, batch=1, max_new_tokens=tokens)
    ends = [min(sum(TURNS[: turn + 1]), len(rows)) for turn in range(len(TURNS))]
    turns = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]
    say(f"{len(methods) - 1} settings on {len(turns[0])} prompts, the better third on more; {tokens} tokens each")
    runs = {name: decoder_run(decoders[name], plan.params(), close=True) for name in methods}
    runs[AR.name]([rows[0]], [0], TOKENS[0])  # the first call is slow
    ranked, dropped = search(runs, turns, tokens, lambda: perf_counter() - begun > budget)
    measured = {AR.name: 1.0} | ranked
    best = max(measured, key=lambda name: (measured[name], name == AR.name))
    chosen = methods[best]
    tuned: dict[str, dict[str, Any]] = {}
    for name in [*ranked, *sorted(dropped, key=lambda name: -dropped[name])]:  # best first
        tuned.setdefault(methods[name].name, asdict(methods[name]))
    # A head does not stand beside a method that drafts with another.
    head = plan.head[0] if plan.head and chosen.head in (None, given[0]) else None
    choice = Choice(
        method=chosen.name,
        settings=asdict(chosen),
        measured_speedup=round(measured[best], 4),
        temperature=plan.temperature,
        top_p=plan.top_p,
        tuned=tuned,
        prompts={
            "dataset": dataset_name(dataset),
            "count": len(rows),
            "new_tokens": tokens,
            "sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        },
        pre_verifier=str(plan.pre_verifier.resolve()) if plan.pre_verifier else None,
        head=str(Path(head).resolve()) if head is not None else None,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )
    pair = pair_of(plan.target, plan.draft, plan)
    path = save(pair, "sampling" if plan.temperature else "greedy", choice, decoders[best].costs or costs, versions())
    return {
        **provenance(plan.arguments() | {"methods": [*GRID], "budget": budget}),
        "profile": str(path),
        **asdict(choice),
        "measured": {name: round(speedup, 4) for name, speedup in (measured | dropped).items()},
        "seconds": round(perf_counter() - begun, 1),
    }
