"""The fastest method and settings for a pair of models on this machine, found on validation prompts.

Many settings are compared by what their steps would cost by the cost table. That does not waver as a clock does, and
prompts can be decoded in batches. Only the few best are measured one by one, beside plain decoding. Successive halving
is Karnin et al.'s (ICML 2013), with one cut to a third; the rest is ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

from forerun.api import Decoder, bundled_layer
from forerun.bench.datasets import Prompt, dataset_name
from forerun.bench.measure import measure
from forerun.bench.models import heads_of, load_pair, load_prompts
from forerun.bench.plan import Plan
from forerun.bench.prices import Prices, kind
from forerun.bench.records import Records
from forerun.bench.report import provenance, summary, versions
from forerun.bench.runners import Run, decoder_run
from forerun.bench.search import FINALISTS, calibrate, finalists, screen, singly
from forerun.costs import Costs
from forerun.loading import check_draft_tokenizer, load_config, load_pre_verifier
from forerun.methods import AR, METHODS, Lyanna, Method, Pacer, PacerEagle
from forerun.model import context_of
from forerun.nn.pre_verifier import PreVerifier
from forerun.profiles import Choice, pair_of, save
from forerun.runtime.costs import head_costs, measure_costs
from forerun.zoo import own_draft

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
CALIBRATION = 0.1  # share of the budget for the times that the cost table lacks
SCREENING = 0.6  # share of the budget until the finalists are known


@dataclass(frozen=True)
class Effort:
    """How much is decoded.

    Attributes:
        tokens: new tokens a prompt.
        prompts: a quarter of them judges all candidates, two more quarters the better third, all of them the finalists.
        thin: of each method's settings only every so many-th.
    """

    tokens: int
    prompts: int
    thin: int = 1

    @property
    def rows(self) -> int:
        """Prompts that are decoded together."""
        return max(1, self.prompts // 4)


EFFORTS = (
    *(Effort(tokens, 24) for tokens in (128, 96, 64, 48)),
    *(Effort(48, 16), Effort(48, 12, 2), Effort(32, 12, 2), Effort(32, 8, 3), Effort(24, 4, 3), Effort(16, 4, 6)),
)


def candidates(draft: bool, thin: int = 1, layers: Collection[str | None] = ()) -> dict[str, Method]:
    """The settings to try, by the names that tables show: with a draft or without, with these trained layers and
    heads."""
    found: dict[str, Method] = {}
    for name, grid in GRID.items():
        if name not in METHODS:
            continue
        made = [METHODS[name](**dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
        if (made[0].needs_draft and not draft) or not {made[0].layer, made[0].head} <= {None, *layers}:
            continue
        found |= {label(each): each for each in made[(thin - 1) // 2 :: thin] or made[:1]}
    return found


def label(method: Method) -> str:
    """A method with those settings that its grid varies."""
    return " ".join([method.name, *(f"{key}={getattr(method, key)}" for key in GRID.get(method.name, ()))])


def seconds(effort: Effort, settings: int, costs: Costs) -> tuple[float, float]:
    """A guess at the time until the finalists are known, and of measuring them on the fewest prompts."""
    plain = effort.tokens * costs.verify(1) / 1000
    draft = 4 * costs.drafting(effort.rows) if costs.draft else 0.0
    batch = effort.tokens / 2 * (costs.verify(5 * effort.rows) + draft) / 1000
    return (settings + 2 * ceil(settings / 3)) * batch, 4 * plain * (1 + 0.7 * FINALISTS)


def choose_effort(
    budget: float, draft: bool, prices: Prices, layers: Collection[str | None] = ()
) -> tuple[Effort, float]:
    """The most that fits the budget in seconds, or the least there is, with the seconds that it is guessed to take."""
    for effort in EFFORTS:
        first, last = seconds(effort, len(candidates(draft, effort.thin, layers)), prices.costs)
        first, last = first * prices.load, last * prices.load
        if first <= SCREENING * budget and first + last <= budget:
            break
    return effort, first + last


def tune(
    plan: Plan,
    files: dict[str, list[Prompt]],
    *,
    top_p: float = 1.0,
    budget: float = 150.0,
    pre_verifier: Path | None = None,
    head: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Finds the fastest method, stores it in the pair's profile and returns what was found, for JSON.

    Of the plan: models, prompts, temperature, and `max_new_tokens` as the most that a prompt is given; its methods
    only show whether there is a draft. `files` are the prompts of `read_files`. `budget` is in seconds and may be
    exceeded where the least that can be done takes longer. `pre_verifier` and `head` are the folders of a layer trained
    for the pair and of a head trained for the target; the embedded pair has its own.

    Raises ValueError for prompts and models that cannot be used, the former before weights are loaded.
    """
    begun = perf_counter()
    context = context_of(load_config(plan.target, "target", trust_remote_code=plan.trust_remote_code))
    if context is not None:
        plan = replace(plan, max_new_tokens=max(1, min(plan.max_new_tokens, context // 2)))
    datasets, tokenizer = load_prompts(plan, files)
    (dataset, prompts), *_ = datasets.items()
    if tokenizer is not None and plan.draft is not None:  # methods that need the target's are tried as well
        check_draft_tokenizer(tokenizer, plan.draft, trust_remote_code=plan.trust_remote_code)
    target, draft = load_pair(plan)
    folder = bundled_layer(plan.target, Pacer()) if plan.draft == own_draft(plan.target) else None
    layers: dict[str | None, PreVerifier] = {}
    if (folder := pre_verifier or folder) is not None and draft is not None:
        layers[Pacer.layer] = load_pre_verifier(folder, target, draft, Pacer.kind)
    heads = heads_of(plan.target, target, head, (Lyanna.head, PacerEagle.head))
    costs = measure_costs(target, draft, layer=layers.get(Pacer.layer))
    tables = {each: replace(costs, head=head_costs(own)) for each, own in heads.items()}
    costs = next(iter(tables.values()), costs)  # where heads of two kinds differ, calibration says how much
    trained = [*layers, *heads]
    forwards = f"a forward of the target takes {costs.verify(1):.2f} ms"
    say(forwards + (f", of the draft {costs.draft[1]:.2f} ms, c = {costs.c:.3f}" if costs.draft else ""))

    def runner(method: Method, close: bool = True) -> Run:
        layer, drafting = layers.get(method.layer), draft if method.needs_draft else None
        own: Any = {"pre_verifier": layer, "head": heads.get(method.head)}
        decoder = Decoder(target, None, drafting, method, guard=False, prefix_bytes=0, **own)
        decoder.costs = tables.get(method.head, costs)
        return decoder_run(decoder, params, close)

    params = replace(plan.params(), top_p=top_p)
    rows = [list(prompt.tokens or ()) for prompt in prompts]
    methods = candidates(draft is not None, layers=trained)
    kinds = {
        kind(each): [other for other in methods.values() if kind(other) == kind(each)] for each in methods.values()
    }
    tokens = max(8, min(64, plan.max_new_tokens, int(1000 * CALIBRATION * budget / (2 * len(kinds) * costs.verify(1)))))
    middle = {AR.name: runner(AR())} | {each: runner(of_kind[len(of_kind) // 2]) for each, of_kind in kinds.items()}
    prices = calibrate(costs, middle, rows[:2], tokens)
    effort, guess = choose_effort(budget - (perf_counter() - begun), draft is not None, prices, trained)
    if guess > budget:
        say(f"about {guess:.0f} s, more than the budget of {budget:.0f} s: this is the least that tells methods apart")
    params = replace(params, max_new_tokens=min(effort.tokens, plan.max_new_tokens))
    prompts, rows = prompts[: effort.prompts], rows[: effort.prompts]
    methods = candidates(draft is not None, effort.thin, trained)
    runs = {name: runner(each) for name, each in ({AR.name: AR()} | methods).items()}
    turns = [rows[at : at + effort.rows] for at in range(0, min(3 * effort.rows, len(rows)), effort.rows)]
    say(f"{len(methods)} settings on {len(turns[0])} prompts, the better third on {sum(map(len, turns[1:]))} more")
    alone = {name: singly(runs[name]) for name, each in methods.items() if each.needs_costs or each.phrases}
    ranked, dropped = screen(
        methods, runs | alone, turns, prices, is_late=lambda: perf_counter() - begun > SCREENING * budget
    )
    final = finalists(methods, list(ranked))

    each_ms = prices.load * params.max_new_tokens * prices.plain_ms * (1 + sum(1 / ranked[name] for name in final))
    fits = int(1000 * (budget - (perf_counter() - begun)) / max(each_ms, 1e-3))
    prompts, rounds = prompts[: max(4, fits)], 2 if fits >= 2 * len(prompts) else 1
    say(f"measuring {', '.join(final)} beside ar on {len(prompts)} prompts")
    records = Records(None)
    measure(
        {name: runner((methods | {AR.name: AR()})[name], close=False) for name in (AR.name, *final)},
        {dataset: prompts},
        records,
        rounds=rounds,
        batch=1,
        seed=plan.seed,
        reference=AR.name if not plan.temperature else None,
        max_new_tokens=params.max_new_tokens,
        say=lambda line: None,
    )
    measured = {name: found["speedup"] for name, found in summary(records.all, {}).items()}
    best = max(measured, key=lambda name: (measured[name], name == AR.name))
    predicted = {name: round(speedup, 4) for name, speedup in (ranked | dropped).items()} | {AR.name: 1.0}
    chosen = (methods | {AR.name: AR()})[best]
    tuned: dict[str, dict[str, Any]] = {}
    for name in sorted(ranked | dropped, key=lambda name: (-measured.get(name, 0.0), name not in ranked)):
        # Measured ones first, then by prediction: sorting keeps the order of equals.
        tuned.setdefault(methods[name].name, asdict(methods[name]))
    choice = Choice(
        method=chosen.name,
        settings=asdict(chosen),
        predicted_speedup=predicted[best],
        measured_speedup=measured[best],
        temperature=plan.temperature,
        top_p=top_p,
        tuned=tuned,
        prompts={
            "dataset": dataset_name(dataset),
            "count": len(rows),
            "new_tokens": params.max_new_tokens,
            "sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        },
        pre_verifier=str(pre_verifier.resolve()) if pre_verifier is not None else None,
        # Not beside a method that drafts with another.
        head=str(head.resolve()) if head is not None and chosen.head in (None, next(iter(heads))) else None,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )
    pair = pair_of(
        plan.target,
        plan.draft if draft is not None else None,
        plan.device,
        plan.dtype,
        plan.weights,
        plan.draft_weights,
    )
    costs = tables.get(chosen.head, costs)
    path = save(pair, "sampling" if plan.temperature else "greedy", choice, costs, versions())
    folders = {"pre_verifier": pre_verifier and pre_verifier.name, "head": head and head.name}
    return {
        **provenance(plan.arguments() | {"methods": [*GRID], "top_p": top_p, "budget": budget} | folders),
        "profile": str(path),
        **asdict(choice),
        "predicted": predicted,
        "measured": measured,
        "prices": asdict(prices),
        "seconds": round(perf_counter() - begun, 1),
    }
