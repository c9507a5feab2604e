"""What forwards cost: measured once, kept or shipped.

And methods for greedy decoding and for sampling.
"""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.api.choose import shipped
from forerun.api.load import Decoder
from forerun.backends.costs import long_context, measure_costs
from forerun.backends.heads import HiddenLM
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.draft import Draft
from forerun.engine.sequence import Request, Sequence
from forerun.engine.stats import summarise
from forerun.methods import AR, SD, Hybrid, Parts, Suffix
from forerun.planning.cost_model import Costs, convex, costs_of, smooth
from forerun.planning.forecast import StepSituation, forecast
from forerun.planning.source_chooser import SourceChooser
from forerun.planning.stop_rules import BestLength
from forerun.planning.tree_plan import TreePlanner
from tests.support.toys import (
    TableLM,
    decode,
    noisy_copy,
    parts_of,
    random_table,
    refuses,
    tiny,
    tiny_tokenizer,
)

COSTS = Costs(target={1: 10.0, 2: 10.0, 4: 12.0, 8: 20.0}, draft={1: 1.0, 2: 1.5})


def test_costs_are_measured_for_what_is_there() -> None:
    target, draft = (Decoder(tiny("llama", seed, context=64)).target for seed in (0, 1))
    before = torch.get_rng_state()
    both = measure_costs(target, draft)
    alone = measure_costs(target)
    # How often it samples depends on the clock. What a user samples next must not depend on it,
    # because every rank of a split target must sample the same.
    assert torch.equal(torch.get_rng_state(), before)
    assert (
        set(both.target) == set(both.draft) == {1, 2, 4, 8, 16, 32}
    )  # 64 tokens have room for 32 behind 32
    assert all(ms > 0 for ms in [*both.target.values(), *both.draft.values()])
    assert alone.draft == {} and set(alone.target) == set(both.target)
    refuses("context of 64 is full after 64 tokens", measure_costs, target, context=64)


def test_costs_of_layers_and_heads_are_measured_too() -> None:
    model, small = (tiny("llama", seed, context=64) for seed in (0, 1))
    target, draft = (Decoder(one).target for one in (model, small))
    layer = parts_of("pacer", model, small)["pre_verifier"]
    head = HiddenLM(parts_of("eagle", model, None)["head"], target)
    costs = measure_costs(target, draft, layer=layer, head=head)
    assert costs.policy > 0 and costs.read_prob_ms > 0
    assert costs.head and all(ms > 0 for ms in costs.head.values())
    alone = measure_costs(target, draft)
    assert not alone.head and alone.policy == 0


def test_costs_are_measured_once_and_for_methods_that_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    measure = Mock(return_value=COSTS)
    monkeypatch.setattr("forerun.api.build.measure_costs", measure)
    model = tiny("llama")
    seen: list[Any] = []

    class Asking(AR):
        needs_costs = True

        def build(self, parts: Any) -> Any:
            seen.append(parts.costs)
            return super().build(parts)

    for method, expected in ((AR(), 0), (Asking(), 1)):
        decoder = Decoder(model, method=method)
        for _ in range(2):
            decoder.generate([1, 2, 3], max_new_tokens=2)
        assert measure.call_count == expected
    assert seen == [COSTS]  # one drafter for both calls
    Decoder(model, method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 1 and seen == [COSTS, COSTS]  # kept in a file
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(file.read_text()[:-9])
    Decoder(model, method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 2 and costs_of(json.loads(file.read_text())) == COSTS
    Decoder(tiny("llama", 1), method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 3  # of another model


def test_a_method_with_a_second_source_asks_for_costs_whatever_its_threshold() -> None:
    """Because the threshold says nothing about batches."""
    for chosen in (Hybrid(other="sd:gamma=2"), Hybrid(threshold=3.0, other="sd:gamma=2")):
        assert chosen.needs_costs
    assert not Hybrid(threshold=3.0).needs_costs and not Suffix().needs_costs


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"target": {}}, "with entries for the target"),
        ({"target": {"1": 0}}, "target must be above 0"),
        ({"draft": {"1": "x"}}, "could not convert"),
        ({"draft": {"1": float("inf")}}, "numbers of tokens to milliseconds"),
    ],
)
def test_costs_that_are_none_are_refused(change: dict[str, Any], why: str) -> None:
    refuses(why, costs_of, {"target": {"1": 2.0}, "draft": {}, "head": {}} | change)


@given(st.dictionaries(st.integers(1, 40), st.floats(0.1, 99.0), min_size=1, max_size=7))
def test_a_table_is_made_convex_from_below(table: dict[int, float]) -> None:
    """The convex table is as large as it may be.

    Where its slope changes, it equals the entry of that forward or of a longer one.
    """
    hull = convex(table)
    at = sorted(table)
    assert list(hull) == list(table) and all(hull[n] <= table[n] + 1e-9 for n in at)
    slopes = [(hull[n] - hull[m]) / (n - m) for m, n in pairwise(at)]
    assert all(-1e-9 <= before <= after + 1e-6 for before, after in pairwise([0.0, *slopes]))
    corners = [
        n
        for n, before, after in zip(at[1:-1], slopes, slopes[1:], strict=False)
        if after > before + 1e-3
    ]
    for n in [at[0], *corners, at[-1]]:
        assert hull[n] == pytest.approx(min(table[m] for m in at if m >= n))
    assert convex({1: 50.0, 2: 55.0, 4: 77.0, 8: 82.0, 16: 127.0})[4] == pytest.approx(
        50 + 3 * 32 / 7
    )


def test_greedy_decoding_and_sampling_have_methods_of_their_own() -> None:
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()))
    decoder = Decoder(target, None, noisy_copy(target, 0.02), Suffix(2.0), False, SD(2))
    assert decoder.method_for(greedy=True) == Suffix(2.0) and decoder.method_for(
        greedy=False
    ) == SD(2)
    greedy = decoder.generate([5, 6, 7], max_new_tokens=12)
    drawn = decoder.generate([5, 6, 7], max_new_tokens=12, temperature=1.0, seed=1)
    assert greedy.stats.draft_forwards == 0 and drawn.stats.draft_forwards > 0
    assert max(each.drafted for each in drawn.steps) == 2
    refuses(
        "method 'sd' needs a draft model",
        Decoder,
        decoder.target,
        method=AR(),
        sampling_method=SD(2),
    )


def test_the_embedded_pair_has_costs_of_its_own() -> None:
    costs = costs_of(shipped("embedded", None)["costs"])
    assert 0 < costs.draft[1] < costs.target[1]
    assert costs.verify(1) <= costs.verify(8) <= costs.verify(32)


# Costs by context.

NEAR = {1: 10.0, 2: 10.5, 4: 12.0, 8: 16.0}
FAR = Costs(
    {1: 18.0, 2: 22.5, 4: 32.0, 8: 52.0},
    {1: 3.0},
    context=8192 + 256,
    chained=2.5,
    chained_sampled=2.8,
    verify_sample_ms=0.1,
)
BY_CONTEXT = Costs(
    NEAR, {1: 1.0}, context=256, chained=0.5, chained_sampled=0.8, verify_sample_ms=0.1, far=FAR
)


def test_costs_between_two_contexts_are_on_a_line_and_go_on_with_it() -> None:
    assert BY_CONTEXT.at(0).target == BY_CONTEXT.at(256).target == NEAR
    assert BY_CONTEXT.at(8192 + 256).target == pytest.approx(FAR.target)
    half = BY_CONTEXT.at(4096 + 256)
    beyond = BY_CONTEXT.at(16_384 + 256)
    assert half.target == pytest.approx({1: 14.0, 2: 16.5, 4: 22.0, 8: 34.0})
    assert beyond.verify(8) == pytest.approx(16 + 2 * 36) and beyond.drafting(1) == pytest.approx(
        4.5
    )
    assert (
        half.draft == {1: 2.0}
        and half.chained == 1.5
        and half.chained_sampled == pytest.approx(1.8)
    )
    assert half.far is None and half.context == 4096 + 256 and half.at(9999) is half
    assert BY_CONTEXT.at(4096 + 300) is half  # the same table for all contexts near it
    assert COSTS.at(9999) is COSTS  # nothing is known of long texts


def test_further_tokens_may_cost_less_with_experts() -> None:
    """Those that they choose are read already. A convex table would lie far below."""
    table = {1: 10.0, 2: 17.0, 4: 28.0, 8: 45.0, 32: 44.0}
    assert smooth(table, True) == {1: 10.0, 2: 17.0, 4: 28.0, 8: 44.0, 32: 44.0}
    assert smooth(table, False) == convex(table) and convex(table)[4] < 14
    far = Costs({n: 2 * ms for n, ms in table.items()}, {}, context=2048)
    costs = Costs(table, {}, context=256, far=far, has_experts=True)
    assert costs.at(1024).verify(4) > 28 and costs_of(asdict(costs)).has_experts


def test_a_rows_context_counts_for_the_row_alone() -> None:
    """The context's cost of two rows is twice that of one row.

    It is not that of two tokens of one row.
    """
    two = BY_CONTEXT.at(4096 + 256, 2)
    assert two.verify(2) == pytest.approx(10.5 + 2 * 4) and two.verify(4) == pytest.approx(
        12 + 2 * 6
    )
    assert two.drafting(2) == pytest.approx(1 + 2) and two.drafting(1) == 1.5  # fused
    many = BY_CONTEXT.at(4096 + 256, 100)
    assert many.verify(100) == pytest.approx(BY_CONTEXT.verify(100) + 100 * 4)
    assert many.verify(200) == pytest.approx(BY_CONTEXT.verify(200) + 100 * 6)


def test_sampling_adds_the_same_at_any_context() -> None:
    far = BY_CONTEXT.sampled.at(8192 + 256)
    assert far.verify(2) == pytest.approx(22.5 + 0.2) and far.drafting(1) == pytest.approx(2.8)


@given(st.integers(0, 40_000), st.integers(1, 9), st.floats(0.5, 2.0))
def test_a_long_table_that_noise_made_cheaper_makes_nothing_so(
    context: int, rows: int, share: float
) -> None:
    costs = Costs(
        NEAR,
        {},
        context=256,
        far=Costs({n: ms * share for n, ms in NEAR.items()}, {}, context=8192),
    )
    long = costs.at(context, rows)
    assert all(long.verify(n) >= costs.verify(n) - 1e-6 for n in range(rows, 40))
    table = long.target
    slopes = [(table[n] - table[m]) / (n - m) for m, n in pairwise(sorted(table))]
    assert all(before <= after + 1e-6 for before, after in pairwise([0.0, *slopes]))


def test_costs_by_context_are_kept_and_damaged_ones_refused() -> None:
    facts = json.loads(json.dumps(asdict(BY_CONTEXT)))
    assert costs_of(facts) == BY_CONTEXT and costs_of(facts).far == FAR
    earlier = dict(facts)
    earlier["judging"] = earlier.pop("verify_sample_ms")
    assert costs_of(earlier) == BY_CONTEXT
    refuses("must be more than 9000", costs_of, facts | {"context": 9000})
    refuses(
        "target must be above 0", costs_of, facts | {"far": facts["far"] | {"target": {"1": 0}}}
    )


def test_forwards_are_measured_at_two_contexts() -> None:
    target, draft = (Decoder(tiny("llama", seed, context=2048)).target for seed in (0, 1))
    costs = measure_costs(target, draft)
    assert (
        costs.context == 256
        and costs.far is not None
        and costs.far.context == long_context(target, draft) == 1024
    )
    assert (
        set(costs.far.target) == set(costs.far.draft) == {1, 2, 4, 8, 16} and costs.far.far is None
    )
    assert costs.far.verify_sample_ms == costs.verify_sample_ms
    assert costs.at(1024).verify(1) >= costs.verify(1)
    assert (
        measure_costs(Decoder(tiny("llama", context=64)).target).far is None
    )  # one length is all there is


def sequence(count: int) -> Sequence:
    return Sequence(Request([1] * count, 99), context=10**6)


STEEP = Costs(
    {1: 10.0, 16: 11.0},
    {1: 1.0},
    context=256,
    far=Costs({1: 20.0, 16: 300.0}, {1: 1.0}, context=8192),
)


def test_long_texts_shorten_drafts() -> None:
    """A rule that takes the costs of a short text would draft as much."""
    short, long = ([sequence(count)] for count in (100, 8192))
    rule = BestLength(STEEP)
    assert [rule.begin(seqs, 1).bounds().max_tokens for seqs in (short, long)] == [4, 1]
    chains = ChainDrafter(Mock(vocab_size=9, context=None), rule, costs=STEEP)
    for unread, remaining in ((False, 0), (True, 99)):
        near, far = (
            StepSituation(1, n, unread=unread * n, remaining=remaining) for n in (100, 8192)
        )
        assert forecast(chains, near).pays and not forecast(chains, far).pays
    suffixes = SuffixDrafter(Suffix(), costs=STEEP)
    assert suffixes._least(True, 1, 8192) > 2 * suffixes._least(True, 1, 256)
    chooser = SourceChooser(STEEP, "draft")
    found = Draft.chain(1, [2, 3, 4])
    near, far = (chooser.savings(StepSituation(1, n), found, 2.5) for n in (100, 8192))
    assert near.suffix > 0 > far.suffix
    near_ms, far_ms = (chooser.step_ms(StepSituation(2, n), 3) for n in (0, 8192))
    assert far_ms > 5 * near_ms


def test_long_texts_shorten_trees() -> None:
    curves = [(0.0, 1.0, 0.7)] * 9
    costs = replace(STEEP, head={1: 0.1, 8: 0.2})
    planner = TreePlanner(Mock(curves=curves), costs, block=3, nodes=8)
    near, far = (planner.forecast(StepSituation(1, context)) for context in (256, 8192))
    assert near.pays and not far.pays
    short, long = (planner.plan([sequence(count)], [4], [0], [0]) for count in (100, 8192))
    survival = [[0.7, 0.5, 0.3]]
    assert short.groups[0].rate(survival)[1] == 3 and long.groups[0].rate(survival)[1] == 0


class NothingKept(TableLM):
    prompts = Mock(known=Mock(return_value=0))


def test_hybrid_drafts_less_after_a_long_text_where_costs_say_so() -> None:
    """Where they do not, it drafts as much. The statistics have the mean length of drafts."""
    near = Costs({1: 10.0, 16: 11.0}, {1: 1.0}, context=256)
    far = Costs({1: 20.0, 2: 22.0, 16: 190.0}, {1: 1.0}, context=8192)
    table = random_table(24, 5)
    draft = table + 0.3 * random_table(24, 6)
    text = torch.randint(24, (8192,), generator=torch.Generator().manual_seed(0)).tolist()

    def mean_drafted(costs: Costs, length: int) -> float:
        parts = Parts(TableLM(table), NothingKept(draft), costs=costs)
        drafter = Hybrid(other="sd").build(parts)
        (steps,) = decode(TableLM(table), drafter, [Request(text[-length:], 80)])
        stats = summarise(steps, 1.0)
        assert stats.as_dict()["mean_drafted"] == round(stats.drafted / len(steps), 4)
        return stats.mean_drafted

    by_length = replace(near, far=far)
    short, long = (mean_drafted(by_length, length) for length in (512, 8192))
    assert 0.3 < long < 0.6 * short
    assert mean_drafted(near, 8192) > 0.8 * mean_drafted(near, 512)
