"""The guard under clocks that tests set: when it drafts, and that output never depends on it."""

from __future__ import annotations

import random
from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, count, groupby
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.baselines.lookup import Lookup
from forerun import Decoder, SamplingParams
from forerun.drafters.hybrid import HybridDrafter
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.engine import Drafter, Step
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Proposal, RowOutcome
from forerun.failures import NotNumbersError
from forerun.methods import AR, SD, Hybrid, Method, Parts, Suffix
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from forerun.planning.guard import FIRST_PLAIN_STEPS, Guard, GuardedDrafter
from forerun.planning.loss_account import (
    CHECK_PAUSE,
    CREDIT,
    MAX_PAUSE_PER_LOSS,
    PAUSE_PER_LOSS,
    LossAccount,
)
from forerun.planning.stop_rules import BestLength, FixedLength, LengthPolicy
from forerun.sampling.sampler import Sampler
from tests.support.toys import (
    DRAFT,
    TableLM,
    decode,
    fit,
    noisy_copy,
    random_table,
    sampled,
    tiny,
    tokens_of,
)
from tests.support.toys import TARGET as SAMPLED

TARGET = random_table(8, 5)
NEVER = -TARGET
PROMPTS = [[0], [1, 2, 3], [3, 3], [2, 0, 1, 2, 0, 1, 2]]


class Clock:
    """Stands still but for what the models below put on it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Ticking(TableLM):
    """A table model whose forwards take `seconds` on a clock."""

    def __init__(self, table: Tensor, clock: Clock, seconds: float) -> None:
        super().__init__(table)
        self.clock = clock
        self.seconds = seconds
        self.prompts = 0

    def prefill(self, tokens: abc.Sequence[int], chunk: int, *_: Any, **__: Any) -> Iterator[int]:
        self.clock.now += self.seconds
        self.prompts += 1
        yield from super().prefill(tokens, chunk)

    def _logits(self, *given: Any) -> list[Tensor]:
        self.clock.now += self.seconds
        return super()._logits(*given)


class Bench:
    """A target that takes 1 s per forward, with a guarded draft, over any number of requests."""

    def __init__(self, draft: Tensor = NEVER, seconds: float = 0.25, gamma: int = 4) -> None:
        self.clock = Clock()
        self.gamma = gamma
        self.pace = Guard(self.clock)
        self.target = Ticking(TARGET, self.clock, 1.0)
        self.draft = Ticking(draft, self.clock, seconds)

    def drafter(self) -> GuardedDrafter:
        return GuardedDrafter(ChainDrafter(self.draft, FixedLength(self.gamma)), self.pace)

    def call(self, new: int) -> list[Step]:
        (steps,) = decode(self.target, self.drafter(), [Request(PROMPTS[0], new)])
        return steps


def pauses(steps: abc.Sequence[Step]) -> list[int]:
    return list(map(len, "".join("d" if step.drafted else "p" for step in steps).split("d")))


def test_a_useless_draft_is_soon_left_out() -> None:
    steps = Bench().call(250)
    # Two plain steps; drafting, with one look, until more than 4 s are lost at 1 s per step; then
    # trials.
    assert (
        pauses(steps)[:8] == [2, 0, 0, 1, 0, CHECK_PAUSE, PAUSE_PER_LOSS, 2 * PAUSE_PER_LOSS]
        and len(pauses(steps)) <= 11
    )
    assert [step.rests for step in steps[:8]] == [
        False
    ] * 8  # plain steps that only measure are no rest
    assert all(step.rests for step in steps[8:] if not step.drafted)
    assert all(step.origins == ("bonus",) for step in steps if not step.drafted)
    # Pauses double, and are bounded by what trials cost: the draft's forwards.
    for seconds, gamma in ((0.25, 4), (0.5, 6)):
        ratios = [
            run / (seconds * gamma)
            for run in pauses(Bench(seconds=seconds, gamma=gamma).call(6000))[1:-1]
            if run > CHECK_PAUSE
        ]
        assert ratios[:4] == [
            PAUSE_PER_LOSS,
            2 * PAUSE_PER_LOSS,
            4 * PAUSE_PER_LOSS,
            MAX_PAUSE_PER_LOSS,
        ] and set(ratios[3:]) == {MAX_PAUSE_PER_LOSS}
    # A draft that agrees is never left out, but for a look at plain steps now and then.
    steps = Bench(TARGET).call(1000)
    assert 3 <= sum(not step.drafted for step in steps) < 0.04 * len(steps)


@pytest.mark.slow
def test_never_slower_by_much_than_plain_decoding() -> None:
    for seconds in (0.01, 0.1, 0.25, 1.0):
        for draft in (NEVER, random_table(8, 77), TARGET + 2.0 * random_table(8, 6)):
            bench = Bench(draft, seconds)
            bench.call(512)
            for _ in range(2):
                begun = bench.clock.now
                bench.call(512)
                assert bench.clock.now - begun < 1.03 * 513  # the prompt included


def test_drafting_comes_back_when_the_text_turns_friendly() -> None:
    bench = Bench()
    bench.call(300)
    assert bench.pace.paused
    bench.draft.table = TARGET
    first, *later = pauses(bench.call(600))
    assert first <= MAX_PAUSE_PER_LOSS and sum(later) <= 3  # but for looks at the plain step
    # It ends when the text turns hostile: it loses what it may of its earnings, then a check, then
    # trials.
    bench.draft.table = NEVER
    assert [run for run in pauses(bench.call(200)) if run][:2] == [CHECK_PAUSE, CHECK_PAUSE]


def test_the_clock_is_read_again_when_the_machine_changes() -> None:
    bench = Bench(TARGET, seconds=0.25)
    bench.call(200)
    # Everything takes four times as long. Drafting seems to lose until the check measures a plain
    # step.
    bench.target.seconds, bench.draft.seconds = 4.0, 1.0
    steps = bench.call(200)
    assert sum(not step.drafted for step in steps) <= CHECK_PAUSE + 3
    # And back. Plain steps that seem slow make drafting look good; they are looked at again.
    bench.target.seconds, bench.draft.seconds = 1.0, 0.25
    bench.call(1000)
    bench.draft.seconds = 2.0
    assert sum(step.drafted > 0 for step in bench.call(200)) <= 10


def test_slow_first_steps_do_not_hide_what_drafts_lose() -> None:
    bench = Bench(seconds=0.1)
    bench.target.seconds = 1.75  # a plain step seems to take that long, a drafting one takes 1.4
    bench.call(FIRST_PLAIN_STEPS)
    bench.target.seconds = 1.0
    assert sum(step.drafted > 0 for step in bench.call(100)) < 20


def test_suffixes_draft_where_costs_rule_the_model_s_drafts_out() -> None:
    bench = Bench(TARGET)
    costs = Costs({1: 10.0, 64: 10.5}, {1: 99.0})
    inner = GuardedDrafter(ChainDrafter(bench.draft, FixedLength(2), costs=costs), bench.pace)
    (steps,) = decode(
        bench.target, HybridDrafter(SuffixDrafter(Suffix()), inner, 99.0), [Request([1, 2], 60)]
    )
    assert sum(step.drafted > 0 for step in steps) > 3 and not bench.draft.prompts


def test_a_batch_in_which_drafts_cannot_pay_runs_no_draft() -> None:
    bench = Bench(TARGET)
    costs = Costs({1: 10.0, 2: 11.0, 64: 650.0}, {1: 1.0, 64: 64.0})
    drafter = GuardedDrafter(ChainDrafter(bench.draft, BestLength(costs), costs=costs), bench.pace)
    together = decode(bench.target, drafter, [Request(prompt, 30) for prompt in PROMPTS[:4]])
    assert not any(step.drafted for steps in together for step in steps) and not bench.draft.prompts
    (alone,) = decode(bench.target, drafter, [Request(PROMPTS[0], 30)])
    assert sum(step.drafted > 0 for step in alone) > 3 and bench.draft.prompts == 1


def test_a_batch_in_which_nothing_pays_asks_neither_suffixes_nor_the_model() -> None:
    """`hybrid` with a fixed threshold, which says nothing about batches. One row drafts."""

    class Suffixes(SuffixDrafter):
        asked = 0

        def find(self, seq: Sequence, rows: int) -> tuple[Draft, float]:
            self.asked += 1
            return super().find(seq, rows)

    bench = Bench(TARGET)
    costs = Costs({1: 10.0, 2: 11.0, 4: 14.0, 64: 650.0}, {1: 1.0, 64: 64.0})
    model = ChainDrafter(bench.draft, FixedLength(2), costs=costs)
    suffixes = Suffixes(Suffix(), None, costs)
    hybrid = HybridDrafter(suffixes, GuardedDrafter(model, bench.pace), 3.0)
    drafter = GuardedDrafter(hybrid, Guard(bench.clock))
    together = decode(bench.target, drafter, [Request(prompt, 30) for prompt in PROMPTS[:4]])
    assert not any(step.drafted for steps in together for step in steps)
    assert not bench.draft.prompts and not suffixes.asked
    # Nothing was lost, so nothing is paused, and one row drafts after a few looks.
    (alone,) = decode(bench.target, drafter, [Request(PROMPTS[0], 30)])
    assert sum(step.drafted > 0 for step in alone) > 3
    assert bench.draft.prompts == 1 and suffixes.asked


def by_number(rows: Iterable[abc.Sequence[Step]]) -> list[list[Step]]:
    steps = sorted((step for steps in rows for step in steps), key=lambda step: step.number)
    return [list(shared) for _, shared in groupby(steps, lambda step: step.number)]


def test_rows_share_a_step_and_each_number_of_rows_has_its_plain_time() -> None:
    bench = Bench(TARGET)
    requests = [Request(prompt, 30 * (i + 1)) for i, prompt in enumerate(PROMPTS[:3])]
    batches = by_number(decode(bench.target, bench.drafter(), requests))
    plain = [len(batch) for batch in batches if not any(step.drafted for step in batch)]
    # Two for the first number of rows and an early look, one for each number that follows. The last
    # step may be the end of a row.
    assert plain[:5] == [3, 3, 3, 2, 1] and len(batches) < 30


def test_rows_that_come_and_go_are_guarded_all_the_same() -> None:
    """In a stream of requests, a draft that agrees is used, any other soon is not.

    Three requests run at a time.
    """
    for draft, least, most in ((TARGET, 0.75, 0.99), (NEVER, 0.0, 0.25)):
        bench = Bench(draft)
        requests = [Request(PROMPTS[i % 4], 20 + 7 * (i % 5)) for i in range(60)]
        batches = by_number(decode(bench.target, bench.drafter(), requests, max_rows=3))
        drafting = [any(step.drafted for step in batch) for batch in batches]
        assert least <= sum(drafting) / len(drafting) <= most
        assert bench.draft.prompts == 60 if draft is TARGET else bench.draft.prompts < 60


def test_a_new_sequence_shortens_a_pause_by_its_share() -> None:
    def paused(steps: int, *rows: int) -> LossAccount:
        account = LossAccount()
        account.pause(steps)
        for batch in rows:
            account.shorten_pause(batch)
        return account

    assert [paused(128, *rows).wait for rows in ([1], [2], [16], [16] * 16)] == [64, 96, 124, 92]
    # One of sixteen rows that are not new hardly ends a pause that the others have earned.
    guarded = GuardedDrafter(PlainDrafter(), guard := Guard(Clock()))
    guard.account.pause(100)
    seqs = [Sequence(Request([0], 9), id) for id in range(4)]
    for seq in seqs[:3]:
        list(guarded.admit(seq, None, 8))
    assert guard.account.wait == 50  # the first took all that may be taken off
    guarded.drop(seqs[0])
    guard.account.pause(60)
    list(guarded.admit(seqs[3], None, 8))
    assert guard.account.wait == 50


def test_greedy_and_sampled_steps_have_paces_of_their_own() -> None:
    greedy = Guard(Clock())
    sampled = Guard(Clock())
    drafter = GuardedDrafter(ChainDrafter(TableLM(NEVER), FixedLength(2)), greedy, sampled)
    rows = decode(TableLM(TARGET), drafter, [Request([0], 2, Sampler(False)), Request([0], 5)])
    # Two steps of two rows are the first looks of one guard, the rest those of the other. The last
    # step has no room for a draft.
    assert [len(row) for row in rows] == [2, 5] and (sampled._plain_steps, greedy._plain_steps) == (
        2,
        3,
    )


def test_a_late_sequence_waits_for_a_prompt_that_is_being_run() -> None:
    """A draft model has one place for prompts."""

    class OneByOne(TableLM):
        busy = False

        def prefill(
            self, tokens: abc.Sequence[int], chunk: int, *_: Any, **__: Any
        ) -> Iterator[int]:
            assert not self.busy
            self.busy = True
            yield from super().prefill(tokens, chunk)
            self.busy = False

    guarded = GuardedDrafter(
        ChainDrafter(OneByOne(TARGET), FixedLength(2)), Scheduled(lambda: True, True)
    )
    late = Sequence(Request([0, 1, 2], 9), 0)
    prompt = Sequence(Request([3, 2, 1, 0, 1, 2], 9), 1)
    assert not list(guarded.admit(late, None, 2)) and guarded.guards[True].paused
    guarded.guards[True].account.pause(0)
    admission = iter(guarded.admit(prompt, None, 2))
    assert next(admission) == 2
    proposal = guarded.propose([late])
    assert [draft.drafted for draft in proposal.drafts] == [0] and proposal.memo.judge is None
    outcome = RowOutcome(late, proposal.drafts[0], Verdict([0], 0, 0, False))
    guarded.observe([outcome], proposal.memo)
    assert list(admission) == [2, 1]
    assert [draft.drafted for draft in guarded.propose([late, prompt]).drafts] == [2, 2]
    # One that is given up in the middle of its prompt leaves nothing behind.
    for seq in (late, prompt):
        guarded.drop(seq)
    admission = iter(guarded.admit(prompt, None, 2))
    next(admission)
    admission.close()
    guarded.drop(prompt)
    assert not guarded._admissions and not guarded._inside


def test_a_long_text_that_is_read_late_is_read_between_steps() -> None:
    """Others wait for two chunks of it at most, and its drafts begin when all is read."""
    model = TableLM(TARGET)
    guarded = GuardedDrafter(ChainDrafter(model, FixedLength(2)), Scheduled(lambda: True, True))
    text = [id % 4 for id in range(21)]
    late = Sequence(Request(text, 9), 0)
    assert not list(guarded.admit(late, None, 2))
    guarded.guards[True].account.pause(0)
    read = []
    proposals = []
    while not proposals or not proposals[-1].drafts[0].drafted:
        before = model.prefilled
        proposals.append(guarded.propose([late]))
        read.append(model.prefilled - before)
        assert len(read) <= len(text)
    assert sum(read) == len(text) - 1 and max(read) == 4
    assert all(proposal.memo.judge is None for proposal in proposals[:-1])
    assert proposals[-1].memo.judge is not None
    # One that leaves meanwhile takes its reading with it.
    other = Sequence(Request(text, 9), 1)
    guarded.guards[True].account.pause(4)
    assert not list(guarded.admit(other, None, 2))
    guarded.guards[True].account.pause(0)
    guarded.propose([other])
    assert guarded._late
    guarded.drop(late)
    guarded.drop(other)
    assert not guarded._late and not guarded._inside


def test_a_draft_that_is_late_is_charged() -> None:
    bench = Bench()
    bench.call(200)
    account = bench.pace.account
    failures = account.failures
    account.pause(2)
    account._inherit(0.0)
    bench.draft.seconds = 5.0
    steps = bench.call(20)
    # The first trial ends at once: its step counts as twice as long as those before, plus the
    # prompt.
    assert [step.drafted > 0 for step in steps[:3]] == [False, True, False]
    lost = 5 + 2 * 2 - 1
    assert account.failures == failures + 1
    assert account.wait == lost * min(PAUSE_PER_LOSS * 2 ** (failures - 1), MAX_PAUSE_PER_LOSS) - (
        len(steps) - 2
    )


def test_what_a_guard_reads_late_is_no_part_of_a_step_for_one_around_it() -> None:
    """Nor of a step that the guard does not judge, because suffixes draft for a row of it."""
    clock = Clock()
    pace = Guard(clock)
    pace.account.pause(1)
    inner = GuardedDrafter(SlowPrompts(clock), pace)
    seqs = [Sequence(Request([0], 9), id) for id in range(2)]
    for seq in seqs:
        assert not list(inner.admit(seq, None, 8))
    pace.account.pause(0)
    before = clock.now
    proposal = inner.propose(seqs, 3)
    assert proposal.memo.judge is None
    assert proposal.prompt_seconds == 10 == clock.now - before
    assert proposal.memo.started_at == clock.now
    # The guard around it charges this to its account, beside the step.
    outer = GuardedDrafter(PassesOn(inner), around := Guard(clock))
    for _ in range(FIRST_PLAIN_STEPS):
        around.record(1, 1, 1.0, drafted=False)
    late = Sequence(Request([0], 9), 2)
    pace.account.pause(1)
    list(outer.admit(late, None, 8))
    pace.account.pause(0)
    memo = outer.propose([late]).memo
    assert around.account.balance == CREDIT - 5 and memo.started_at == clock.now


class SlowPrompts(PlainDrafter):
    def __init__(self, clock: Clock, wants_hidden: bool = False) -> None:
        self.clock, self.wants_hidden = clock, wants_hidden

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        self.clock.now += 3
        yield 1
        self.clock.now += 2


def test_prompts_of_drafts_have_to_be_earned() -> None:
    guarded = GuardedDrafter(SlowPrompts(clock := Clock()), pace := Guard(clock))
    for id in range(2):  # nothing is known of steps of one row when the first one comes
        for _ in guarded.admit(Sequence(Request([0], 9), id), None, 8):
            clock.now += 100  # steps of others
        pace.record(2, 2, 0.5, drafted=False)
    # The first is booked when a plain step is known.
    assert pace.account.balance == CREDIT - 2 * 5 / 0.5
    # What was lost so counts when drafting fails: a pause of 16 times as much.
    pace.account.failures = 1
    pace.record(2, 2, 1.0, drafted=True)
    assert pace.account.wait == (2 * 10 + 1 - CREDIT) * PAUSE_PER_LOSS
    # Heads run every prompt as its states come, so in a pause the time is spent whatever is tried.
    pace = Guard(clock)
    pace.record(1, 1, 1.0, drafted=False)
    pace.account.pause(4)
    list(
        GuardedDrafter(SlowPrompts(clock, wants_hidden=True), pace).admit(
            Sequence(Request([0], 9), 0), None, 8
        )
    )
    assert pace.paused and pace.account.balance == CREDIT


class PassesOn(PlainDrafter):
    """Has a guarded drafter draft in steps that others share, as `hybrid` does."""

    def __init__(self, inner: GuardedDrafter) -> None:
        self.inner = inner

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from self.inner.admit(seq, hidden, chunk)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return self.inner.propose(seqs, len(seqs) + 1)


class ReadsLate(SlowPrompts):
    def propose(self, seqs: list[Sequence]) -> Proposal:
        self.clock.now += 8
        return Proposal([Draft.root(0)], prompt_seconds=8.0)


@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_that_is_read_while_drafting_may_be_gained_back(begins: bool) -> None:
    """By the trial that it begins: this one goes on. The reading is no part of a step."""
    pace = Guard(clock := Clock())
    for _ in range(FIRST_PLAIN_STEPS):
        pace.record(1, 1, 1.0, drafted=False)
    pace.account.begins = begins
    guarded = GuardedDrafter(ReadsLate(clock), pace)
    guarded._inside[0] = True
    memo = guarded.propose([Sequence(Request([0], 9), 0)]).memo
    assert pace.account.balance == CREDIT - 8 and memo.started_at == clock.now
    pace.account.book_step(0.0)
    assert pace.paused != begins


def test_a_lucky_trial_does_not_make_up_for_failures() -> None:
    def after(tokens: int, late: float) -> int:
        pace = Guard(Clock())
        pace.account.failures = 4
        pace.record(1, 1, 1.0, drafted=False)
        pace.charge(1, late, may_be_regained=True)
        pace.record(1, tokens, 1.0, drafted=True)
        for seconds in (1.5, 9.0, 9.0):  # of which no more counts than twice what is usual
            pace.record(1, 0, seconds, drafted=True)
        assert pace.paused
        return pace.account.failures

    assert [after(9, 0.0), after(20, 0.0), after(9, 9.0)] == [3, 0, 5]


def test_a_drafter_that_had_nothing_to_propose_has_shown_what_a_plain_step_costs() -> None:
    """Steps without a draft count as plain ones, however long they take.

    So no further step is spent on a look.
    """
    bench = Bench()
    decode(bench.target, GuardedDrafter(PlainDrafter(), bench.pace), [Request([0], 50)])
    assert (
        bench.pace._plain_steps == 50
        and not bench.pace._step_costs
        and bench.pace._since_plain == 0.0
    )
    bench.target.seconds = 3.0  # from now on plain steps take longer, and the silence tells
    decode(bench.target, GuardedDrafter(PlainDrafter(), bench.pace), [Request([0], 50)])
    assert (
        set(bench.pace._plain_seconds[1]) == {3.0}
        and not bench.pace.paused
        and bench.pace.account.failures == 0
    )
    # One that ran a model for nothing has shown what its drafts cost.
    guarded = GuardedDrafter(PlainDrafter(), pace := Guard(bench.clock))
    guarded.drafter.propose = lambda seqs: Proposal([Draft.root(seqs[0].tokens[-1])], 1)  # type: ignore[method-assign]
    decode(bench.target, guarded, [Request([0], 50)])
    assert len(pace._step_costs) == pace._step_costs.maxlen and pace._plain_steps < 10


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_row_whose_scores_are_not_numbers_is_no_measurement(
    caplog: pytest.LogCaptureFixture, is_drafted: bool
) -> None:
    """The guard once counted its tokens as lost, or raised, so that the step was tried again.

    A row that has a draft is decoded again without, and one that has none ends in this step.
    """

    class Records(Guard):
        def __init__(self) -> None:
            super().__init__(Clock())
            self.seen: list[tuple[int, int]] = []

        def record(self, rows: int, tokens: int, seconds: float, drafted: bool) -> None:
            self.seen.append((rows, tokens))
            super().record(rows, tokens, seconds, drafted)

    guard = Records()
    for _ in range(FIRST_PLAIN_STEPS):
        guard.record(2, 2, 1.0, drafted=False)
    table = TARGET.clone()
    table[..., 3] = -99.0  # the other sequence never has this token
    table[:, 3] = torch.nan

    class Chains(ChainDrafter):
        def propose(self, seqs: abc.Sequence[Sequence]) -> Proposal:
            proposal = super().propose(seqs)
            drafts = [
                draft if is_drafted or seq.tokens[0] != 3 else Draft.root(3)
                for seq, draft in zip(seqs, proposal.drafts, strict=True)
            ]
            return replace(proposal, drafts=drafts)

    drafter = GuardedDrafter(Chains(TableLM(TARGET), FixedLength(2)), guard)
    rows = decode(TableLM(table), drafter, [Request([3], 9), Request([0], 9)])
    assert isinstance(rows[0][-1].error, NotNumbersError)
    seen = guard.seen[FIRST_PLAIN_STEPS:]
    assert seen and all(count == 1 and tokens >= 1 for count, tokens in seen)
    assert not caplog.records


class Recorder(ChainDrafter):
    """Keeps what it is called with.

    It checks that its rows are beginnings of sequences, without the last token.
    """

    def __init__(self, model: TableLM, policy: LengthPolicy, wants_hidden: bool = False) -> None:
        super().__init__(model, policy)
        self.wants_hidden = wants_hidden
        self.admitted: list[int] = []
        self.observed: list[tuple[int, int, int]] = []

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        self.admitted.append(len(seq.output))
        yield from super().admit(seq, hidden, chunk)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        super().observe(outcomes, memo)
        for outcome in outcomes:
            seq = outcome.sequence
            self.observed.append((seq.id, outcome.draft.drafted, outcome.verdict.accepted))
            row = self.model.rows[seq.id]
            assert row == seq.tokens[: len(row)] and len(row) < len(seq.tokens)


class Scheduled(Guard):
    """Drafts where it is told to, with time at random."""

    def __init__(self, draw: Callable[[], bool], pauses: bool) -> None:
        super().__init__(random.Random(0).random)
        self.draw = draw
        if pauses:
            self.account.pause(4)

    def drafts(self, rows: int) -> bool:
        self._plain_seconds.setdefault(rows, deque([1.0], maxlen=3))
        return self.draw()


@given(st.data())
def test_no_schedule_of_pauses_changes_greedy_output(data: st.DataObject) -> None:
    """And only drafts that were made are observed, unless hidden states are wanted."""
    size = 8
    target = random_table(size, data.draw(st.integers(0, 30)))
    rows = data.draw(st.integers(1, 4))
    eos = data.draw(st.integers(0, size))
    most = data.draw(st.integers(1, 4))
    pauses = data.draw(st.booleans())
    asked = [
        Request(prompt, data.draw(st.integers(1, 25)), eos=frozenset({eos}))
        for prompt in PROMPTS[:rows]
    ]
    draft = TableLM(target + data.draw(st.sampled_from([0.0, 0.4, 2.0])) * random_table(size, 99))
    plain = decode(TableLM(target), PlainDrafter(), asked)
    plan = list[bool]()

    def run(inner: Drafter, pace: Guard) -> list[list[Step]]:
        outputs = decode(TableLM(target), GuardedDrafter(inner, pace), asked, max_rows=most)
        for steps, wanted in zip(outputs, plain, strict=True):
            assert (
                tokens_of(steps) == tokens_of(wanted)
                and steps[-1].finish_reason == wanted[-1].finish_reason
            )
        return by_number(outputs)

    def draw() -> bool:
        plan.append(data.draw(st.booleans()))
        return plan[-1]

    for wants_hidden in (False, True):
        inner = Recorder(draft, FixedLength(3), wants_hidden)
        plan.clear()
        batches = list(zip(plan, run(inner, Scheduled(draw, pauses)), strict=True))
        assert inner.admitted == [0] * rows if wants_hidden else len(inner.admitted) <= rows
        assert not draft.rows and not any(
            step.drafted for drew, steps in batches if not drew for step in steps
        )
        seen = [step for drew, steps in batches if drew or wants_hidden for step in steps]
        assert sorted(inner.observed) == sorted(
            (step.id, step.drafted, step.accepted) for step in seen
        )
    run(Lookup(4, 2).build(Parts(draft)), Scheduled(draw, pauses))
    # The real pace, under a clock that jumps, backwards as well.
    ticks = random.Random(data.draw(st.integers(0, 99)))
    pace = Guard(lambda: ticks.expovariate(1.0))
    for _ in range(2):
        run(Recorder(draft, FixedLength(3)), pace)


@pytest.mark.parametrize("method", [SD(3), Lookup(3, 2)])
def test_sampling_with_pauses_keeps_the_targets_distribution(method: Method) -> None:
    turns = random.Random(3)
    pace = Scheduled(lambda: turns.random() < 0.5, False)
    # Many small batches, as all rows of one draft or pause together.
    rows = sampled(
        lambda: GuardedDrafter(method.build(Parts(TableLM(SAMPLED), TableLM(DRAFT))), pace, pace),
        20,
        100,
    )
    assert fit(rows) > 1e-4


@pytest.mark.slow
def test_sampling_with_a_pace_that_follows_acceptance_keeps_the_targets_distribution() -> None:
    # Whether the next step drafts depends on what was accepted, as it does under a real clock.
    pace = Guard(clock := Clock())
    draft = Ticking(DRAFT, clock, 0.35)

    def drafter() -> GuardedDrafter:
        pace.account.wait = min(pace.account.wait, 3)
        return GuardedDrafter(ChainDrafter(draft, FixedLength(2)), Guard(clock), pace)

    rows = sampled(drafter, 1, 800, target=Ticking(SAMPLED, clock, 1.0))
    drafted = [step.drafted > 0 for steps in rows for step in steps]
    assert 0.1 < sum(drafted) / len(drafted) < 0.9 and fit(rows) > 1e-4


def test_when_the_guard_is_on() -> None:
    """Around a drafter, and a hybrid's other one; not around plain decoding."""
    target = tiny("llama")
    for guard in (None, True, False):
        for method in (SD(2), Hybrid()):
            drafter = Decoder(target, None, noisy_copy(target, 0.02), method, guard).engine.drafter
            assert isinstance(drafter, GuardedDrafter) == (guard is not False)
        inner = drafter.drafter if isinstance(drafter, GuardedDrafter) else drafter
        assert isinstance(inner, HybridDrafter) and isinstance(inner.other, GuardedDrafter) == (
            guard is not False
        )
        assert not isinstance(
            Decoder(target, method=AR(), guard=guard).engine.drafter, GuardedDrafter
        )


@pytest.mark.slow
def test_greedy_and_seeded_output_is_the_same_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny("llama")
    ticks = random.Random(1)
    clock = accumulate(ticks.expovariate(1.0) for _ in count()).__next__
    monkeypatch.setattr(CausalLM, "clock", lambda _: clock())
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=30)
    prompts = [[5, 6, 7, 5, 6], [9], list(range(2, 40))]
    texts = []
    kinds = set()
    plain = [
        completion.tokens
        for completion in Decoder(target, method=AR()).generate(prompts, max_new_tokens=30)
    ]
    for method in (SD(3), Lookup(4, 2)):
        for guard in (None, None, False):
            decoder = Decoder(target, None, noisy_copy(target, 0.03), method, guard)
            for batch in (prompts, prompts[::-1], prompts[:1]):
                done = decoder.generate(batch, max_new_tokens=30)  # greedy, which the guard watches
                assert [completion.tokens for completion in done] == [
                    plain[prompts.index(prompt)] for prompt in batch
                ]
                kinds |= {step.drafted > 0 for completion in done for step in completion.steps}
                texts.append(decoder.generate([3, 4, 5], params).tokens)
    assert all(text == texts[0] for text in texts) and kinds == {True, False}


def test_methods_and_ways_of_choosing_have_paces_of_their_own() -> None:
    target = tiny("llama")
    decoder = Decoder(target, None, noisy_copy(target, 0.03), SD(3))
    for options in ({}, {"temperature": 1.0}, {"max_new_tokens": 3}):
        decoder.generate([3, 4, 5], **{"max_new_tokens": 9, **options})
    assert set(decoder._trackers) == {(SD(3), True), (SD(3), False)}
    assert all(pace._plain_steps for pace in decoder._trackers.values())
    # They outlive the engine.
    decoder.close()
    paces = dict(decoder._trackers)
    decoder.generate([3, 4, 5], max_new_tokens=4)
    assert decoder._trackers == paces
