"""What a forward costs, measured on the machine at hand: all that a good draft length depends on beside the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper

from forerun.backends.heads import HiddenLM
from forerun.engine.acceptance import accept
from forerun.engine.costs import Costs
from forerun.engine.draft import Draft
from forerun.heads.echo import SIZES
from forerun.heads.pre_verifier import LEAST, PreVerifier
from forerun.heads.quick import quick
from forerun.model.causal_lm import CausalLM
from forerun.sampling.probabilities import last_probabilities, probabilities_of
from forerun.sampling.sampler import Drawing, Sampler, SamplingDistribution, next_tokens

TOP_P = 0.95
COUNTS = (1, 2, 4, 8, 16, 32)
RUN = 10
QUIET = 0.2  # the share of forwards that are taken to be undisturbed, on a machine that has more to do
SECONDS = 1.0  # that measure_costs spends on a model's forwards, more or less
SHARE = 0.3  # seconds for each of the other figures
LEAST_REPEATS = 3
CONTEXT = 256
STATES = 4
CHAIN = 4  # tokens of a draft in one call


def measure_costs(
    target: CausalLM,
    draft: CausalLM | None = None,
    context: int | None = None,
    layer: PreVerifier | None = None,
    head: HiddenLM | None = None,
) -> Costs:
    """The cost table of a pair, with its pre-verifier's and a head's where they are given, in a second or two; three
    forwards of each size at the least, where these are slow.

    Of all times the 20th percentile: other programs make long forwards slower than short ones, now and then.

    They stand behind `context` tokens, `usual_context` where None is given. Raises ValueError for a context that leaves
    no room.
    """
    if context is None:
        context = usual_context(target, draft)
    table = _table(target, context), _table(draft, context) if draft is not None else {}
    layered = _layer_costs(layer, draft) if layer is not None and draft is not None else (0.0, 0.0)
    costs = Costs(*table, *layered, head=head_costs(head) if head is not None else {})
    if draft is None:
        return costs
    drawing, judging = _sampling_costs(target, draft, costs)
    numbers = torch.linspace(0.0, 0.99, CHAIN, dtype=torch.float64)
    chained, sampled = (
        _chained_cost(draft, context, drawn) for drawn in (None, Drawing(SamplingDistribution(top_p=TOP_P), numbers))
    )
    return replace(costs, drawing=drawing, judging=judging, chained=chained, chained_sampled=sampled)


@torch.inference_mode()
def _chained_cost(draft: CausalLM, context: int, drawing: Drawing | None) -> float:
    """Milliseconds of a token that the draft makes in one call with others, 0 where it does not."""
    if draft.fused_draft is None:
        return 0.0
    draft, seconds = behind(draft, context), list[float]()
    for _ in rounds(3 * RUN):
        begun = perf_counter()
        found = draft.chain(0, [0], CHAIN, 0.0, 0.0, (), drawing)
        seconds.append(perf_counter() - begun)
        if found is None or not found.tokens:
            return 0.0
        draft.crop([0], [context])
    return round(1000 * sorted(seconds)[int(QUIET * len(seconds))] / CHAIN, 4)


@torch.inference_mode()
def _sampling_costs(target: CausalLM, draft: CausalLM, costs: Costs) -> tuple[float, float]:
    """How many ms longer a token takes with top-p than greedily: drafted, and as one of four that are verified. Medians
    of three times or more, each after a forward of its model, so that it finds no warm cache."""
    top_p = LogitsProcessorList([TopPLogitsWarper(TOP_P)])
    samplers = [Sampler(greedy, None if greedy else top_p) for greedy in (True, False)]
    source = torch.Generator(target.device).manual_seed(0)  # the user's random state stays as it is

    def extra(model: CausalLM, tokens: int, ms: float, use: Callable[[Sampler, Draft, Tensor], object]) -> float:
        model, chain = behind(model, 1), Draft.chain(0, [0] * (tokens - 1))
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
def head_costs(head: HiddenLM, context: int = CONTEXT) -> dict[int, float]:
    """Milliseconds of a head's next state and its logits, by the number of rows, behind `context` others. Lyanna's are
    made several at a time, so that is a share of STATES of them."""
    eagle, token = head.kind == "eagle", torch.zeros(1, 1, dtype=torch.long, device=head.device)
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
        for _ in rounds(3 * RUN):
            begun = perf_counter()
            if eagle:  # whose states are each made with the token behind it
                following = head.branch(ids, state[:, None], token.expand(rows, 1), 0, itself.expand(rows, 1, 1))
                head.logits(following[:, 0])
            else:
                head.logits(torch.cat(head.roll(ids, state, STATES)))
            if head.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(perf_counter() - begun)
            head.crop(ids, [context] * rows)
        each = sorted(seconds)[int(QUIET * len(seconds))] / (1 if eagle else STATES)
        found[rows] = round(1000 * each, 4)
    return found


@torch.inference_mode()
def _layer_costs(layer: PreVerifier, draft: CausalLM, most: int = 30) -> tuple[float, float]:
    """Median ms of a pre-verifier's call on four tokens, and of reading a token's probability, between forwards of the
    draft: they never find a warm cache."""
    fast, draft = quick(layer), behind(draft, 1)
    config, calls, glances = layer.config, [], []
    hidden = torch.zeros(1, 4, config.draft_size)
    echoes = [[(0,) * len(SIZES)] * 4]
    for _ in rounds(most):
        scores = draft.forward([0], [Draft.root(0)]).logits[0].float()[:, None].expand(1, 4, -1)
        begun = perf_counter()
        state = fast.begin([[1.0, 1.0, 1.0]])
        chances = probabilities_of(scores, torch.zeros(1, 4, dtype=torch.long, device=scores.device)).tolist()
        fast.step(state, [[log(max(chance, LEAST)) for chance in row] for row in chances], echoes, hidden)
        calls.append(perf_counter() - begun)
        (scores,) = draft.forward([0], [Draft.root(0)]).logits
        begun = perf_counter()
        last_probabilities(scores, [[0]])
        glances.append(perf_counter() - begun)
    return round(1000 * median(calls), 4), round(1000 * median(glances), 4)


def filled(model: CausalLM, tokens: Sequence[int], rows: int = 1) -> CausalLM:
    """A model with a cache of its own, in which the sequences 0, 1, .. hold these tokens."""
    model = model.fresh()
    for _ in model.prefill(tokens, len(tokens)):
        pass
    for id in range(rows):
        model.join(id, len(tokens) + COUNTS[-1])
    return model


@torch.inference_mode()
def behind(model: CausalLM, context: int, rows: int = 1) -> CausalLM:
    """A model with a cache of its own, in which the sequences 0, 1, .. hold so many tokens, all with the first one's
    keys and values: a prompt would take longer than what is measured behind it."""
    model = model.fresh()
    for id in range(rows):
        model.add(id, context + COUNTS[-1])
    model.extend(range(rows), [[0]] * rows)
    for layer in model.cache.layers:
        for part in layer.buffers:
            part[:rows, :, 1:context] = part[:rows, :, :1]
    model.cache.lengths[:] = [context] * rows
    return model


def rounds(most: int) -> Iterator[int]:
    """Goes on until `most`, or until SHARE seconds are over and there have been enough."""
    begun = perf_counter()
    for done in range(most):
        if done >= LEAST_REPEATS and perf_counter() - begun > SHARE:
            return
        yield done


def usual_context(*models: CausalLM | None) -> int:
    """256 tokens, or half of a model's context where that is less."""
    return min([CONTEXT, *(model.context // 2 for model in models if model is not None and model.context)])


def _table(model: CausalLM, context: int) -> dict[int, float]:
    first = forward_costs(model, (1,), context, repeats=LEAST_REPEATS, share=QUIET)[1]
    # Forwards of the larger sizes take about twice as long.
    most = int(SECONDS * 1000 / max(2 * first * len(COUNTS), 1e-3))
    return forward_costs(model, context=context, repeats=min(max(most, LEAST_REPEATS), 3 * RUN), share=QUIET)


@torch.inference_mode()
def forward_costs(
    model: CausalLM,
    counts: Sequence[int] = COUNTS,
    context: int = 256,
    repeats: int = 30,
    share: float = 0.5,
    rows: int = 1,
) -> dict[int, float]:
    """Milliseconds of one forward of each number of new tokens of each row behind `context` others: what this share of
    the forwards stays below, by default the median.

    Each count is measured in runs of ten or fewer, as decoding does one kind of forward after the other, and the runs
    take turns, so that a busy moment of the machine does not fall on one of them. Counts that the model's context has
    no room for are left out. Raises ValueError where that leaves none.
    """
    room = None if model.context is None else model.context - context
    counts = [count for count in counts if room is None or count <= room]
    if not counts:
        raise ValueError(f"a context of {model.context} has no room behind {context} tokens: choose fewer")
    model, ids = behind(model, context, rows), list(range(rows))
    drafts = {count: [Draft.chain(0, [0] * (count - 1))] * rows for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(-(-repeats // RUN)):
        for count, draft in drafts.items():
            warming = 2 if repeats > LEAST_REPEATS else 1
            for repeat in range(min(RUN, repeats) + warming):
                begun = model.clock()
                model.forward(ids, draft)
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat >= warming:
                    seconds[count].append(model.clock() - begun)
    return {count: round(1000 * sorted(taken)[int(share * len(taken))], 4) for count, taken in seconds.items()}
