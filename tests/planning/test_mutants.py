"""Whether the planners' answers depend on all that they are asked about.

Each planner is checked by a few situations. Then the same check must fail for its mutants: planners
that never draft, always draft, or ignore a part of the situation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.drafters.hybrid import HybridPlanner
from forerun.drafters.plain import PlainDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.draft import Draft
from forerun.engine.sequence import Request, Sequence
from forerun.methods import Suffix
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import (
    UNKNOWN,
    Forecast,
    PlannedDrafter,
    Planner,
    PlannerByMode,
    StepSituation,
    forecast,
)
from forerun.planning.guard import FIRST_PLAIN_STEPS, Guard, GuardedDrafter
from forerun.planning.length import ChainPlanner, LengthChooser
from forerun.planning.source_chooser import PhraseChooser, SourceChooser
from forerun.planning.suffix_plan import SuffixPlanner
from forerun.planning.tree_plan import Calibrated, TreePlanner
from forerun.sampling.sampler import Sampler

# A forward of many tokens is dear, and dearer after a long text.
COSTS = Costs(
    {1: 10.0, 2: 11.0, 4: 14.0, 16: 120.0, 64: 600.0},
    {1: 1.0, 64: 40.0},
    head={1: 0.2, 64: 2.0},
    context=256,
    far=Costs({1: 20.0, 2: 60.0, 8: 400.0}, {1: 4.0}, head={1: 0.8}, context=8192),
)
NEAR = StepSituation(1, 256)
MANY = StepSituation(16, 256)
LONG = StepSituation(1, 8192)
LITTLE_LEFT = StepSituation(1, 256, unread=256, remaining=20)
MUCH_LEFT = replace(LITTLE_LEFT, remaining=2000)


class Chooser:
    """The other drafter's part of a source chooser, with what it saves, as a planner."""

    def __init__(self) -> None:
        self.chooser = SourceChooser(COSTS, "draft")

    def forecast(self, situation: StepSituation) -> Forecast:
        none = Draft.root(0)
        return self.chooser.forecast(situation, self.chooser.savings(situation, none, 0.0).other)


def tree_head() -> Calibrated:
    return SimpleNamespace(curves=[[0.0, 1.0, 0.7]] * 4)


def tree_planner() -> Planner:
    return TreePlanner(tree_head(), COSTS, block=3, nodes=8)


PLANNERS: dict[str, Callable[[], Planner]] = {
    "chain": lambda: ChainPlanner(COSTS),
    "tree": tree_planner,
    "chooser": Chooser,
    "modes": lambda: PlannerByMode(drafter_with(ChainPlanner(COSTS)), drafter_with(Fails())),
    "suffix": lambda: SuffixPlanner(COSTS, 0.3),
    "hybrid": lambda: HybridPlanner(drafter_with(Fails()), drafter_with(ChainPlanner(COSTS))),
}
READ_IN_NO_TIME = ("tree", "suffix")  # heads and suffixes read prompts in no time that counts


class Mutant:
    """A planner that is asked about a changed situation, or gives a changed answer."""

    def __init__(
        self,
        planner: Planner,
        asks: Callable[[StepSituation], StepSituation] = lambda situation: situation,
        answer: Forecast | None = None,
    ) -> None:
        self.planner = planner
        self.asks = asks
        self.answer = answer

    def forecast(self, situation: StepSituation) -> Forecast:
        return self.answer or self.planner.forecast(self.asks(situation))


class Fails:
    """The planner of drafts that never pay."""

    def forecast(self, situation: StepSituation) -> Forecast:
        return Forecast(-1.0)


MUTANTS: dict[str, dict[str, Any]] = {
    "never drafts": {"answer": Forecast(0.0)},
    "always drafts": {"answer": UNKNOWN},
    "ignores context": {"asks": lambda asked: replace(asked, context=256)},
    "ignores rows": {"asks": lambda asked: replace(asked, rows=1)},
    "ignores unread text": {"asks": lambda asked: replace(asked, unread=0)},
    "ignores what remains": {"asks": lambda asked: replace(asked, remaining=0)},
}


def drafter_with(planner: Planner) -> PlannedDrafter:
    drafter = PlannedDrafter()
    drafter.planner = planner
    return drafter


def check(planner: Planner, reads: bool) -> None:
    """Check a planner's answers. `reads`: whether its drafter takes time to read a text."""
    pays = {
        asked: planner.forecast(asked).pays for asked in (NEAR, MANY, LONG, LITTLE_LEFT, MUCH_LEFT)
    }
    assert pays == {NEAR: True, MANY: False, LONG: False, LITTLE_LEFT: not reads, MUCH_LEFT: True}


@pytest.mark.parametrize("name", PLANNERS)
def test_whether_drafts_pay_depends_on_all_of_the_situation(name: str) -> None:
    reads = name not in READ_IN_NO_TIME
    planner = PLANNERS[name]()
    check(planner, reads)
    for mutant, change in MUTANTS.items():
        if reads or mutant not in ("ignores unread text", "ignores what remains"):
            with pytest.raises(AssertionError):
                check(Mutant(planner, **change), reads)


def test_a_step_and_a_text_pay_if_they_do_for_their_own_mode() -> None:
    """So a greedy step does not pay by the drafter of sampled rows.

    A drafter that declares no planner is expected to pay.
    """
    pays = drafter_with(ChainPlanner(COSTS))
    fails = drafter_with(Fails())
    unknown = PlainDrafter()
    text = {greedy: replace(MUCH_LEFT, greedy=greedy) for greedy in (True, False)}
    for greedy, sampled in ((pays, fails), (fails, pays), (fails, fails), (fails, unknown)):
        planner = PlannerByMode(greedy, sampled)
        assert planner.forecast(NEAR).pays == (greedy is pays)
        assert planner.forecast(replace(NEAR, greedy=False)).pays == (sampled is not fails)
        assert planner.forecast(text[True]).pays == forecast(greedy, MUCH_LEFT).pays
        assert planner.forecast(text[False]).pays == forecast(sampled, MUCH_LEFT).pays
    assert forecast(unknown, MANY) is UNKNOWN


def test_a_row_of_two_drafters_pays_if_it_does_for_one_of_them() -> None:
    pays = drafter_with(SuffixPlanner(COSTS, 0.3))
    fails = drafter_with(Fails())
    for suffixes, other in ((pays, fails), (fails, pays), (fails, fails), (pays, pays)):
        planner = HybridPlanner(suffixes, other)
        assert planner.forecast(NEAR).pays == (pays in (suffixes, other))
        assert not planner.forecast(MANY).pays
    assert HybridPlanner(fails, PlainDrafter()).forecast(MANY) is UNKNOWN


# How much.


def test_the_length_of_a_chain_depends_on_all_of_the_situation() -> None:
    sampled = replace(NEAR, greedy=False)
    chooser = LengthChooser(replace(COSTS, verify_sample_ms=30.0))
    lengths = [chooser.length(asked) for asked in (NEAR, MANY, LONG, sampled)]
    assert lengths[0] > max(lengths[1:])


def test_phrases_are_tried_by_rows_and_context() -> None:
    """Forwards of five tokens instead of one: free in one row, dear in many or late in a text."""
    near = Costs({1: 1.0}, {1: 1.0, 5: 1.1, 64: 90.0}, context=256)
    far = Costs({1: 1.0}, {1: 1.0, 5: 50.0, 64: 500.0}, context=8192)
    chooser = PhraseChooser(replace(near, far=far), span=4, guesses=1)
    assert [chooser.tries_phrases(asked) for asked in (NEAR, MANY, LONG)] == [True, False, False]


# Who.


def test_who_drafts_depends_on_all_of_the_situation() -> None:
    """With a suffix draft of three tokens of which all are expected to come true."""
    suffix = Draft.chain(0, [1, 2, 3])

    def suffix_saves(asked: StepSituation) -> bool:
        return SourceChooser(COSTS, "draft").choose(asked, suffix, 3.0).takes_suffix

    assert suffix_saves(NEAR) and not suffix_saves(LONG)
    chooser = SourceChooser(COSTS, "draft")
    none = Draft.root(0)
    choices = {asked: chooser.choose(asked, none, 0.0) for asked in (NEAR, MANY, LITTLE_LEFT)}
    assert choices[NEAR].asks_other and choices[NEAR].wants_other
    assert not choices[MANY].asks_other and not choices[MANY].wants_other
    assert not choices[LITTLE_LEFT].asks_other and choices[LITTLE_LEFT].wants_other
    assert not choices[NEAR].takes_suffix  # there is none


def test_a_chooser_is_asked_about_a_row_as_it_is() -> None:
    """Its text, what of it is unread, and what is expected to come: as much as came, and 128."""
    chooser = SourceChooser(COSTS, "draft")
    seq = Sequence(Request([1] * 50, 999))
    seq.tokens += [2] * 10
    assert chooser.situation(seq, 3, 45) == StepSituation(3, 60, True, 15, 138)
    short = Sequence(Request([1] * 50, 7, Sampler(False)))
    assert chooser.situation(short, 1, 50) == StepSituation(1, 50, False, 0, 7)


# What a guarded drafter asks.


class Asked(PlannedDrafter, PlainDrafter):
    """Keeps the situations that it is asked about, and whose drafts it is asked for."""

    def __init__(self, pays: Callable[[StepSituation], bool]) -> None:
        self.situations: list[StepSituation] = []
        self.pays = pays
        self.planner = self
        self.called: list[list[int]] = []

    def forecast(self, situation: StepSituation) -> Forecast:
        self.situations.append(situation)
        return UNKNOWN if self.pays(situation) else Forecast(0.0)

    def propose(self, seqs: list[Sequence]) -> Any:
        self.called.append([seq.id for seq in seqs])
        return super().propose(seqs)


def guarded(drafter: Asked, rows: int) -> GuardedDrafter:
    """Return a guarded drafter whose guard has seen plain steps of so many rows."""
    guard = Guard(lambda: 0.0)
    for _ in range(FIRST_PLAIN_STEPS):
        guard.record(rows, rows, 1.0, drafted=False)
    return GuardedDrafter(drafter, guard, guard)


def test_a_guarded_drafter_asks_about_the_step_and_about_each_text_that_is_unread() -> None:
    drafter = Asked(lambda situation: not situation.unread)
    made = guarded(drafter, 2)
    long = Sequence(Request([1] * 40, 9), 0)
    short = Sequence(Request([1] * 10, 5, Sampler(False)), 1)
    long.rows, short.rows = 3, 4
    for seq in (long, short):
        list(made.admit(seq, None, 8))
    unread = [StepSituation(3, 40, True, 40, 9), StepSituation(4, 10, False, 10, 5)]
    assert drafter.situations == unread and made._inside == {0: False, 1: False}
    # The drafter is not called while the texts that it must read do not pay.
    drafter.situations.clear()
    made.propose([long, short])
    unread = [replace(asked, rows=2) for asked in unread]
    step = [StepSituation(2, 25, greedy) for greedy in (False, True)]
    assert drafter.situations == [*step, *unread] and not drafter.called
    # One pays now, and is judged by the step once it is read.
    drafter.pays = lambda situation: situation.unread != 10
    drafter.situations.clear()
    made.propose([long, short])
    assert drafter.called == [[0]] and made._inside == {0: True, 1: False}
    # Texts are not asked about in a step that does not pay, because that would take time.
    drafter.pays = lambda situation: bool(situation.unread)
    drafter.situations.clear()
    made.propose([long, short])
    assert drafter.called == [[0]] and drafter.situations == step


def test_a_step_that_drafters_share_is_asked_about_with_all_its_rows() -> None:
    drafter = Asked(lambda situation: situation.rows < 5)
    made = guarded(drafter, 1)
    seq = Sequence(Request([1] * 8, 9), 0)
    list(made.admit(seq, None, 8))
    made.propose([seq], 5)
    assert not drafter.called and drafter.situations[-1] == StepSituation(5, 8)
    made.propose([seq], 4)
    assert drafter.called == [[0]]


def test_a_step_of_both_modes_is_drafted_where_it_pays() -> None:
    """And it is judged: a loss of rows that are drafted is booked although others are not."""
    drafter = Asked(lambda situation: situation.greedy or bool(situation.unread))
    made = guarded(drafter, 2)
    seqs = [Sequence(Request([1] * 8, 9), 0), Sequence(Request([1] * 8, 9, Sampler(False)), 1)]
    for seq in seqs:
        list(made.admit(seq, None, 8))
        made._inside[seq.id] = True
    memo = made.propose(seqs).memo
    assert drafter.called == [[0]] and memo.judge is made.guards[False]


def test_forecasts_of_sampled_steps_use_the_costs_of_sampling() -> None:
    costs = replace(COSTS, sample_ms=9.0, verify_sample_ms=30.0)
    for planner in (ChainPlanner(costs), TreePlanner(tree_head(), costs, block=3, nodes=8)):
        assert planner.forecast(NEAR).pays
        assert not planner.forecast(replace(NEAR, greedy=False)).pays
    suffixes = SuffixDrafter(Suffix(), None, costs)
    assert suffixes._least(False, 1, 256) > suffixes._least(True, 1, 256)
