"""NaN stays where it arose: no neighbour, no later request and no stored prefix reads it."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process as hf

from forerun import Decoder
from forerun.backends import prepare
from forerun.backends.heads import HiddenLM
from forerun.backends.stored import store
from forerun.drafters.plain import PlainDrafter
from forerun.engine.acceptance import accept, accept_greedy
from forerun.engine.draft import Draft
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Proposal
from forerun.failures import NotNumbersError
from forerun.methods import METHODS, method
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache
from forerun.sampling.probabilities import best_of
from forerun.sampling.sampler import Sampler
from tests.support import families
from tests.support.caches import Pair
from tests.support.failures import interrupt_once
from tests.support.toys import (
    METHOD_SETTINGS,
    drain,
    join_all,
    noisy_copy,
    parts_of,
    random_head,
    refuses,
    tiny,
    tokens_of,
)

POISON = 62  # a token whose embedding is NaN
BAD = [5, 6, POISON, *range(7, 40)]
GOOD = [[5, 6, 7, 5, 6], [9], list(range(2, 42)), [11, 12, 11, 12, 11], list(range(30, 3, -1))]
NEXT = [[6, 5, 8], [4, 4, 9, 4], [31, 7, 12, 9, 31, 7]]  # shorter than what was bad
SAMPLED = Sampler(
    False, LogitsProcessorList([hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.9)])
)
ALONE = "not numbers"


def poisoned(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return model


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return poisoned(tiny("llama")), poisoned(noisy_copy(tiny("llama"), 0.03))


FORMS: dict[str, Callable[[], CausalLM]] = {
    "transformers": lambda: CausalLM(models()[0]),
    "float32 in C": lambda: prepare(poisoned(families.tiny("llama"))),
    "few bits": lambda: prepare(store(poisoned(families.tiny("llama")), "bfloat16")),
}


@pytest.fixture(scope="module", params=FORMS)
def target(request: pytest.FixtureRequest) -> CausalLM:
    return FORMS[request.param]()


def engine_of(target: CausalLM, prefix_bytes: int = 0, **options: Any) -> Engine:
    return Engine(target.fresh(prefix_bytes), PlainDrafter(), **options)


def outputs(engine: Engine, prompts: abc.Sequence[abc.Sequence[int]]) -> list[list[int]]:
    ids = [engine.add(Request(prompt, 12)) for prompt in prompts]
    steps = drain(engine)
    assert all(steps[id][-1].finish_reason == "length" for id in ids)
    return [tokens_of(steps[id]) for id in ids]


def solo(target: CausalLM, prompts: abc.Sequence[abc.Sequence[int]]) -> list[list[int]]:
    return [outputs(engine_of(target), [prompt])[0] for prompt in prompts]


def assert_clean(*caches: KVCache) -> None:
    """No buffer holds anything that is no number, used or not."""
    for layer in (layer for each in caches for layer in each.layers):
        assert layer.keys.isfinite().all() and layer.values.isfinite().all()


def assert_target_clean(engine: Engine) -> None:
    assert_clean(engine.target.cache, engine.target.prompts.cache)


def spoil(engine: Engine, id: int) -> None:
    held = engine.target.cache
    with torch.inference_mode():
        for layer in held.layers:
            layer.values[held.row(id), :, : held.length(id)] = torch.nan


class Fixed(PlainDrafter):
    extra_nodes = 8

    def __init__(self, first: int, tokens: list[int]) -> None:
        self.first, self.tokens = first, tokens

    def propose(self, seqs: abc.Sequence[Sequence]) -> Proposal:
        counts = [seq.remaining - 1 if seq.tokens[0] == self.first else 0 for seq in seqs]
        texts = [self.tokens[:count] for count in counts]
        return Proposal(
            [Draft.chain(seq.tokens[-1], text) for seq, text in zip(seqs, texts, strict=True)]
        )


# Requests.


def test_a_drafted_token_that_is_rejected_spoils_nothing(target: CausalLM) -> None:
    prompts = GOOD[:2]
    engine = Engine(target.fresh(), Fixed(GOOD[0][0], [3, POISON, 4]))
    assert outputs(engine, prompts) == solo(target, prompts)


@pytest.mark.parametrize("drafted", [[], [3, 4]])
def test_a_criterion_that_raises_ends_its_sequence_whatever_was_drafted(
    target: CausalLM, drafted: list[int]
) -> None:
    """Its error is the user's, also where it is the one that scores of NaN raise."""
    calls = []

    def raises(ids: torch.Tensor, scores: torch.Tensor) -> bool:
        calls.append(ids.shape[1])
        raise NotNumbersError("of a criterion")

    engine = Engine(target.fresh(), Fixed(GOOD[0][0], drafted))
    criteria = StoppingCriteriaList([raises])  # type: ignore[list-item]
    id = engine.add(Request(GOOD[0], 12, criteria=criteria))
    step = drain(engine)[id][-1]
    assert step.finish_reason == "error" and str(step.error) == "of a criterion"
    assert len(calls) == 1


def test_a_prompt_that_is_read_again_is_reported_once(target: CausalLM) -> None:
    engine = Engine(target.fresh(), Fixed(GOOD[0][0], [POISON, 4]))
    id = engine.add(Request(GOOD[0], 5, prompt_logprobs=True))
    steps = drain(engine)[id]
    assert tokens_of(steps) == solo(target, [GOOD[0]])[0][:5]
    reports = [step.prompt_logprobs for step in steps if step.prompt_logprobs is not None]
    assert [len(report) for report in reports] == [len(GOOD[0]) - 1]


@pytest.mark.parametrize("is_fast", [False, True])
def test_padding_spoils_no_neighbour(is_fast: bool) -> None:
    model = families.tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    target = prepare(model) if is_fast else CausalLM(model)
    prompts = GOOD[:3]
    wanted = solo(target, prompts)
    assert outputs(Engine(target.fresh(), Fixed(GOOD[0][0], [3, 4, 5])), prompts) == wanted


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(True, SAMPLED.processors), SAMPLED, Sampler(False)]
)
@pytest.mark.parametrize("seed", [None, 3])
def test_all_ways_to_choose_a_token_end_with_an_error(sampler: Sampler, seed: int | None) -> None:
    engine = engine_of(FORMS["transformers"]())
    for prompt in (BAD, [POISON, 3]):
        engine.add(Request(prompt, 12, sampler, seed=seed))
    for (step,) in drain(engine).values():
        assert (
            step.finish_reason == "error"
            and isinstance(step.error, ValueError)
            and ALONE in str(step.error)
        )
        assert not step.tokens


def test_a_token_that_is_chosen_needs_scores_that_are_numbers() -> None:
    """Those of nodes that are not reached do not count, nor do infinities: they have an order."""
    scores = torch.tensor([[0.0, 2.0, -torch.inf], [1.0, 0.0, torch.inf], [torch.nan, 3.0, 1.0]])
    tokens, highest = best_of([scores[:1], scores[1:]])
    assert tokens == [1, 2, 0] and highest[:2] == [2.0, torch.inf] and highest[2] != highest[2]
    for chosen in (scores, scores.bfloat16(), scores.double()):
        assert best_of([chosen])[0] == tokens
    verdict = accept_greedy(Draft.chain(0, [1, 1]), tokens, highest)
    assert (verdict.path, verdict.token) == ([0, 1], 2)
    refuses(ALONE, accept, Draft.chain(0, [1, 2]), scores, True, None)
    none = torch.full((1, 3), -torch.inf)  # as transformers has it
    assert accept(Draft.root(0), none, True, None).token == 0


@pytest.mark.parametrize("name", METHODS)
def test_neighbours_and_successors_are_what_they_are_alone(name: str) -> None:
    """By every method, whose draft or head is given what is no number as well."""
    good = [Request(prompt, 12) for prompt in GOOD]
    later = [Request(prompt, 12) for prompt in NEXT]
    wanted = [alone(name, request) for request in [*good, *later]]
    engine = decoder(name).engine
    ids = [engine.add(request) for request in good[:2]]
    bad = [engine.add(Request(BAD, 20)), engine.add(Request(BAD[:4], 20))]
    bad.append(engine.add(Request(BAD, 20, SAMPLED, seed=1)))
    ids += [engine.add(request) for request in good[2:]]
    steps = drain(engine)
    ids += [engine.add(request) for request in later]
    drain(engine, steps)
    assert [tokens_of(steps[id]) for id in ids] == wanted
    assert all(steps[id][-1].finish_reason == "error" for id in bad)
    assert_target_clean(engine)


def decoder(name: str) -> Decoder:
    target, draft = models()
    parts = parts_of(name, target, draft)
    if (head := parts["head"]) is not None:  # a draft with a bad token is bad for its own sequence
        spare = next(token for token in range(POISON) if token not in head.hot.tolist())
        head.hot[head.hot == POISON] = spare
    chosen = method(name, **METHOD_SETTINGS.get(name, {}))
    return Decoder(target, None, draft, chosen, False, prefix_bytes=100_000, **parts)


def alone(name: str, request: Request) -> list[int]:
    engine = decoder(name).engine
    id = engine.add(request)
    steps = drain(engine)[id]
    assert steps[-1].finish_reason == "length"
    return tokens_of(steps)


# Rows.


@pytest.mark.parametrize(("spoilt", "gone"), [(0, 0), (1, 1), (2, 2), (2, 0)])
def test_an_aborted_sequence_leaves_nothing(target: CausalLM, spoilt: int, gone: int) -> None:
    """Nor does one that moves to the row of another."""
    engine = engine_of(target, 10**6)
    ids = [engine.add(Request(prompt, 30)) for prompt in (GOOD[2], GOOD[4], GOOD[2][::-1])]
    engine.step()
    spoil(engine, ids[spoilt])
    engine.abort(ids[gone])
    engine.step()
    for id in ids:
        engine.abort(id)
    drain(engine)
    stored = [
        part
        for entry in engine.target.prompts.store._entries
        for layer in entry.stored
        for part in layer or ()
    ]
    assert stored and all(part.isfinite().all() for part in stored)
    assert outputs(engine, NEXT) == solo(target, NEXT)
    assert_target_clean(engine)


def test_all_that_was_written_is_looked_at() -> None:
    """NaN in rejected entries is never read.

    Rejected entries lie behind the committed ones, those of longer drafts behind those of shorter
    ones.
    """
    for spoilt in (0, 1):
        pair = Pair()
        for id in (0, 1):
            pair.add(id, 40)
        first = pair.forward({0: 9, 1: 9})
        for layer in pair.cache.layers:
            layer.values[spoilt, :, 7] = torch.inf
        pair.commit(first, [[0, 1]] * 2)
        pair.commit(pair.forward({0: 2, 1: 2}), [[0], [0]])
        pair.cache.crop_to([0, 1], [1, 1])
        pair.lists = {id: own[:1] for id, own in pair.lists.items()}
        pair.drop(0)
        pair.check()
        pair.drop(1)
        assert_clean(pair.cache)


# Prompts.


@pytest.mark.parametrize("prefix_bytes", [0, 10**6])
def test_a_prompt_leaves_nothing(target: CausalLM, prefix_bytes: int) -> None:
    """In a batch of 16 that it is to join, nor to prompts that come later."""
    prompts = [*NEXT, *([*GOOD[i % 5], 2 + i] for i in range(12))]
    engine = engine_of(target, prefix_bytes, max_rows=16)
    wanted = solo(target, prompts)
    ids = [engine.add(Request(prompt, 12)) for prompt in prompts[:7]]
    bad = engine.add(Request(BAD, 8))
    held = engine.add(Request(GOOD[2], 60))  # the engine stays busy, and keeps its prompt cache
    ids += [engine.add(Request(prompt, 12)) for prompt in prompts[7:]]
    steps = drain(engine)
    assert [tokens_of(steps[id]) for id in ids] == wanted
    assert [step.finish_reason for step in steps[bad]] == ["error"] and steps[held][
        -1
    ].finish_reason == "length"
    assert_target_clean(engine)
    if prefix_bytes:
        assert not any(POISON in entry.tokens for entry in engine.target.prompts.store._entries)


def test_a_prompt_that_begins_like_a_bad_one_is_run_anew(target: CausalLM) -> None:
    """What stands before a bad token in the same chunk is bad too."""
    logits = []
    for before in ([*NEXT[2], POISON, *GOOD[2]], []):
        lm = target.fresh(10**6)
        list(lm.prefill(before, 16))
        join_all(lm, {1: [*NEXT[2], 3]}, 16)
        logits.append(lm.extend([1], [[5, 6]])[0])
    torch.testing.assert_close(*logits)


def test_a_prompt_that_is_given_up_leaves_nothing() -> None:
    lm = FORMS["few bits"]().fresh(10**6)
    begun = lm.prefill(BAD, 16)
    next(begun)
    begun.close()
    join_all(lm, {1: NEXT[0]}, 16)
    assert lm.extend([1], [[5, 6]])[0].isfinite().all()


# A step that is undone.


@pytest.mark.parametrize("place", ["prefill", "join", "forward", "commit"])
def test_a_step_that_is_undone_leaves_nothing(target: CausalLM, place: str) -> None:
    engine = engine_of(target, chunk_seconds=1e-9)
    running = [engine.add(Request(prompt, 12)) for prompt in (GOOD[2], GOOD[4])]
    for _ in range(3):
        engine.step()
    for id in running:
        engine.abort(id)
    bad = engine.add(Request(BAD, 12))
    good = engine.add(Request(NEXT[2], 12))
    interrupt_once(engine.target, place, 0)
    steps: dict[int, list[Any]] = {}
    with pytest.raises(KeyboardInterrupt):
        drain(engine, steps)
    engine.abort(bad)
    assert_target_clean(engine)
    assert tokens_of(drain(engine, steps)[good]) == solo(target, [NEXT[2]])[0]
    assert outputs(engine, NEXT) == solo(target, NEXT)
    assert_target_clean(engine)


# Drafts and heads.


def test_a_draft_keeps_no_text_that_is_not_a_number() -> None:
    """The draft alone is broken, so the target's output is what it is without."""
    target = tiny("llama")
    draft = models()[1]
    made, fresh = (
        Decoder(target, None, draft, method("sd", gamma=3), False, prefix_bytes=size)
        for size in (10**6, 0)
    )
    plain = Decoder(target, method=method("ar"))
    model = made.engine.drafter.model  # type: ignore[attr-defined]
    for prompt in (BAD, NEXT[2]):
        completion = made.generate(prompt, max_new_tokens=12)
        assert completion.tokens == plain.generate(prompt, max_new_tokens=12).tokens
    assert not any(POISON in entry.tokens for entry in model.prompts.store._entries)
    assert_clean(model.cache, model.prompts.cache)
    assert (
        completion.stats.accepted == fresh.generate(NEXT[2], max_new_tokens=12).stats.accepted > 0
    )


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
@pytest.mark.parametrize("few", [False, True])
def test_a_head_leaves_nothing(kind: str, few: bool) -> None:
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, kind=kind), target, in_8_bits=few)
    features = torch.randn(40, head.width, generator=torch.Generator().manual_seed(0))
    spoilt = features.clone()
    spoilt[30] = torch.nan

    def run(id: int, count: int, given: torch.Tensor = features) -> None:
        list(head.prefill(id, given[:count], [3] * count, 16, 64))

    run(0, 9)
    wanted = head.extend([0], [features[:1]], [[3]])
    head.drop(0)
    run(1, 20)
    run(2, 40, spoilt)
    for gone, id in (
        (1, 3),
        (2, 4),
        (3, 5),
    ):  # the spoilt one moves, goes, and another comes where it stood
        head.drop(gone)
        run(id, 9)
        torch.testing.assert_close(head.extend([id], [features[:1]], [[3]]), wanted)
    assert_clean(head.cache)
