"""The table of costs follows what steps take, and a slow step or a busy machine changes little."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

import pytest
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from forerun import Decoder
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.engine.draft import Draft
from forerun.engine.engine import Step
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Proposal
from forerun.methods import SD
from forerun.model.causal_lm import CausalLM
from forerun.planning.corrected_costs import (
    FORGETTING,
    RECENT,
    WRONG_AFTER,
    CorrectedCosts,
    StepTime,
)
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import StepSituation
from forerun.planning.guard import Guard, GuardedDrafter
from forerun.planning.length import LengthChooser
from forerun.planning.source_chooser import SourceChooser
from forerun.planning.stop_rules import BestLength, FixedLength
from forerun.planning.tree_plan import TreePlanner
from forerun.sampling.sampler import Constraint, Sampler
from tests.planning.test_guard import TARGET, Clock, Ticking
from tests.planning.test_mutants import tree_head
from tests.support.toys import TableLM, decode, noisy_copy, random_table, tiny, tokens_of

COSTS = Costs(
    {1: 10.0, 2: 11.0, 4: 13.0, 8: 18.0, 16: 30.0},
    {1: 1.0, 2: 1.5},
    chained=0.8,
    head={1: 0.5, 4: 1.0},
    context=256,
    far=Costs({1: 20.0, 8: 40.0}, {1: 3.0}, context=8192),
)
PLAIN = StepTime(1, 300.0, True, 0, 0, False, 0.0, nodes=1, target_ms=10.0)
# Eight nodes after seven tokens of fused drafts.
DRAFTED = StepTime(1, 300.0, True, 7, 1, False, 5.6, nodes=8, target_ms=18.0)
ONE_ROW = StepSituation(1, 256)


def after(steps: list[StepTime], times: int = 300) -> CorrectedCosts:
    """Return costs after so many rounds of these steps."""
    costs = CorrectedCosts(COSTS)
    for _ in range(times):
        for step in steps:
            costs.observe(step)
    return costs


def relative(costs: Costs) -> float:
    """Return the cost of a drafted token relative to a plain forward."""
    return costs.drafting(1) / costs.verify(1)


def test_steps_as_long_as_the_table_says_change_nothing() -> None:
    assert after([PLAIN, DRAFTED]).table is COSTS


def test_a_dear_draft_is_found_out_and_drafts_become_shorter() -> None:
    costs = after([PLAIN, replace(DRAFTED, draft_ms=3 * DRAFTED.draft_ms)])
    assert relative(costs.table) == pytest.approx(3 * relative(COSTS), rel=0.1)
    far = costs.table.far
    assert far is not None and far.drafting(1) / far.verify(1) > 0.3  # from 0.15
    assert LengthChooser(costs).length(ONE_ROW) < LengthChooser(COSTS).length(ONE_ROW)
    # It is the same with a chooser that has answered before the table changed.
    early = CorrectedCosts(COSTS)
    chooser = LengthChooser(early)
    lengths = [chooser.length(ONE_ROW)]
    for _ in range(300):
        early.observe(PLAIN)
        early.observe(replace(DRAFTED, draft_ms=3 * DRAFTED.draft_ms))
        lengths.append(chooser.length(ONE_ROW))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_every_planner_asks_for_the_present_table() -> None:
    costs = CorrectedCosts(replace(COSTS, target={1: 10.0, 8: 12.0}))
    chooser = SourceChooser(costs, "draft")
    trees = TreePlanner(tree_head(), costs, block=3, nodes=8)
    none = Draft.root(0)
    assert chooser.choose(ONE_ROW, none, 0.0).asks_other and trees.forecast(ONE_ROW).pays
    dear = replace(DRAFTED, draft_ms=500.0)
    for _ in range(400):
        for step in (PLAIN, dear, replace(dear, by_head=True)):
            costs.observe(step)
    assert not chooser.choose(ONE_ROW, none, 0.0).asks_other
    assert not trees.forecast(ONE_ROW).pays


def test_one_slow_step_changes_next_to_nothing() -> None:
    costs = after([PLAIN, DRAFTED], 50)
    costs.observe(replace(DRAFTED, draft_ms=5000.0, target_ms=18_000.0))
    costs.observe(replace(PLAIN, target_ms=9000.0))
    assert costs.table is COSTS


def test_a_busy_machine_changes_no_choice() -> None:
    """All parts take three times as long. Absolute times do not matter, relative ones do."""
    busy = [replace(PLAIN, target_ms=30.0), replace(DRAFTED, draft_ms=16.8, target_ms=54.0)]
    costs = CorrectedCosts(COSTS)
    for _ in range(300):
        for step in busy:
            costs.observe(step)
        table = costs.table
        assert relative(table) == pytest.approx(relative(COSTS), rel=0.15)
        ratio = table.verify(8) / table.verify(1)
        assert ratio == pytest.approx(1.8, rel=0.15)


@pytest.mark.parametrize("factor", [8.0, 1 / 8])
def test_a_table_that_is_far_off_is_corrected_within_a_few_steps(factor: float) -> None:
    """Because each step by such a table costs time. Steps that are a little off are averaged."""
    wrong = replace(DRAFTED, draft_ms=factor * DRAFTED.draft_ms)
    few = after([PLAIN, wrong], WRONG_AFTER - 1)
    assert relative(few.table) == pytest.approx(relative(COSTS), rel=0.1)
    soon = after([PLAIN, wrong], 2 * WRONG_AFTER)
    assert relative(soon.table) / relative(COSTS) == pytest.approx(factor, rel=0.5)
    assert soon.table.verify(1) == pytest.approx(10.0, rel=0.1)
    little = after([PLAIN, replace(DRAFTED, draft_ms=1.3 * DRAFTED.draft_ms)], 2 * WRONG_AFTER)
    assert relative(little.table) == pytest.approx(relative(COSTS), rel=0.1)


@pytest.mark.parametrize("factor", [8.0, 1 / 8])
def test_a_part_is_not_found_wrong_while_nothing_else_is_observed(factor: float) -> None:
    """The machine may have become busy after the last step that drafted, or idle again."""
    costs = after([PLAIN, DRAFTED], 50)
    for _ in range(3 * WRONG_AFTER):
        costs.observe(replace(PLAIN, target_ms=factor * PLAIN.target_ms))
    assert relative(costs.table) == pytest.approx(relative(COSTS), rel=0.3)


def test_what_looked_dear_in_a_slow_phase_looks_as_cheap_as_before_later() -> None:
    """Though no step drafts any more, because drafts look dear."""
    slow = replace(DRAFTED, draft_ms=8 * DRAFTED.draft_ms, target_ms=4 * DRAFTED.target_ms)
    costs = after([PLAIN, slow], 20)
    assert relative(costs.table) > 4 * relative(COSTS)
    assert LengthChooser(costs).length(ONE_ROW) < LengthChooser(COSTS).length(ONE_ROW)
    for _ in range(4 * FORGETTING):
        costs.observe(PLAIN)
    assert relative(costs.table) == pytest.approx(relative(COSTS), rel=0.1)
    assert costs.table.verify(8) / costs.table.verify(1) == pytest.approx(1.8, rel=0.1)
    assert LengthChooser(costs).length(ONE_ROW) == LengthChooser(COSTS).length(ONE_ROW)


def test_what_is_cheaper_than_the_table_says_is_not_forgotten() -> None:
    costs = after([PLAIN, replace(DRAFTED, draft_ms=DRAFTED.draft_ms / 3)])
    before = relative(costs.table)
    for _ in range(4 * FORGETTING):
        costs.observe(PLAIN)
    assert before < 0.5 * relative(COSTS)
    assert relative(costs.table) == pytest.approx(before, rel=0.1)


def test_an_old_observation_proves_nothing_about_the_present_load() -> None:
    """The draft model was as fast as expected, but long before the machine became busy."""
    costs = after([PLAIN, DRAFTED], 50)
    by_suffixes = replace(DRAFTED, forwards=0, forward_rows=0, target_ms=8 * DRAFTED.target_ms)
    costs.observe(replace(DRAFTED, target_ms=8 * DRAFTED.target_ms))
    for _ in range(2 * RECENT):
        costs.observe(PLAIN)
    for _ in range(WRONG_AFTER - 1):
        costs.observe(replace(PLAIN, target_ms=8 * PLAIN.target_ms))
        costs.observe(by_suffixes)
    assert costs.table.verify(8) / costs.table.verify(1) == pytest.approx(1.8, rel=0.2)


def test_each_size_of_a_forward_has_its_factor_and_untried_ones_that_of_the_nearest() -> None:
    costs = after([PLAIN, replace(DRAFTED, target_ms=36.0)])
    table = costs.table
    assert table.verify(8) / table.verify(1) == pytest.approx(3.6, rel=0.1)
    assert table.verify(16) / table.verify(8) == pytest.approx(30 / 18)
    assert table.verify(2) / table.verify(1) == pytest.approx(1.1)
    assert LengthChooser(costs).length(ONE_ROW) < LengthChooser(COSTS).length(ONE_ROW)


def test_what_is_not_known_corrects_nothing() -> None:
    """Steps of both modes, drafts of unknown rows, and clocks that stand still or run back."""
    strange = [
        replace(DRAFTED, greedy=None, target_ms=99.0, draft_ms=99.0),
        replace(DRAFTED, forward_rows=0, draft_ms=99.0),
        replace(DRAFTED, draft_ms=0.0, target_ms=-1.0),
        PLAIN,
    ]
    assert after(strange).table is COSTS


def test_parts_that_ran_together_have_no_time_of_their_own() -> None:
    one = Proposal([], 3, forward_rows=2, by_head=True)
    silent = Proposal([])
    assert Proposal.together([], [silent, one]).forward_rows == 2
    assert Proposal.together([], [silent, one]).by_head
    both = Proposal.together([], [one, Proposal([], 1, forward_rows=1)])
    assert both.forwards == 4 and both.forward_rows == 0 and not both.by_head


@pytest.mark.parametrize(("lengths", "rows"), [((8, 8), 2), ((8, 3), 0)])
def test_forwards_of_several_sizes_correct_nothing(lengths: tuple[int, int], rows: int) -> None:
    """The second chain ends early if little of its sequence remains."""
    drafter = ChainDrafter(CausalLM(tiny("llama")), FixedLength(4))
    seqs = [Sequence(Request([1, 2, 3], length), id) for id, length in enumerate(lengths)]
    for seq in seqs:
        for _ in drafter.admit(seq, None, 64):
            pass
    proposal = drafter.propose(seqs)
    assert proposal.forwards == 4 and proposal.forward_rows == rows


class Anything(Constraint):
    """A constraint that forbids nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    def fitting(self, tokens: abc.Sequence[int], chain: abc.Sequence[int]) -> int:
        return len(chain)


def guarded_steps(
    draft_seconds: float, processor: LogitsProcessor | None = None
) -> tuple[list[Step], CorrectedCosts]:
    """Decode with a draft that often agrees, and a table in which it costs next to nothing."""
    clock = Clock()
    costs = CorrectedCosts(Costs({1: 1000.0, 64: 1000.0}, {1: 20.0}))
    draft = Ticking(TARGET + 0.5 * random_table(8, 6), clock, draft_seconds)
    drafter = ChainDrafter(draft, BestLength(costs), costs=costs)
    guarded = GuardedDrafter(drafter, Guard(clock), None, costs)
    processors = LogitsProcessorList([processor]) if processor is not None else None
    request = Request([0], 900, Sampler(True, processors))
    (steps,) = decode(Ticking(TARGET, clock, 1.0), guarded, [request])
    return steps, costs


def test_a_guarded_engine_corrects_its_table_and_lengths_but_no_token() -> None:
    cheap, unchanged = guarded_steps(0.02)
    dear, costs = guarded_steps(0.2)
    assert unchanged.table is unchanged.measured
    assert relative(costs.table) > 2 * relative(costs.measured)
    assert max(step.drafted for step in dear[-20:]) < max(step.drafted for step in cheap[-20:])
    (plain,) = decode(TableLM(TARGET), PlainDrafter(), [Request([0], 900)])
    assert tokens_of(dear) == tokens_of(cheap) == tokens_of(plain)


def test_steps_with_constraints_correct_nothing() -> None:
    """Because such a step may also wait until it is known what they allow."""
    steps, costs = guarded_steps(0.2, Anything())
    assert sum(step.drafted for step in steps) > 100
    assert costs.table is costs.measured


def test_nothing_is_corrected_without_a_guard() -> None:
    """Because that reads no clock. With one, what was learnt outlives the engine."""
    target = tiny("llama")
    costs = Costs({1: 1.0, 8: 1.1}, {1: 0.1})
    for guard in (False, None):
        decoder = Decoder(target, None, noisy_copy(target, 0.02), SD(), guard, costs=costs)
        decoder.generate([3, 4, 5], max_new_tokens=6)
        state = decoder._state
        assert (state.corrected is None) == (guard is False)
        before = state.corrected
        decoder.close()
        decoder.generate([3, 4, 5], max_new_tokens=6)
        assert state.corrected is before
