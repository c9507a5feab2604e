"""The guard (ours): stop drafting while it does not pay, and try again from time to time.

It reads a clock, so which steps draft differs from run to run. Greedy and seeded output does not
differ, because a step without drafts is a plain one. Without a seed every step still samples from
the target's distribution, but drafts use up random numbers.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from statistics import median, median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.engine.target import next_size
from forerun.planning.corrected_costs import CorrectedCosts, StepTime
from forerun.planning.cost_model import mean_context
from forerun.planning.forecast import PlannedDrafter, StepSituation, forecast
from forerun.planning.loss_account import LossAccount

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.engine.target import ChunkSize

FIRST_PLAIN_STEPS = 2  # before anything is drafted: two, because the very first step is slow

# Times below are in plain steps.
PLAIN_SHARE = 1 / 256  # the share of the time for plain steps between drafting steps
# The first of these plain steps is due after this time, each next one after twice the time,
# because a model's first steps are slow and soon prove wrong.
FIRST_PLAIN_AFTER = 4.0

# A drafting step no slower than this share of a plain step shows that plain steps have changed.
STALE_BASELINE = 0.9
RECENT_DECAY = 0.95  # about the last twenty drafting steps count


class Guard:
    """Track the tokens and seconds of an engine's steps, and decide which steps draft.

    A drafting step of B rows that commits T tokens in s seconds gains T / B - s / p plain steps. p
    is the time of a plain step of B rows: the median of the last three. This, and the time in which
    drafters read prompts, is booked to an account, which decides when drafting pauses.

    A guard outlives sequences and engines.

    Attributes:
        clock: gives the time in seconds.
        account: what drafting has gained and may lose.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.account = LossAccount()
        self._unbooked_seconds = 0.0  # in which prompts were read before a plain step was measured
        self._plain_seconds: dict[int, deque[float]] = {}  # of the last plain steps, by rows
        self._plain_steps = 0
        # Drafting steps, in plain steps.
        self._step_costs: deque[float] = deque(maxlen=5)
        self._recent_tokens = 0.0
        self._recent_costs = 0.0
        self._since_plain = 0.0  # time since the last plain step
        self._plain_after = FIRST_PLAIN_AFTER

    @property
    def paused(self) -> bool:
        """Whether no step drafts for the time being."""
        return self.account.paused

    def drafts(self, rows: int) -> bool:
        """Return whether a step of `rows` rows is to draft.

        Else it is a plain step: in a pause, or because the time of a plain step is to be measured.
        """
        if self.paused:
            return False
        if self._plain_steps < FIRST_PLAIN_STEPS or rows not in self._plain_seconds:
            return False
        gain = self._recent_tokens / self._recent_costs if self._recent_costs else 1.0
        # The less drafting gains, the less a plain step costs, and the sooner one is measured.
        due = max(1 - 1 / gain, 0.05) / PLAIN_SHARE
        return self._since_plain <= min(self._plain_after, due)

    def charge(self, rows: int, seconds: float, may_be_regained: bool) -> None:
        """Charge the time in which a drafter read prompts.

        Args:
            rows: of the step.
            seconds: how long it read.
            may_be_regained: see `LossAccount.book_reading`.
        """
        if rows not in self._plain_seconds:
            self._unbooked_seconds += seconds
            return
        self.account.book_reading(seconds / self._plain_step_seconds(rows), may_be_regained)

    def record(self, rows: int, tokens: int, seconds: float, drafted: bool) -> None:
        """Record a step, whose rows committed `tokens` tokens in all."""
        if drafted:
            self._record_drafting(rows, tokens, seconds)
        else:
            self._record_plain(rows, seconds)

    def _record_plain(self, rows: int, seconds: float) -> None:
        self._plain_seconds.setdefault(rows, deque(maxlen=3)).append(seconds)
        self._plain_steps += 1
        if self._since_plain:
            self._plain_after *= 2
        self._since_plain = 0.0
        self.account.pay_back()
        if self._unbooked_seconds and not self.paused:
            self.charge(rows, self._unbooked_seconds, may_be_regained=True)
            self._unbooked_seconds = 0.0

    def _record_drafting(self, rows: int, tokens: int, seconds: float) -> None:
        cost = seconds / self._plain_step_seconds(rows)
        if self._step_costs:
            # A step that the machine interrupted proves little.
            cost = min(cost, 2 * median(self._step_costs))
            if self.account.begins:
                # The draft model also runs the tokens of the pause. The trial may gain that back.
                usual = min(cost, median(self._step_costs))
                self.account.book_reading(cost - usual, may_be_regained=True)
                cost = usual
        self._step_costs.append(cost)
        # If drafting looks cheaper than plain decoding, the plain baseline is stale. Then a plain
        # step is due at once.
        self._since_plain += cost if cost > STALE_BASELINE else inf
        self._recent_tokens = RECENT_DECAY * self._recent_tokens + tokens / rows
        self._recent_costs = RECENT_DECAY * self._recent_costs + cost
        self.account.book_step(tokens / rows - cost)

    def _plain_step_seconds(self, rows: int) -> float:
        return max(median_low(self._plain_seconds[rows]), 1e-9)


@dataclass(frozen=True)
class GuardMemo:
    """What a guarded drafter keeps of a step until it observes it.

    Attributes:
        asked: the sequences for which the drafter was called.
        judge: the guard that judges the step; None if no guard does.
        length: the number of tokens of all sequences before the step.
        rows: the number of sequences that the guarded drafter was given.
        started_at: when the step began. The time of drafts' prompts is left out.
        proposed_at: when the drafts were made.
        ran: whether the drafter ran a forward.
        time: what is known of the step's time, if it is to correct costs. A step with constraints
            is not, because it also waits for them.
        inner: the drafter's own memo.
    """

    asked: frozenset[int]
    judge: Guard | None
    length: int
    rows: int
    started_at: float
    proposed_at: float
    ran: bool
    time: StepTime | None
    inner: Any

    @property
    def is_measuring(self) -> bool:
        """Whether the step measures a plain step, so that nothing may be drafted in it."""
        return self.judge is not None and not self.asked


class GuardedDrafter(PlannedDrafter):
    """Wrap any drafter, and call it only while its drafts pay.

    In other steps the drafter is not called, and sees later that sequences have grown. It admits a
    sequence when it first drafts for it, so a request that is paused throughout never runs the
    draft model's prompt.

    A drafter that wants the target's hidden states admits every sequence at once and observes every
    step, because the states come only once. In a pause it observes an empty draft.
    """

    def __init__(
        self,
        drafter: Drafter,
        guard: Guard,
        sampled: Guard | None = None,
        costs: CorrectedCosts | None = None,
    ) -> None:
        """Wrap a drafter.

        Args:
            drafter: what drafts.
            guard: judges steps whose rows are all greedy.
            sampled: judges steps with sampled rows, because these cost and accept differently.
                None: a new guard.
            costs: corrected by the time of every step, if given.
        """
        self.drafter = drafter
        self.guards = {True: guard, False: sampled if sampled is not None else Guard(guard.clock)}
        self._costs = costs
        self.planner = drafter.planner if isinstance(drafter, PlannedDrafter) else None
        self.wants_hidden = drafter.wants_hidden
        self.extra_nodes = drafter.extra_nodes
        self.reads = drafter.reads
        # {sequence: whether the drafter has admitted it, and so has read its prompt}
        self._inside: dict[int, bool] = {}
        # How many admissions the drafter is within. The engine runs them in chunks between steps.
        self._admissions = 0
        # {sequence: a generator that makes the drafter read on}, of those that it reads late
        self._late: dict[int, Iterator[int]] = {}
        self._chunk: ChunkSize = 1  # of the engine, once it has admitted a sequence

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterator[int]:
        """Admit a sequence, at once to the drafter if its drafts are expected to pay."""
        self._inside[seq.id] = False
        self._chunk = chunk
        guard = self.guards[seq.greedy]
        guard.account.shorten_pause(len(self._inside))
        is_tried = not guard.paused and self._forecasts_gain(seq, seq.rows)
        if not self.wants_hidden and not is_tried:
            return
        self._admissions += 1
        seconds = 0.0
        started_at = guard.clock()
        try:
            for count in self.drafter.admit(seq, hidden, chunk):
                seconds += guard.clock() - started_at
                yield count
                started_at = guard.clock()
        finally:
            self._admissions -= 1
        # In a pause a drafter that wants hidden states reads all prompts, whatever is tried later.
        if is_tried:
            seconds += guard.clock() - started_at
            guard.charge(len(self._inside), seconds, may_be_regained=False)
        self._inside[seq.id] = True

    def propose(self, seqs: list[Sequence], step_rows: int | None = None) -> Proposal:
        """Return drafts, or empty ones in a pause.

        Args:
            seqs: the sequences to draft for.
            step_rows: all rows of the step, when drafters share a step. Such a step is judged only
                if `seqs` are all of its rows, and never in a pause. None: `seqs` are all rows.
        """
        guard = self.guards[all(seq.greedy for seq in seqs)]
        asked, is_judged = self._choose(guard, seqs, step_rows)
        late = [seq for seq in asked if not self._inside[seq.id]]
        begun_at = guard.clock()
        self._read_late(late)
        started_at = guard.clock() if late else begun_at
        if late and is_judged:
            guard.charge(len(seqs), started_at - begun_at, may_be_regained=True)
        if not all(self._inside[seq.id] for seq in late):
            asked = [seq for seq in asked if self._inside[seq.id]]
            # Because a forward for a few rows costs nearly that of all, and gains for a few alone.
            is_judged = False
        proposal = self.drafter.propose(asked) if asked else Proposal([], rests=guard.paused)
        if proposal.prompt_seconds and is_judged:
            begins = guard.account.begins
            guard.charge(len(seqs), proposal.prompt_seconds, may_be_regained=begins)
        # A guard around this one charges both. For it, too, they are no part of the step.
        prompt_seconds = started_at - begun_at + proposal.prompt_seconds
        started_at += proposal.prompt_seconds
        drafts = {seq.id: Draft.root(seq.tokens[-1]) for seq in seqs}
        drafts |= zip([seq.id for seq in asked], proposal.drafts, strict=True)
        time = None
        proposed_at = started_at
        if self._costs is not None and not _has_constraints(seqs):
            proposed_at = guard.clock()
            time = _time_of_drafts(seqs, proposal, proposed_at - started_at)
        memo = GuardMemo(
            asked=frozenset(seq.id for seq in asked),
            judge=guard if is_judged else None,
            length=sum(len(seq.tokens) for seq in seqs),
            rows=len(seqs),
            started_at=started_at,
            proposed_at=proposed_at,
            ran=proposal.forwards > 0,
            time=time,
            inner=proposal.memo,
        )
        return replace(
            proposal,
            drafts=[drafts[seq.id] for seq in seqs],
            prompt_seconds=prompt_seconds,
            memo=memo,
        )

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: GuardMemo | None) -> None:
        """Pass the outcomes on to the drafter, and judge the step."""
        asked = memo.asked if memo is not None else frozenset()
        of_drafter = [
            outcome for outcome in outcomes if self.wants_hidden or outcome.sequence.id in asked
        ]
        if of_drafter:
            self.drafter.observe(of_drafter, memo.inner if memo is not None else None)
        if memo is None or not _is_complete(outcomes, memo):
            return
        if memo.time is not None and self._costs is not None:
            target_ms = 1000 * (self.guards[True].clock() - memo.proposed_at)
            nodes = sum(len(outcome.draft) for outcome in outcomes)
            self._costs.observe(replace(memo.time, nodes=nodes, target_ms=target_ms))
        if memo.judge is None:
            return
        tokens = sum(len(outcome.sequence.tokens) for outcome in outcomes) - memo.length
        # A step in which the drafter ran nothing and proposed nothing measures a plain step.
        drafted = memo.ran or any(outcome.draft.drafted for outcome in outcomes)
        memo.judge.record(len(outcomes), tokens, memo.judge.clock() - memo.started_at, drafted)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence, as the drafter does."""
        self._inside.pop(seq.id, None)
        self._late.pop(seq.id, None)
        self.drafter.drop(seq)

    def _choose(
        self, guard: Guard, seqs: list[Sequence], step_rows: int | None
    ) -> tuple[list[Sequence], bool]:
        """Return the sequences to ask the drafter for, and whether the guard judges the step.

        Args:
            guard: that of the step's mode.
            seqs: see `propose`.
            step_rows: likewise.
        """
        is_shared = step_rows is not None
        rows = len(seqs) if step_rows is None else step_rows
        is_judged = not is_shared or (rows == len(seqs) and not guard.paused)
        is_drafting = guard.drafts(len(seqs)) if is_judged else not guard.paused
        asked = self._paying(seqs, rows) if is_drafting else []
        if is_shared and is_drafting and len(asked) < len(seqs):
            # Not comparable: not every row was drafted by us, or the other drafter drafts.
            is_judged = False
        if not is_judged and not asked:
            guard.account.pay_back()
        if self._admissions and not all(self._inside[seq.id] for seq in asked):
            # The others wait until those prompts are read.
            asked = [seq for seq in asked if self._inside[seq.id]]
            is_judged = is_judged and bool(asked)
        return asked, is_judged

    def _paying(self, seqs: list[Sequence], rows: int) -> list[Sequence]:
        """Return the sequences whose drafts are expected to pay in a step of `rows` rows."""
        context = mean_context(seqs)
        # Greedy and sampled rows are asked about apart, because their drafters may differ.
        of_modes = {}
        for greedy in sorted({seq.greedy for seq in seqs}):
            of_modes[greedy] = forecast(self.drafter, StepSituation(rows, context, greedy))
        # Where a step does not pay, texts that must be read first are not asked about one by one,
        # because that would take time in every step.
        return [
            seq
            for seq in seqs
            if of_modes[seq.greedy].pays
            and (self._inside[seq.id] or self._forecasts_gain(seq, rows))
        ]

    def _forecasts_gain(self, seq: Sequence, rows: int) -> bool:
        """Return whether drafts pay for a sequence whose text is yet to be read."""
        length = len(seq.tokens)
        situation = StepSituation(rows, length, seq.greedy, length, seq.remaining)
        return forecast(self.drafter, situation).pays

    def _read_late(self, seqs: list[Sequence]) -> None:
        """Have the drafter read texts that it has not read, up to two chunks of them in a step."""
        left = next_size(self._chunk)
        for seq in seqs:
            if left < 0:
                return
            if seq.id not in self._late:
                self._late[seq.id] = iter(self.drafter.admit(seq, None, self._chunk))
            for count in self._late[seq.id]:
                left -= count
                if left < 0:
                    return
            del self._late[seq.id]
            self._inside[seq.id] = True


def _is_complete(outcomes: abc.Sequence[RowOutcome], memo: GuardMemo) -> bool:
    """Return whether all rows of a step were given tokens, so that it is a measurement.

    A row whose scores are not numbers is left out if it had a draft, because it is decoded again
    alone. A row that ends with an error was given none, and a plain step would have given it none.
    """
    if len(outcomes) < memo.rows:
        return False
    return all(outcome.sequence.error is None for outcome in outcomes)


def _has_constraints(seqs: list[Sequence]) -> bool:
    """Return whether a sequence has a constraint, for which its steps may wait."""
    return any(seq.sampler.constraint is not None for seq in seqs)


def _time_of_drafts(seqs: list[Sequence], proposal: Proposal, seconds: float) -> StepTime:
    """Return a step's time as far as it is known when its drafts have been made."""
    modes = {seq.greedy for seq in seqs}
    return StepTime(
        rows=len(seqs),
        context=mean_context(seqs),
        greedy=modes.pop() if len(modes) == 1 else None,
        forwards=proposal.forwards,
        # Seconds of prompts were taken off, but not by the same clock.
        forward_rows=0 if proposal.prompt_seconds else proposal.forward_rows,
        by_head=proposal.by_head,
        draft_ms=1000 * seconds,
    )
