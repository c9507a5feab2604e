"""Measure what forwards cost on this machine.

A good draft length depends on these costs and on the text, and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from random import Random
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
from forerun.backends.stored import has_experts
from forerun.engine.acceptance import accept
from forerun.engine.draft import Draft
from forerun.files import home, write_text
from forerun.heads.echo import SIZES
from forerun.heads.pre_verifier import MIN_PROBABILITY, PreVerifier
from forerun.heads.quick import quick
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs, convex, costs_of, smooth
from forerun.planning.stop_rules import Bounds
from forerun.sampling.probabilities import last_probabilities, probabilities_of
from forerun.sampling.sampler import ChainSampling, Sampler, SamplingDistribution, next_tokens

TOP_P = 0.95  # of the sampling that is measured
TOKEN_COUNTS = (1, 2, 4, 8, 16, 32)  # new tokens of a forward
FAR_TOKEN_COUNTS = TOKEN_COUNTS[:-1]  # new tokens of a forward after a long context
ROW_COUNTS = TOKEN_COUNTS[:-1]  # rows of a head
RUNS = 3  # the most runs of a size
FORWARDS_PER_RUN = 10  # at most
QUIET = 0.2  # the quantile that counts, because other programs disturb the slower forwards
FORWARDS_SECONDS = 2.0  # for all forwards of a model
FIGURE_SECONDS = 0.15  # for each of the other figures; more if LEAST_REPEATS take longer
LEAST_REPEATS = 2  # of any measurement but a forward, however slow it is
USUAL_CONTEXT = 256  # tokens before the new ones
LONG_CONTEXT = 8192  # tokens after which forwards are measured a second time
HEAD_STATES = 4  # states that a lyanna head runs at a time
CHAIN_TOKENS = 4  # tokens of a fused draft
VERIFIED_TOKENS = 4  # tokens of the target's forward that sampling is measured with


def measure_costs(
    target: CausalLM,
    draft: CausalLM | None = None,
    context: int | None = None,
    layer: PreVerifier | None = None,
    head: HiddenLM | None = None,
) -> Costs:
    """Measure a pair, and its pre-verifier and its head if they are given.

    This takes at most 11 seconds, or longer if a forward of 32 tokens takes a second.

    Args:
        target: the target.
        draft: the draft model, or None.
        context: tokens before the new ones; None for `usual_context`. Forwards are measured again
            after `long_context` tokens, if these are more.
        layer: the pre-verifier, which also needs a draft model.
        head: a head over hidden states.

    Raises:
        ValueError: the context leaves no place for new tokens.
    """
    if context is None:
        context = usual_context(target, draft)
    costs = _pair_costs(target, draft, context, TOKEN_COUNTS)
    long = long_context(target, draft)
    if long > context:
        # Without memory for a long context the one table serves all lengths.
        with suppress(MemoryError, torch.OutOfMemoryError):
            costs = replace(costs, far=_pair_costs(target, draft, long, FAR_TOKEN_COUNTS))
    if head is not None:
        costs = replace(costs, head=head_costs(head))
    if draft is None:
        return costs
    policy, read_prob_ms = (0.0, 0.0) if layer is None else _layer_costs(layer, draft)
    sample_ms, verify_sample_ms = _sampling_costs(target, draft, costs)
    # These do not depend on the context.
    shared: dict[str, Any] = {
        "policy": policy,
        "read_prob_ms": read_prob_ms,
        "sample_ms": sample_ms,
        "verify_sample_ms": verify_sample_ms,
    }
    far = replace(costs.far, **shared) if costs.far is not None else None
    return replace(costs, **shared, far=far)


def _pair_costs(
    target: CausalLM, draft: CausalLM | None, context: int, counts: Sequence[int]
) -> Costs:
    """Return what forwards and fused drafts cost after `context` tokens."""
    costs = Costs(
        forward_costs(target, counts, context),
        {},
        context=context,
        has_experts=has_experts(target.model),
    )
    if draft is None:
        return costs
    numbers = torch.linspace(0.0, 0.99, CHAIN_TOKENS, dtype=torch.float64)
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
    contexts = usual_context(target, draft), long_context(target, draft)
    described: list[Any] = [__version__, processor(), gpu, *contexts]
    for model in (target, draft):
        if model is not None:
            hot = len(model.hot.tokens) if model.hot is not None else None
            backend = type(model.backend).__name__
            described.append([model.fingerprint, facts_of(model), backend, hot])
    described.append(layer.config.to_dict() if layer is not None else None)
    if head is None:
        described.append(None)
    else:
        described.append([head.kind, head.width, head.depth, len(head.hot)])
    key = hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()[:16]
    return home() / "costs" / f"{key}.json"


def kept(path: Path, measure: Callable[[], Costs]) -> Costs:
    """Return the costs in a file, or measure and write them if it is missing or damaged.

    It is no error if the file cannot be written.
    """
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return costs_of(json.loads(path.read_bytes()))
    costs = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(costs)) + "\n")
    return costs


@torch.inference_mode()
def forward_costs(
    model: CausalLM, counts: Sequence[int] = TOKEN_COUNTS, context: int = USUAL_CONTEXT
) -> dict[int, float]:
    """Return {new tokens: ms of one forward} after `context` tokens.

    It is the 20th percentile of all times, made smooth. Forwards of one size come in runs, as in
    decoding. The sizes take turns, so that a busy moment of the machine does not fall on one of
    them. Sizes beyond the model's context are left out.

    Raises:
        ValueError: no size is left.
    """
    left = None if model.context is None else model.context - context
    counts = [count for count in counts if left is None or count <= left]
    if not counts:
        raise ValueError(
            f"the model's context of {model.context} is full after {context} tokens: choose fewer"
        )
    model = after(model, context)
    # A forward has random tokens, because equal ones would all choose the same experts. Each one
    # has others, because experts that were just read take less time.
    source = Random(0)

    def timed(count: int) -> float:
        first, *others = source.choices(range(model.vocab_size), k=count)
        started_at = model.clock()
        model.forward([0], [Draft.chain(first, others)])
        _wait(model.device)
        return model.clock() - started_at

    run_seconds = FORWARDS_SECONDS / RUNS / len(counts)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    timed(counts[0])
    started_at = model.clock()
    for run in range(RUNS):
        if run and model.clock() - started_at > FORWARDS_SECONDS:
            break
        for count in counts:
            times = [timed(count)]
            while len(times) <= FORWARDS_PER_RUN and sum(times) < run_seconds:
                times.append(timed(count))
            # The first forward of a run follows one of another size. It counts if it is alone.
            seconds[count] += times[1:] or times
    table = {count: _quiet_ms(times) for count, times in seconds.items()}
    return smooth(table, has_experts(model.model))


@torch.inference_mode()
def head_costs(head: HiddenLM, context: int = USUAL_CONTEXT) -> dict[int, float]:
    """Return {rows: ms of a head's next state and its logits} after `context` entries.

    A lyanna head runs several states at a time: its figure is the mean of HEAD_STATES of them.
    """
    head = head.fresh()
    table = {}
    for rows in ROW_COUNTS:
        head.reset()
        ids = list(range(rows))
        for id in ids:
            head.add(id, context + HEAD_STATES)
        features = torch.zeros(rows, context, head.width, dtype=head.dtype, device=head.device)
        states = head.extend(ids, list(features), [[0] * context] * rows)
        step, count = _head_step(head, ids, states)
        seconds = []
        for _ in _rounds():
            started_at = perf_counter()
            step()
            _wait(head.device)
            seconds.append((perf_counter() - started_at) / count)
            head.crop(ids, [context] * rows)
        table[rows] = _quiet_ms(seconds)
    return convex(table)


def _head_step(
    head: HiddenLM, ids: Sequence[int], states: Tensor
) -> tuple[Callable[[], object], int]:
    """Return a call that drafts after states [R, d], and how many states of a row it runs."""
    rows = len(ids)
    if head.kind == "eagle":
        token = torch.zeros(1, 1, dtype=torch.long, device=head.device)
        itself = torch.ones(1, 1, 1, dtype=torch.bool, device=head.device)

        def branch() -> object:
            tokens = token.expand(rows, 1)
            following = head.branch(ids, states[:, None], tokens, 0, itself.expand(rows, 1, 1))
            return head.logits(following[:, 0])

        return branch, 1  # because each of its states needs the token before it

    def grow() -> object:
        beams = Beams([0] * rows, 1, 1, [HEAD_STATES] * rows)
        return head.grow(ids, states.split(1), [[0]] * rows, HEAD_STATES, beams)

    def roll() -> object:
        return head.logits(torch.cat(head.roll(ids, states, HEAD_STATES)))

    return grow if head.grows(1) else roll, HEAD_STATES


@torch.inference_mode()
def _chained_cost(draft: CausalLM, context: int, sampling: ChainSampling | None) -> float:
    """Return the ms of a token in a fused draft, or 0 if the draft model has no fused drafts."""
    if draft.fused_draft is None:
        return 0.0
    draft = after(draft, context)
    assert draft.fused_draft is not None
    bounds = Bounds(CHAIN_TOKENS)
    seconds = []
    for _ in _rounds():
        started_at = perf_counter()
        drafted = draft.fused_draft(draft.cache, 0, [0], bounds, (), sampling)
        seconds.append((perf_counter() - started_at) / CHAIN_TOKENS)
        if not drafted.tokens:
            return 0.0
        draft.crop([0], [context])
    return _quiet_ms(seconds)


@torch.inference_mode()
def _sampling_costs(target: CausalLM, draft: CausalLM, costs: Costs) -> tuple[float, float]:
    """Return the ms that top-p adds to a drafted token, and to each of four verified tokens."""
    top_p = LogitsProcessorList([TopPLogitsWarper(TOP_P)])
    samplers = [Sampler(True, None), Sampler(False, top_p)]
    # With this generator torch's own random state stays as it is.
    source = torch.Generator(target.device).manual_seed(0)

    def draw(sampler: Sampler, chain: Draft, scores: Tensor) -> object:
        return next_tokens([sampler], scores, lambda row: [], [source])

    def verify(sampler: Sampler, chain: Draft, scores: Tensor) -> object:
        return accept(chain, sampler.scores(scores, lambda node: []), sampler.greedy, source)

    sample_ms = _added_ms(draft, 1, costs.drafting(1), samplers, draw)
    verifying = costs.verify(VERIFIED_TOKENS)
    verify_sample_ms = _added_ms(target, VERIFIED_TOKENS, verifying, samplers, verify)
    return sample_ms, verify_sample_ms


def _added_ms(
    model: CausalLM,
    tokens: int,
    forward_ms: float,
    samplers: list[Sampler],
    use: Callable[[Sampler, Draft, Tensor], object],
) -> float:
    """Return the ms per token that sampling adds to `use`, which gets the logits of a forward.

    It is the difference of medians. Each call follows a forward of the model, so that it finds no
    warm cache, as in decoding.
    """
    model = after(model, 1)
    chain = Draft.chain(0, [0] * (tokens - 1))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    repeats = min(20, max(LEAST_REPEATS, int(100 * FORWARDS_SECONDS / forward_ms)))
    for sampler in samplers * repeats:
        (scores,) = model.forward([0], [chain]).logits
        started_at = perf_counter()
        use(sampler, chain, scores)
        seconds[sampler.greedy].append(perf_counter() - started_at)
    added = median(seconds[False]) - median(seconds[True])
    return max(0.0, round(1000 * added / tokens, 4))


@torch.inference_mode()
def _layer_costs(layer: PreVerifier, draft: CausalLM) -> tuple[float, float]:
    """Return the median ms of a pre-verifier's call on four tokens, and of reading a probability.

    Each call follows a forward of the draft, so that it finds no warm cache, as in decoding.
    """
    fast = quick(layer)
    draft = after(draft, 1)
    calls = []
    glances = []
    echoes = [[(0,) * len(SIZES)] * 4]
    for _ in _rounds():
        scores = draft.forward([0], [Draft.root(0)]).logits[0].float()[:, None].expand(1, 4, -1)
        started_at = perf_counter()
        state = fast.begin([[1.0, 1.0, 1.0]])
        tokens = torch.zeros(1, 4, dtype=torch.long, device=scores.device)
        q = probabilities_of(scores, tokens).tolist()
        fast.step(state, [_logs(row) for row in q], echoes)
        calls.append(perf_counter() - started_at)
        (scores,) = draft.forward([0], [Draft.root(0)]).logits
        started_at = perf_counter()
        last_probabilities(scores, [[0]])
        glances.append(perf_counter() - started_at)
    return round(1000 * median(calls), 4), round(1000 * median(glances), 4)


def _logs(probabilities: Sequence[float]) -> list[float]:
    return [log(max(probability, MIN_PROBABILITY)) for probability in probabilities]


@torch.inference_mode()
def after(model: CausalLM, context: int) -> CausalLM:
    """Return a model with its own cache, in which sequence 0 holds `context` tokens.

    All of them have the keys and values of the first, because a prompt would take longer to run
    than the measurement.
    """
    model = model.fresh()
    model.add(0, context + TOKEN_COUNTS[-1])
    model.extend([0], [[0]])
    for layer in model.cache.layers:
        for part in layer.buffers:
            part[:1, :, 1:context] = part[:1, :, :1]
    model.cache.lengths[:] = [context]
    return model


def usual_context(*models: CausalLM | None) -> int:
    """Return USUAL_CONTEXT tokens, or half of the shortest context if that is less."""
    return _within(USUAL_CONTEXT, *models)


def long_context(*models: CausalLM | None) -> int:
    """Return LONG_CONTEXT tokens, or half of the shortest context if that is less."""
    return _within(LONG_CONTEXT, *models)


def _within(tokens: int, *models: CausalLM | None) -> int:
    for model in models:
        if model is not None and model.context:
            tokens = min(tokens, model.context // 2)
    return tokens


def _rounds() -> Iterator[None]:
    """Yield for FIGURE_SECONDS, at least LEAST_REPEATS times and at most as often as a forward."""
    started_at = perf_counter()
    for done in range(RUNS * FORWARDS_PER_RUN):
        if done >= LEAST_REPEATS and perf_counter() - started_at > FIGURE_SECONDS:
            return
        yield


def _quiet_ms(seconds: list[float]) -> float:
    return round(1000 * sorted(seconds)[int(QUIET * len(seconds))], 4)


def _wait(device: torch.device) -> None:
    """Wait until the device has done its work, so that a time includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
