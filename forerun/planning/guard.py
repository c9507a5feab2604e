"""The guard (ours): stop drafting while it does not pay, and try again now and then.

It reads a clock, so *when* drafts are used differs from run to run. Greedy and seeded output does not, as a step
without a draft is a plain one. Without a seed every step keeps the target's distribution, but drafts consume random
numbers.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import median, median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.planning.cost_model import mean_context

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome

LOOKS = 2  # plain steps at the start, as the very first one is slow
# Times below are in plain steps.
ALLOWANCE = 4.0  # the loss allowed at the start, and from the peak: less ends drafts that gain, by luck alone
TRIAL = 0.75  # the loss allowed in a trial that has gained nothing
CHECK = 4  # the first pause, to measure plain steps again
# A later pause is a multiple of the loss. The multiple doubles up to 128, so failures cost 1/128 of the time.
FIRST, LONGEST = 16, 128
SHARE = 1 / 256  # of the time, for plain steps between drafting steps
SOON = (
    4.0  # until the first of them; the next takes twice as long, as a model's first steps are slow
)


class SpeedTracker:
    """Track the tokens and seconds of an engine's steps, and decide which steps draft. It outlives sequences.

    A drafting step of B rows that commits T tokens in s seconds gains T / B - s / p, where p is the time of a plain
    step of B rows: the median of the last three. Drafting goes on until it has lost `ALLOWANCE` since its peak; in a
    trial after a failure, `TRIAL` or its gain so far. The time of drafts' prompts is a loss too, except in a pause.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.wait = 0  # plain steps until drafting is tried again
        self.failures = 0  # successive trials that did not pay
        self._spare = 0  # the part of the pause that new sequences may shorten
        self._earned = self._peak = self._debt = 0.0
        self._plain: dict[int, deque[float]] = {}  # seconds by number of rows
        self.begins = True  # whether the next drafting step is the first of a trial
        self._looks = 0  # plain steps so far
        self._costs: deque[float] = deque(maxlen=5)  # seconds of the last drafting steps
        self._brought = self._spent = 0.0  # of about the last twenty
        self._since, self._soon = (
            0.0,
            SOON,
        )  # time since a plain step, and until the next is due at the latest

    @property
    def paused(self) -> bool:
        return self.wait > 0

    def pause(self, steps: int) -> None:
        """Begin a pause."""
        self.wait, self._spare = steps, steps // 2

    def begin(self, rows: int = 1) -> None:
        """Shorten a pause for a new sequence, whose text may suit drafting: by its latter half, or in a batch by the
        row's share of it."""
        share = self._spare // rows
        self._spare -= share
        self.wait = max(self.wait - share, 0)

    def drafts(self, rows: int) -> bool:
        """Return whether a step of N rows is to draft."""
        if self.paused or self._looks < LOOKS or rows not in self._plain:
            return False
        gain = self._brought / self._spent if self._spent else 1.0
        # A plain step is measured more often if drafting gains little, as that costs little.
        return self._since <= min(self._soon, max(1 - 1 / gain, 0.05) / SHARE)

    def charge(self, rows: int, seconds: float, late: bool) -> None:
        """Charge the time of drafts' prompts. `late`: at the beginning of a trial, which may gain it back."""
        if rows not in self._plain:
            return
        cost = seconds / self._plain_seconds(rows)
        if late:
            self._debt += cost
        else:
            self._earned -= cost

    def record(self, rows: int, tokens: int, seconds: float, drafted: bool) -> None:
        """Record one step of all rows, which committed `tokens` in all."""
        if not drafted:
            self._plain.setdefault(rows, deque(maxlen=3)).append(seconds)
            self._looks += 1
            if self._since:
                self._soon *= 2
            self.wait, self._since = max(self.wait - 1, 0), 0.0
            return
        cost = seconds / self._plain_seconds(rows)
        if self._costs:  # a step that the machine interrupted proves little
            cost = min(cost, 2 * median(self._costs))
            if (
                self.begins
            ):  # the draft model runs the tokens of the pause: a cost of the trial, not of a step
                usual = min(cost, median(self._costs))
                self._debt, cost = self._debt + cost - usual, usual
        self.begins = False
        self._costs.append(cost)
        # A draft makes no step cheaper. If it seems to, plain steps have become faster.
        self._since += cost if cost > 0.9 else inf
        self._brought = 0.95 * self._brought + tokens / rows
        self._spent = 0.95 * self._spent + cost
        self._earned += tokens / rows - cost
        self._peak = max(self._peak, self._earned)
        allowed = min(max(self._peak, TRIAL), ALLOWANCE) if self.failures else ALLOWANCE
        if self._peak - self._earned > allowed:
            self._pause()

    def _pause(self) -> None:
        wait, earned = CHECK, self._earned - self._debt
        if earned > 0:
            # A small gain may have been luck.
            self.failures = 0 if earned > 2 * ALLOWANCE else max(0, self.failures - 1)
        else:
            if self.failures:
                wait = ceil(-earned * min(FIRST * 2 ** (self.failures - 1), LONGEST))
            self.failures += 1
        self.pause(wait)
        self._earned = self._peak = self._debt = 0.0
        self.begins = True

    def _plain_seconds(self, rows: int) -> float:
        return max(median_low(self._plain[rows]), 1e-9)


@dataclass(frozen=True)
class GuardMemo:
    """What a guard keeps of a step until it observes it.

    Attributes:
        asked: the sequences for which the drafter was called.
        judge: what judges the step, if it is judged.
        length: the tokens of all sequences before the step.
        begun: when the step began, without the time of drafts' prompts.
        ran: whether the drafter ran a forward.
        inner: the drafter's own memo.
    """

    asked: frozenset[int]
    judge: SpeedTracker | None
    length: int
    begun: float
    ran: bool
    inner: Any

    @property
    def is_measuring(self) -> bool:
        """Return whether the step measures a plain step, so that nothing may be drafted in it."""
        return self.judge is not None and not self.asked


class Guarded(Drafter):
    """Wrap any drafter, and call it only while it pays.

    In other steps the drafter is not called, and sees later that sequences have grown. It admits a sequence when it
    first drafts for it, so a request that is paused throughout never runs the draft's prompt. A drafter that wants the
    target's hidden states admits at once and observes every step, as they come only once, with an empty draft in a
    pause.
    """

    def __init__(
        self, drafter: Drafter, pace: SpeedTracker, sampled: SpeedTracker | None = None
    ) -> None:
        """Wrap `drafter`. `pace` judges steps whose rows are all greedy, and `sampled` (default: a new one) steps with
        sampled rows, which cost and accept differently."""
        self.drafter = drafter
        self.paces = {
            True: pace,
            False: sampled if sampled is not None else SpeedTracker(pace.clock),
        }
        self.wants_hidden, self.spread = drafter.wants_hidden, drafter.spread
        self.reads = drafter.reads
        self._inside: dict[int, bool] = {}  # {sequence: whether the drafter has admitted it}
        self._admitting = False  # whether it is running a prompt, one at a time

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        self._inside[seq.id] = False
        pace = self.paces[seq.greedy]
        pace.begin(len(self._inside))
        # Prompts in a pause are run in any case, so they are not charged.
        pays = not pace.paused and self.drafter.pays(seq.rows, seq, len(seq.tokens))
        if self.wants_hidden or pays:
            self._admitting, seconds, begun = True, 0.0, pace.clock()
            try:
                for count in self.drafter.admit(seq, hidden, chunk):
                    seconds += pace.clock() - begun
                    yield count
                    begun = pace.clock()
            finally:
                self._admitting = False
            if pays:
                pace.charge(len(self._inside), seconds + pace.clock() - begun, late=False)
            self._inside[seq.id] = True

    def propose(self, seqs: list[Sequence], among: int | None = None) -> Proposal:
        """Return drafts, or empty ones in a pause. `among`: the number of rows of the step, if another drafter drafts
        for some of them. Such a step is judged only if `seqs` are all of its rows, and never in a pause."""
        pace = self.paces[all(seq.greedy for seq in seqs)]
        is_judged = among is None or (among == len(seqs) and not pace.paused)
        judge = pace if is_judged else None
        drafts = pace.drafts(len(seqs)) if judge is not None else not pace.paused
        rows = len(seqs) if among is None else among
        context = mean_context(seqs)

        def pays(seq: Sequence) -> bool:
            return self.drafter.pays(rows, None if self._inside[seq.id] else seq, context)

        asked = [seq for seq in seqs if drafts and pays(seq)]
        if drafts and len(asked) < len(seqs) and (asked or among is not None):
            judge = None  # where costs rule drafts out, another drafter's may stand, and some rows show nothing
        if judge is None and not asked:
            pace.wait = max(pace.wait - 1, 0)
        late = [seq for seq in asked if not self._inside[seq.id]]
        if late and self._admitting:  # they wait for that prompt; this step is not judged
            asked = [seq for seq in asked if self._inside[seq.id]]
            late, judge = [], None
        begun = pace.clock()
        for seq in late:
            for _ in self.drafter.admit(seq, None, len(seq.tokens)):
                pass
            self._inside[seq.id] = True
        if late and judge is not None:
            now = pace.clock()
            pace.charge(len(seqs), now - begun, late=True)
            begun = now
        proposal = self.drafter.propose(asked) if asked else Proposal([], rests=pace.paused)
        if proposal.prompt_seconds and judge is not None:
            pace.charge(len(seqs), proposal.prompt_seconds, late=pace.begins)
            begun += proposal.prompt_seconds
        found = dict(zip([seq.id for seq in asked], proposal.drafts, strict=True))
        length = sum(len(seq.tokens) for seq in seqs)
        memo = GuardMemo(
            frozenset(found), judge, length, begun, proposal.forwards > 0, proposal.memo
        )
        drafts_of_all = [found.get(seq.id) or Draft.root(seq.tokens[-1]) for seq in seqs]
        return replace(proposal, drafts=drafts_of_all, memo=memo)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: GuardMemo | None) -> None:
        asked = memo.asked if memo is not None else frozenset()
        rows = [
            outcome for outcome in outcomes if self.wants_hidden or outcome.sequence.id in asked
        ]
        if rows:
            self.drafter.observe(rows, memo.inner if memo is not None else None)
        if memo is None or memo.judge is None:
            return  # steps without rows of this drafter are not judged
        tokens = sum(len(outcome.sequence.tokens) for outcome in outcomes) - memo.length
        # A step in which the drafter ran nothing and proposed nothing measures a plain step.
        drafted = memo.ran or any(outcome.draft.drafted for outcome in outcomes)
        memo.judge.record(len(outcomes), tokens, memo.judge.clock() - memo.begun, drafted)

    def drop(self, seq: Sequence) -> None:
        self._inside.pop(seq.id, None)
        self.drafter.drop(seq)
