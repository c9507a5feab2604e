"""Measure what forwards cost on this machine. A good draft length depends on this and on the text alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper

from forerun import __version__
from forerun.backends.facts import facts_of, processor
from forerun.backends.heads import HiddenLM
from forerun.backends.quantised_heads import Beams
from forerun.engine.acceptance import accept
from forerun.engine.costs import Costs, convex, costs_of
from forerun.engine.draft import Draft
from forerun.files import home, write_text
from forerun.heads.echo import SIZES
from forerun.heads.pre_verifier import MIN_PROBABILITY, PreVerifier
from forerun.heads.quick import quick
from forerun.model.causal_lm import CausalLM
from forerun.sampling.probabilities import last_probabilities, probabilities_of
from forerun.sampling.sampler import ChainSampling, Sampler, SamplingDistribution, next_tokens

TOP_P = 0.95
COUNTS = (1, 2, 4, 8, 16, 32)  # new tokens of a forward
RUNS, RUN = 3, 10  # the most runs of a size, and the most forwards of a run
QUIET = 0.2  # the quantile that counts: other programs disturb the slower forwards
SECONDS = 2.0  # for a model's forwards
SHARE = 0.15  # seconds for each of the other figures; more if LEAST_REPEATS take longer
LEAST_REPEATS = 2  # of any measurement but a forward, however slow it is
CONTEXT = 256
LONG = 8192  # tokens after which forwards are measured a second time, or half of the context
FAR_COUNTS = COUNTS[:-1]  # new tokens of these forwards
STATES = 4
CHAIN = 4  # tokens of a fused draft


def measure_costs(
    target: CausalLM,
    draft: CausalLM | None = None,
    context: int | None = None,
    layer: PreVerifier | None = None,
    head: HiddenLM | None = None,
) -> Costs:
    """Measure a pair, and its pre-verifier and head if given, after `context` tokens (None: `usual_context`), and the
    pair's forwards again after `long_context` tokens.

    This takes at most 11 seconds, or longer if a forward of 32 tokens takes a second. Raises ValueError for a context
    that leaves no place for new tokens.
    """
    if context is None:
        context = usual_context(target, draft)
    costs = _pair_costs(target, draft, context, COUNTS)
    long = long_context(target, draft)
    if long > context:
        with suppress(
            MemoryError, torch.OutOfMemoryError
        ):  # without it one table serves all lengths
            costs = replace(costs, far=_pair_costs(target, draft, long, FAR_COUNTS))
    if head is not None:
        costs = replace(costs, head=head_costs(head))
    if draft is None:
        return costs
    policy, glance = _layer_costs(layer, draft) if layer is not None else (0.0, 0.0)
    drawing, judging = _sampling_costs(target, draft, costs)
    single: dict[str, Any] = {
        "policy": policy,
        "glance": glance,
        "drawing": drawing,
        "judging": judging,
    }
    far = replace(costs.far, **single) if costs.far is not None else None
    return replace(costs, **single, far=far)


def _pair_costs(
    target: CausalLM, draft: CausalLM | None, context: int, counts: Sequence[int]
) -> Costs:
    """Return what forwards and fused drafts cost after `context` tokens."""
    costs = Costs(forward_costs(target, counts, context), {}, context=context)
    if draft is None:
        return costs
    numbers = torch.linspace(0.0, 0.99, CHAIN, dtype=torch.float64)
    sampling = ChainSampling(SamplingDistribution(top_p=TOP_P), numbers)
    return replace(
        costs,
        draft=forward_costs(draft, counts, context),
        chained=_chained_cost(draft, context, None),
        chained_sampled=_chained_cost(draft, context, sampling),
    )


def file_of(
    target: CausalLM, draft: CausalLM | None, layer: PreVerifier | None, head: HiddenLM | None
) -> Path:
    """Return the file that keeps the costs of these models on this machine."""
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None
    what: list[Any] = [
        __version__,
        processor(),
        gpu,
        usual_context(target, draft),
        long_context(target, draft),
    ]
    for model in (target, draft):
        if model is not None:
            hot = len(model.hot.tokens) if model.hot is not None else None
            what.append([model.fingerprint, facts_of(model), type(model.backend).__name__, hot])
    what.append(layer.config.to_dict() if layer is not None else None)
    what.append([head.kind, head.width, head.depth, len(head.hot)] if head is not None else None)
    key = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:16]
    return home() / "costs" / f"{key}.json"


def kept(path: Path, measure: Callable[[], Costs]) -> Costs:
    """Return the costs in a file, or measure and write them if it is missing or damaged. A file that cannot be written
    is no error."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return costs_of(json.loads(path.read_bytes()))
    costs = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(costs)) + "\n")
    return costs


@torch.inference_mode()
def forward_costs(
    model: CausalLM, counts: Sequence[int] = COUNTS, context: int = CONTEXT
) -> dict[int, float]:
    """Return {new tokens: ms of one forward} after `context` tokens, the 20th percentile of all times, made convex.

    Forwards of one size come in runs, as in decoding. The runs take turns, so that a busy moment of the machine does
    not fall on one size. Sizes beyond the model's context are left out. Raises ValueError if none is left.
    """
    left = None if model.context is None else model.context - context
    counts = [count for count in counts if left is None or count <= left]
    if not counts:
        raise ValueError(
            f"the model's context of {model.context} is full after {context} tokens: choose fewer"
        )
    model = after(model, context)

    def timed(count: int) -> float:
        start = model.clock()
        model.forward([0], [Draft.chain(0, [0] * (count - 1))])
        _wait(model.device)
        return model.clock() - start

    seconds: dict[int, list[float]] = {count: [] for count in counts}
    timed(counts[0])
    begun = model.clock()
    for run in range(RUNS):
        if run and model.clock() - begun > SECONDS:
            break
        for count, taken in seconds.items():
            own = [timed(count)]
            while len(own) <= RUN and sum(own) < SECONDS / RUNS / len(counts):
                own.append(timed(count))
            taken += own[1:] or own  # the first forward follows one of another size
    return convex({count: _quiet_ms(taken) for count, taken in seconds.items()})


@torch.inference_mode()
def head_costs(head: HiddenLM, context: int = CONTEXT) -> dict[int, float]:
    """Return {rows: ms of a head's next state and its logits} after `context` entries. Lyanna's states come several at
    a time: hers is the mean of STATES of them."""
    eagle, in_c = head.kind == "eagle", head.kind == "lyanna" and head.grows(1)
    token = torch.zeros(1, 1, dtype=torch.long, device=head.device)
    itself = torch.ones(1, 1, 1, dtype=torch.bool, device=head.device)
    head, found = head.fresh(), {}
    for rows in COUNTS[:-1]:
        head.reset()
        ids = list(range(rows))
        for id in ids:
            head.add(id, context + STATES)
        states = torch.zeros(rows, context, head.width, dtype=head.dtype, device=head.device)
        state = head.extend(ids, list(states), [[0] * context] * rows)
        seconds = []
        for _ in _rounds():
            begun = perf_counter()
            if in_c:
                head.grow(
                    ids,
                    state.split(1),
                    [[0]] * rows,
                    STATES,
                    Beams([0] * rows, 1, 1, [STATES] * rows),
                )
            elif eagle:  # each of its states needs the token before it
                following = head.branch(
                    ids, state[:, None], token.expand(rows, 1), 0, itself.expand(rows, 1, 1)
                )
                head.logits(following[:, 0])
            else:
                head.logits(torch.cat(head.roll(ids, state, STATES)))
            _wait(head.device)
            seconds.append((perf_counter() - begun) / (1 if eagle else STATES))
            head.crop(ids, [context] * rows)
        found[rows] = _quiet_ms(seconds)
    return convex(found)


@torch.inference_mode()
def _chained_cost(draft: CausalLM, context: int, sampling: ChainSampling | None) -> float:
    """Return the ms of a token in a fused draft, or 0 if the draft model has no fused drafts."""
    if draft.fused_draft is None:
        return 0.0
    draft, seconds = after(draft, context), list[float]()
    assert draft.fused_draft is not None
    for _ in _rounds():
        begun = perf_counter()
        found = draft.fused_draft(draft.cache, 0, [0], CHAIN, 0.0, 0.0, (), sampling)
        seconds.append((perf_counter() - begun) / CHAIN)
        if not found.tokens:
            return 0.0
        draft.crop([0], [context])
    return _quiet_ms(seconds)


@torch.inference_mode()
def _sampling_costs(target: CausalLM, draft: CausalLM, costs: Costs) -> tuple[float, float]:
    """Return the ms that top-p adds to a drafted token, and to each of four verified tokens.

    Each is the median of calls that follow a forward of the model, and so find no warm cache."""
    top_p = LogitsProcessorList([TopPLogitsWarper(TOP_P)])
    samplers = [Sampler(greedy, None if greedy else top_p) for greedy in (True, False)]
    source = torch.Generator(target.device).manual_seed(
        0
    )  # leaves torch's own random state as it is

    def extra(
        model: CausalLM, tokens: int, ms: float, use: Callable[[Sampler, Draft, Tensor], object]
    ) -> float:
        model, chain = after(model, 1), Draft.chain(0, [0] * (tokens - 1))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for sampler in samplers * min(20, max(LEAST_REPEATS, int(100 * SECONDS / ms))):
            (scores,) = model.forward([0], [chain]).logits
            begun = perf_counter()
            use(sampler, chain, scores)
            seconds[sampler.greedy].append(perf_counter() - begun)
        return max(0.0, round(1000 * (median(seconds[False]) - median(seconds[True])) / tokens, 4))

    def drafted(sampler: Sampler, chain: Draft, scores: Tensor) -> object:
        return next_tokens([sampler], scores, lambda row: [], [source])

    def verified(sampler: Sampler, chain: Draft, scores: Tensor) -> object:
        return accept(chain, sampler.scores(scores, lambda node: []), sampler.greedy, source)

    return extra(draft, 1, costs.drafting(1), drafted), extra(target, 4, costs.verify(4), verified)


@torch.inference_mode()
def _layer_costs(layer: PreVerifier, draft: CausalLM) -> tuple[float, float]:
    """Return the median ms of a pre-verifier's call on four tokens, and of reading a token's probability.

    Each call follows a forward of the draft, and so finds no warm cache."""
    fast, draft = quick(layer), after(draft, 1)
    calls, glances = list[float](), list[float]()
    echoes = [[(0,) * len(SIZES)] * 4]
    for _ in _rounds():
        scores = draft.forward([0], [Draft.root(0)]).logits[0].float()[:, None].expand(1, 4, -1)
        begun = perf_counter()
        state = fast.begin([[1.0, 1.0, 1.0]])
        q = probabilities_of(
            scores, torch.zeros(1, 4, dtype=torch.long, device=scores.device)
        ).tolist()
        fast.step(state, [[log(max(each, MIN_PROBABILITY)) for each in row] for row in q], echoes)
        calls.append(perf_counter() - begun)
        (scores,) = draft.forward([0], [Draft.root(0)]).logits
        begun = perf_counter()
        last_probabilities(scores, [[0]])
        glances.append(perf_counter() - begun)
    return round(1000 * median(calls), 4), round(1000 * median(glances), 4)


@torch.inference_mode()
def after(model: CausalLM, context: int) -> CausalLM:
    """Return a model with a cache of its own, in which sequence 0 holds `context` tokens.

    All have the keys and values of the first, as a prompt would take longer than the measurement."""
    model = model.fresh()
    model.add(0, context + COUNTS[-1])
    model.extend([0], [[0]])
    for layer in model.cache.layers:
        for part in layer.buffers:
            part[:1, :, 1:context] = part[:1, :, :1]
    model.cache.lengths[:] = [context]
    return model


def usual_context(*models: CausalLM | None) -> int:
    """Return CONTEXT tokens, or half of the shortest context if that is less."""
    return _within(CONTEXT, *models)


def long_context(*models: CausalLM | None) -> int:
    """Return LONG tokens, or half of the shortest context if that is less."""
    return _within(LONG, *models)


def _within(most: int, *models: CausalLM | None) -> int:
    return min(
        [most, *(model.context // 2 for model in models if model is not None and model.context)]
    )


def _rounds() -> Iterator[None]:
    """Yield for SHARE seconds: at least LEAST_REPEATS times, at most RUNS * RUN times."""
    begun = perf_counter()
    for done in range(RUNS * RUN):
        if done >= LEAST_REPEATS and perf_counter() - begun > SHARE:
            return
        yield


def _quiet_ms(seconds: list[float]) -> float:
    return round(1000 * sorted(seconds)[int(QUIET * len(seconds))], 4)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
