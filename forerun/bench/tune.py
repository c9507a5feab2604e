"""The fastest method and settings for a pair of models on this machine, found on validation prompts.

Many settings are compared by what their steps would cost by the cost table. That does not waver as a clock does, and
prompts can be decoded in batches. Only the few best are measured one by one, beside plain decoding. Successive halving
is Karnin et al.'s (ICML 2013), with one cut to a third; the rest is ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from math import ceil
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from forerun.api.load import Decoder
from forerun.api.loading import check_draft_tokenizer, load_config, load_head, load_pre_verifier
from forerun.api.profiles import Choice, pair_of, save
from forerun.backends.costs import QUIET, head_costs, measure_costs
from forerun.backends.heads import HiddenLM
from forerun.bench.datasets import Prompt, dataset_name
from forerun.bench.measure import measure
from forerun.bench.models import load_pair, load_prompts
from forerun.bench.plan import Plan
from forerun.bench.records import Records
from forerun.bench.report import provenance, summary, versions
from forerun.bench.runners import Outcome, Run, decoder_run
from forerun.engine.costs import Costs
from forerun.engine.engine import Step
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import AR, METHODS, Lyanna, Method, Pacer, PacerEagle
from forerun.model.causal_lm import CausalLM, context_of
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
CALIBRATION = 0.1  # share of the budget for the times that the cost table lacks
SCREENING = 0.6  # share of the budget until the finalists are known
FINALISTS = 3


@dataclass(frozen=True)
class Prices:
    """Milliseconds of steps: from a table of forwards, and what a clock measured beside it.

    Attributes:
        costs: of forwards.
        step_ms: of a step beyond its forwards.
        token_ms: of a draft's forward beyond that of one token (choosing tokens, the length rule, guesses), by kind of
            method.
        start_ms: of a prompt, or of a batch of them, by kind of method.
        load: the time that decoding took over that which these prices say: more than 1 on a machine that is busy.
    """

    costs: Costs
    step_ms: float = 0.0
    token_ms: Mapping[str, float] = field(default_factory=dict)
    start_ms: Mapping[str, float] = field(default_factory=dict)
    load: float = 1.0

    @property
    def plain_ms(self) -> float:
        """A step without a draft."""
        return self.costs.verify(1) + self.step_ms

    def step(self, kind: str, step: Step) -> float:
        """A step, as if its sequence were decoded alone; at least half of its forwards in the table, as few
        measurements can give nonsense."""
        forwards = forwards_of(kind, step)
        table = self.costs.verify(step.drafted + 1) + forwards * drafting(self.costs, kind)
        return max(table + self.step_ms + forwards * self.token_ms.get(kind, 0.0), table / 2)

    def speedup(self, kind: str, outcomes: Sequence[Outcome]) -> float:
        """Of those outcomes over plain decoding of as many tokens."""
        rows = [row for outcome in outcomes for row in outcome.steps or []]
        ours = sum(self.step(kind, step) for row in rows for step in row) + len(rows) * self.start_ms.get(kind, 0.0)
        tokens = sum(len(step.tokens) for row in rows for step in row)
        return (tokens * self.plain_ms + len(rows) * self.start_ms.get(AR.name, 0.0)) / max(ours, 1e-9)


def forwards_of(kind: str, step: Step) -> int:
    """Draft forwards of a step for its own sequence. In a batch the draft goes on for other rows; a chain's own are as
    many as its tokens, but for those that a block runs behind an end token. A head makes states that it may not use.
    (Drafts by phrases and by costs are not decoded in batches where this is asked.)"""
    if METHODS[kind.partition(" ")[0]].head is not None:
        return step.draft_forwards
    return min(step.draft_forwards, step.drafted)


def drafting(costs: Costs, kind: str) -> float:
    """ms of what a method of this kind calls a draft's forward."""
    if METHODS[kind.partition(" ")[0]].head is not None:
        return costs.heading(1) if costs.head else 0.0
    return costs.drafting(1) if costs.draft else 0.0


def kind(method: Method) -> str:
    """Methods of one kind spend the same on a draft's forward."""
    settings = ("block", "width", *(("window",) if method.phrases is not None else ()))
    given = {key: getattr(method, key, None) for key in settings}
    return " ".join([method.name, *(f"{key}={value}" for key, value in given.items() if value is not None)])


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


def heads_of(
    source: str, target: CausalLM, folder: Path | None, kinds: Sequence[str | None]
) -> dict[str | None, HiddenLM]:
    """Heads for a target, by kind: that of a folder first, then those of these kinds that come with forerun.

    Raises ValueError for a folder's head that does not fit, or is of another kind.
    """
    found: dict[str | None, HiddenLM] = {}
    if folder is not None:
        head = load_head(folder, target)
        if head.config.kind not in kinds:
            wanted = " or ".join(map(str, kinds))
            raise ValueError(f"the head '{folder}' is of the kind {head.config.kind!r}; it must be {wanted}")
        found[head.config.kind] = HiddenLM(head, target)
    for kind in kinds:
        if kind not in found and (own := companion(source, kind)) is not None:
            found[kind] = HiddenLM(load_head(own, target, kind), target)
    return found


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
    folder = companion(plan.target, Pacer.layer) if plan.draft == own_draft(plan.target) else None
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
