"""Drafts of one sequence in one call of C, beside the same drafts token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun import Decoder
from forerun.backends.chain import FusedChain, fused_chain
from forerun.backends.costs import measure_costs
from forerun.backends.hot import HotHead, prepare_draft
from forerun.backends.stored import store
from forerun.drafters.model_chain import Chain, ChainDrafter
from forerun.drafters.phrases import costs_by_phrases
from forerun.engine.sequence import Request
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.methods import PacerOuroboros, method
from forerun.model.causal_lm import CausalLM
from forerun.planning.stop_rules import Bounds, FixedLength, Within
from forerun.sampling.sampler import ChainSampling, Drafted, Sampler, SamplingDistribution
from forerun.sampling.seeded import FLOOR, SeededStream
from tests.support.families import tiny
from tests.support.toys import BASELINES, COSTS, join_all, p_value, random_layer, rows_of

PROMPT = [5, 9, 12, 5, 9, 30, 31, 5]
PLAIN = SamplingDistribution()
WARM = SamplingDistribution(0.7, 0.8)


def small(
    name: str = "llama",
    kind: str = "int8",
    hot: bool = False,
    change: Callable[[torch.Tensor], object] = lambda weight: None,
    tokens: torch.Tensor | None = None,
) -> CausalLM:
    """`change`: of the LM head's weight. `tokens`: the hot ones."""
    model = tiny(name)
    with torch.no_grad():
        change(model.get_output_embeddings().weight)
    weight = model.get_output_embeddings().weight.detach().clone()
    draft_model = prepare_draft(store(model, kind), None, None)
    if hot:
        tokens = torch.arange(3, 120, 3) if tokens is None else tokens
        draft_model = with_head(draft_model, HotHead(rows_of(weight), len(weight), tokens))
    return draft_model


def with_head(model: CausalLM, head: HotHead) -> CausalLM:
    return model.draft_with(head, fused_chain(model.backend, head))


def begun(model: CausalLM, rows: int = 1) -> CausalLM:
    """With rows of different prompts, the last of which is PROMPT."""
    join_all(model, {id: PROMPT[rows - 1 - id :] for id in range(rows)}, 8, 64)
    return model


def rolled(
    model: CausalLM, pending: list[int], count: int, id: int = 0
) -> tuple[list[int], list[float]]:
    """The same tokens and their probabilities, one by one."""
    tokens = list[int]()
    probs = list[float]()
    for _ in range(count):
        probability, token = model.extend([id], [pending])[0][-1].softmax(-1).max(-1)
        pending = [int(token)]
        tokens += pending
        probs.append(float(probability))
    return tokens, probs


@torch.inference_mode()
def at_once(
    model: CausalLM,
    pending: Sequence[int] = (7,),
    how: ChainSampling | None = None,
    id: int = 0,
    most: int = 6,
    ends: Collection[int] = (),
    **bounds: Any,
) -> Drafted:
    """Return a draft of one call of C. It has no distributions if nothing is sampled."""
    assert model.fused_draft is not None
    limits = Bounds(most, **bounds)
    drafted = model.fused_draft(model.cache, id, list(pending), limits, ends, how)
    assert how is not None or drafted.probs is None
    return drafted


def kept(model: CausalLM, id: int) -> list[torch.Tensor]:
    return [
        tensor.clone()
        for pair in model.cache.view(id, model.length(id))
        if pair is not None
        for tensor in pair
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How each call of a chain samples (None: it does not)."""
    samplings = list[Any]()
    call = FusedChain.__call__
    monkeypatch.setattr(
        FusedChain, "__call__", lambda *given: samplings.append(given[-1]) or call(*given)
    )
    return samplings


@pytest.mark.parametrize("pending", [[7], [7, 8, 9], list(range(3, 36))])
@pytest.mark.parametrize(
    ("name", "kind", "hot"),
    [
        *[("llama", kind, hot) for kind, hot in (("int8", False), ("int8", True), ("int4", False))],
        ("qwen2", "int8", True),
        ("qwen3", "int8", False),
        ("mistral", "int8", False),
    ],
)
def test_tokens_keys_and_values_are_those_of_roll(
    name: str, kind: str, hot: bool, pending: list[int]
) -> None:
    one, other = (begun(small(name, kind, hot), 3) for _ in range(2))
    for _ in range(2):  # the second draft begins where the first one ended
        wanted, _ = rolled(one, pending, 6, 2)
        assert at_once(other, pending, id=2).tokens == wanted
        assert other.length(2) == one.length(2) == one.cache.length(2)
        for id in range(3):
            assert all(map(torch.equal, kept(one, id), kept(other, id)))


def test_a_long_draft_to_the_end_of_the_cache_takes_no_more_room() -> None:
    one = begun(small())
    other = begun(small())
    pending = [7 + number % 50 for number in range(90)]
    most = 257 - one.length(0) - len(pending)
    assert at_once(other, pending, most=most).tokens == rolled(one, pending, most)[0]
    assert other.cache.capacity == one.cache.capacity == 256


def test_tokens_of_the_text_are_drafted_beside_the_hot_ones() -> None:
    def change(weight: torch.Tensor) -> None:
        weight[31] *= 50  # it stands in the prompt, and is not hot

    model, other = (begun(small(hot=True, change=change)) for _ in range(2))
    drafts = [at_once(model, [4], most=1).tokens for _ in range(12)]
    assert [31] in drafts
    assert drafts == [rolled(other, [4], 1)[0] for _ in range(12)]


@pytest.mark.parametrize(
    "how", [None, ChainSampling(WARM, torch.full((6,), 0.5, dtype=torch.float64))]
)
def test_it_ends_where_the_bounds_say(how: ChainSampling | None) -> None:
    tokens, probs, probabilities = at_once(begun(small()), how=how)
    if probs is None:
        best, highest = rolled(begun(small()), [7], 6)
        assert tokens == best and probabilities == pytest.approx(highest, rel=1e-3)
    else:
        assert probabilities == [
            float(distribution[token]) for distribution, token in zip(probs, tokens, strict=True)
        ]

    def count(**bounds: Any) -> int:
        draft = at_once(begun(small()), how=how, **bounds)
        assert draft.tokens == tokens[: len(draft.tokens)]
        assert probs is None or torch.equal(draft.probs, probs[: len(draft.tokens)])
        return len(draft.tokens)

    assert [count(most=most) for most in (1, 4)] == [1, 4]
    for place, product in enumerate(torch.tensor(probabilities).cumprod(0).tolist(), 1):
        assert count(min_product=product * 1.0001) == place
    assert count(min_probability=max(probabilities) + 1e-3) == 1
    low = min(range(6), key=probabilities.__getitem__)
    assert count(min_probability=probabilities[low] * 1.0001) == low + 1
    assert count(ends=(tokens[2], 1)) == tokens.index(tokens[2]) + 1
    many = range(40, 130)
    assert count(ends=many) == next(
        (place for place, token in enumerate(tokens, 1) if token in many), 6
    )


def test_it_does_nothing_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_draft(tiny("llama"), None, None, fast=False).fused_draft is None
    biased = small()
    weight = torch.randn(biased.vocab_size, 64)
    bias = torch.randn(biased.vocab_size)
    with_head(biased, HotHead(rows_of(weight, bias), len(weight), torch.arange(9)))
    assert biased.fused_draft is None
    # With padding in its embedding it might draft what the target lacks.
    monkeypatch.setattr(
        FusedChain, "__call__", lambda *_: pytest.fail("it may draft what the target lacks")
    )
    draft = small()
    assert draft.fused_draft is not None
    chain: Any = SimpleNamespace(depth=3, seq=SimpleNamespace(id=0))
    assert (
        ChainDrafter(draft, FixedLength(2), draft.vocab_size - 4)._at_once(chain, Within(Bounds(6)))
        is None
    )


def test_copies_have_buffers_of_their_own() -> None:
    model = begun(small())
    at_once(model, most=2)
    other = begun(model.fresh())
    assert at_once(other, most=4).tokens == rolled(begun(small()), [7], 4)[0]
    assert other.fused_draft is not model.fused_draft


def test_a_cache_that_grows_and_other_threads_change_no_draft() -> None:
    before = torch.get_num_threads()
    one = begun(small())
    other = begun(small())
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            for _ in range(12):
                assert at_once(other, most=8).tokens == rolled(one, [7], 8)[0]
    finally:
        torch.set_num_threads(before)
    assert other.cache.capacity > 256


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("sd", {"gamma": 3}, {}),
        ("cumulative", {"threshold": 0.02, "most": 7}, {}),
        ("confidence", {"threshold": 0.05}, {}),
        (BASELINES["heuristic"], {"gamma": 4}, {}),
        ("pacer", {"block": 2, "most": 7, "threshold": 0.3}, {}),
        ("pacer", {"block": 3, "most": 8, "threshold": 0.3}, {}),
        *[("sd", {"gamma": 3}, {"temperature": 0.8, "seed": seed}) for seed in (None, 4)],
        *[
            ("pacer", {"block": 2, "most": 7, "threshold": 0.47}, {"temperature": 0.8, "seed": s})
            for s in (None, 4)
        ],
    ],
)
def test_methods_draft_the_same(
    name: str,
    options: dict[str, Any],
    asked: dict[str, Any],
    hot: bool,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and lengths are equal, and the call in C is what drafts.

    This holds for one request and where a second one joins, greedily and with a seed.
    """

    def decoded(**more: Any) -> list[list[tuple[Any, ...]]]:
        parts = (
            {"pre_verifier": random_layer(tiny("llama"), tiny("llama"), seed=2 if asked else 3)}
            if name == "pacer"
            else {}
        )
        chosen = method(name, **options)
        decoder = Decoder(small(), None, small(hot=hot), chosen, guard=False, costs=COSTS, **parts)
        torch.manual_seed(8)
        completions = [
            decoder.generate(PROMPT, max_new_tokens=40, ignore_eos=True, **asked, **more)
        ]
        completions += decoder.generate(
            [PROMPT, PROMPT[2:]], max_new_tokens=20, ignore_eos=True, **asked, **more
        )
        return [
            [(step.tokens, step.origins, step.drafted, step.accepted) for step in completion.steps]
            for completion in completions
        ]

    nucleus = {"top_p": 0.9} if asked else {}
    once = decoded(**nucleus)
    done = len(calls)
    assert done > (8 if asked else 0) and any(step[3] for row in once for step in row)
    assert {sampling and sampling.numbers is None for sampling in calls} == {
        bool(asked["seed"]) if asked else None
    }
    lengths = {step[2] for row in once for step in row}
    if name == "pacer":  # blocks, of which some end a draft and some do not
        assert {options["block"], 2 * options["block"]} & lengths and max(lengths) > options[
            "block"
        ]
    if asked:  # what is not of these two settings goes token by token
        assert any(step[2] for row in decoded(top_k=5) for step in row) and len(calls) == done
    monkeypatch.setattr(ChainDrafter, "_at_once", lambda *_: None)
    assert asked.get("seed", 0) is None or decoded(**nucleus) == once


def test_costs_know_what_a_token_of_a_chain_takes() -> None:
    costs = measure_costs(small(), small(hot=True))
    assert (
        0 < costs.drafting(1) == costs.chained
        and costs.sampled.drafting(1) == costs.chained_sampled > 0
    )
    assert costs.drafting(2) > 0 and measure_costs(small(), CausalLM(tiny("llama"))).chained == 0
    # What drafts phrases runs no chain.
    by_phrases = costs_by_phrases(PacerOuroboros(), costs)
    assert by_phrases.drafting(1) == by_phrases.draft[1]


def test_rows_that_stop_together_do_so_alone() -> None:
    """`Within.more` has rows that have ended count as 0."""
    bounds = Within(Bounds(6, min_product=0.3), shared_rows=2).bounds()
    assert (bounds.max_tokens, bounds.min_probability, bounds.min_product) == (6, 0.0, 0.6)


# Sampled drafts


def probabilities_by(logits: torch.Tensor, sampling: SamplingDistribution) -> torch.Tensor:
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.float())  # type: ignore[arg-type]
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)  # type: ignore[arg-type]
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "sampling", [PLAIN, SamplingDistribution(1.4), WARM, SamplingDistribution(1.0, 1e-6)]
)
@pytest.mark.parametrize("hot", [False, True])
def test_drafts_are_sampled_from_the_given_distributions(
    sampling: SamplingDistribution, hot: bool
) -> None:
    """Each token is the one in whose interval the random number falls.

    The intervals are those of the distribution that transformers' processors make of the logits.
    """
    numbers = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _ in range(4):
        tokens, probs, _ = at_once(
            begun(small(hot=hot)), [7, 31], how=ChainSampling(sampling, numbers)
        )
        assert probs is not None and len(tokens) == 6
        other = begun(small(hot=hot))
        before = [7, 31]
        # Where a token stands among tokens is C's to say: hot tokens have an order of their own.
        order = list(range(other.vocab_size)) if other.hot is None else other.hot.tokens.tolist()
        for token, distribution, number in zip(tokens, probs, numbers.tolist(), strict=True):
            logits = other.extend([0], [before])[0][-1:]
            wanted = probabilities_by(logits, sampling)[0]
            torch.testing.assert_close(distribution, wanted, rtol=1e-2, atol=1e-4)  # up to rounding
            assert distribution[token] > 0
            all_tokens = order + ([] if other.hot is None else other.hot.context_tokens(0))
            below = wanted[all_tokens[: all_tokens.index(token)]].sum().item()
            assert below - 1e-3 <= number <= below + wanted[token].item() + 1e-3
            before = [token]
        numbers = torch.rand(6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sampling", "scale", "more"), [(PLAIN, 1, 0), (WARM, 1, 0), (PLAIN, 6, 0), (PLAIN, 6, 60)]
)
@pytest.mark.parametrize("hot", [False, True])
def test_a_seed_drafts_its_streams_tokens(
    sampling: SamplingDistribution, scale: float, more: int, hot: bool
) -> None:
    """The drafted tokens are those that `forerun.sampling.seeded` chooses.

    That includes the improbable tokens, which the stream treats as one. `more` tokens belong to the
    target's vocabulary alone.
    """
    model = small(
        hot=True,
        change=lambda weight: weight.mul_(scale),
        tokens=None if hot else torch.arange(130),
    )
    same, low = [], []
    for number in range(200):
        streams = [SeededStream(5, number).at(position) for position in range(4)]
        one = begun(model.fresh())
        other = begun(model.fresh())
        how = ChainSampling(sampling, None, [stream.key for stream in streams], 130 + more)
        tokens, probs, _ = at_once(one, most=4, how=how)
        assert probs is None
        for before, token, stream in zip([7, *tokens], tokens, streams, strict=False):
            logits = other.extend([0], [[before]])[0][-1:]
            wanted = torch.nn.functional.pad(probabilities_by(logits, sampling)[0], (0, more))
            chosen = stream.sample(wanted)
            (low if wanted[chosen] <= FLOOR else same).append(token == chosen)
    assert sum(same) >= 0.98 * len(same)  # rounding may decide
    assert scale == 1 or sum(low) > len(low) / 2 or (hot and not low)


@pytest.mark.slow
@pytest.mark.parametrize("hot", [False, True])
def test_output_of_sampled_calls_follows_the_targets_distribution(hot: bool) -> None:
    """Check the law of three tokens.

    Two of them are drafted with other probabilities, or one where the rule ends the draft.
    """
    model = begun(small())
    sampling = SamplingDistribution(0.3, 0.5)
    joint = torch.zeros(130, 130, 130)
    tokens = torch.arange(3, 120, 3) if hot else torch.arange(130)
    noise = torch.Generator().manual_seed(1)

    def after(text: list[int]) -> torch.Tensor:
        logits = model.extend([0], [text])[0][-1:]
        model.crop([0], [len(PROMPT) - 1])
        return probabilities_by(logits, sampling)[0].double()

    model.crop([0], [len(PROMPT) - 1])
    first = after(PROMPT[-1:])
    for one in first.nonzero()[:, 0].tolist():
        second = after([PROMPT[-1], one])
        for two in second.nonzero()[:, 0].tolist():
            joint[one, two] = first[one] * second[two] * after([PROMPT[-1], one, two])

    def change(weight: torch.Tensor) -> None:
        weight.add_(0.4 * weight.std() * torch.randn(weight.shape, generator=noise))

    draft = small(hot=True, change=change, tokens=tokens)
    chosen = method("cumulative", threshold=0.25)
    decoder = Decoder(small(), draft=draft, method=chosen, guard=False)
    torch.manual_seed(3)
    asked = {
        "max_new_tokens": 3,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "ignore_eos": True,
    }
    found = [decoder.generate(PROMPT, **asked) for _ in range(600)]
    assert p_value([each.tokens for each in found], joint) > 1e-4
    drafts = [(step.drafted, step.accepted) for each in found for step in each.steps]
    assert {(1, 0), (1, 1), (2, 1), (2, 2)} <= set(drafts)


def test_logits_that_are_not_numbers_end_a_sampled_draft() -> None:
    model = small(hot=True, change=lambda weight: weight[3].fill_(torch.nan))
    how = ChainSampling(SamplingDistribution(), torch.zeros(3, dtype=torch.float64))
    tokens, probs, _ = at_once(begun(model), most=3, how=how)
    assert tokens == [] and probs is not None and len(probs) == 0


def test_a_sampler_has_a_distribution_or_none() -> None:
    warm = TemperatureLogitsWarper(0.5)
    best = TopPLogitsWarper(0.9)
    few = TopKLogitsWarper(3)

    def of(*processors: Any, greedy: bool = False) -> SamplingDistribution | None:
        return Sampler(greedy, LogitsProcessorList(processors) if processors else None).distribution

    assert [of(), of(warm)] == [SamplingDistribution(), SamplingDistribution(0.5)]
    assert [of(best), of(warm, best)] == [
        SamplingDistribution(1.0, 0.9),
        SamplingDistribution(0.5, 0.9),
    ]
    assert (
        of(best, warm)
        is of(few)
        is of(warm, few)
        is of(warm, greedy=True)
        is of(greedy=True)
        is None
    )


def test_numbers_that_are_not_needed_are_still_to_come() -> None:
    """A caller's generator goes on where as many single tokens would have left it."""
    source = torch.Generator().manual_seed(6)
    draft = small()
    drafter = ChainDrafter(draft, FixedLength(4))
    begun(draft)
    sampler = Sampler(False)
    seq = EngineSequence(
        Request([*PROMPT, 7], 20, sampler, generator=source, eos=frozenset(range(0, 120, 10))), 0
    )
    chain = Chain(seq, 9)
    assert drafter._at_once(chain, Within(Bounds(9))) is not None
    assert 0 < len(chain.tokens) < 9 and len(chain.q) == len(chain.tokens)
    other = torch.Generator().manual_seed(6)
    for _ in chain.tokens:
        torch.rand((), dtype=torch.float64, generator=other)
    assert torch.equal(source.get_state(), other.get_state())
