"""Never slower: drafts are left out while they do not pay, and tried again now and then.

The guard is ours. It reads a clock, so *when* drafts are used differs from run to run. What is said does not: a step
without a draft is a plain one, and every step keeps the target's law, whichever way it goes. Drawn tokens do differ
under one seed, because drafts use up random numbers of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf
from statistics import median, median_low
from time import perf_counter

from torch import Tensor

from forerun.decode import Drafter, Generation, Proposal
from forerun.draft import Draft
from forerun.sampling import Verdict

LOOKS = 2  # plain steps before anything else, as the very first one is slow
# In plain steps, which are the unit of everything below.
ALLOWANCE = 2.0  # what drafting may lose at the start
MOST = 4.0  # what it may lose again of its earnings
CHECK = 4  # the first pause, which is there to see what a plain step costs now
# A later pause is a multiple of what was lost, which doubles up to 128: failures cost 1/128 of the time.
FIRST, LONGEST = 16, 128
SHARE = 1 / 256  # of the time, for plain steps amid drafting


class Pace:
    """What the steps of a decoder cost and brought, and whether the next one is to draft. It outlives calls.

    A drafting step of B rows that commits T tokens in s seconds earns T / B - s / p, where p is the time of a plain
    step of B rows: the median of the last three. Drafting goes on until it has lost `ALLOWANCE`, or what it had earned,
    but no more than `MOST`, since its peak. Where it has lost before, its first losing step ends it.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.wait = 0  # plain steps until drafting is tried again
        self.failures = 0  # times in a row that drafting did not pay
        self._earned = self._peak = self._debt = 0.0
        self._plain: dict[int, deque[float]] = {}  # seconds by number of rows
        self._looks = 0  # plain steps so far
        self._costs: deque[float] = deque(maxlen=5)  # of the last drafting steps
        self._brought = self._spent = 0.0  # of the last twenty or so
        self._since = 0.0  # time since a plain step

    @property
    def paused(self) -> bool:
        return self.wait > 0

    def begin(self) -> None:
        """A new call has new text: it need not wait for all of a pause that another text has earned."""
        self.wait //= 2

    def drafts(self, rows: int) -> bool:
        """Whether a step of that many rows is to draft."""
        return not self.paused and self._looks >= LOOKS and rows in self._plain and not self._is_due()

    def _is_due(self) -> bool:
        """Whether to look what a plain step costs now: more often where drafting gains little, and so loses little."""
        gain = self._brought / self._spent if self._spent else 1.0
        return self._since * SHARE > max(1 - 1 / gain, 0.05)

    def charge(self, rows: int, seconds: float) -> None:
        """Time that a draft's prompt took, which is put on the bill if drafting then fails."""
        self._debt += seconds / self._plain_seconds(rows)

    def saw(self, rows: int, tokens: int, seconds: float, drafted: bool) -> None:
        """One step of all rows, which committed `tokens` altogether."""
        if not drafted:
            self._plain.setdefault(rows, deque(maxlen=3)).append(seconds)
            self._looks += 1
            self.wait, self._since = max(self.wait - 1, 0), 0.0
            return
        cost = seconds / self._plain_seconds(rows)
        if self._costs:  # a step that the machine interrupted says little
            cost = min(cost, 2 * median(self._costs))
        self._costs.append(cost)
        # A draft on top makes no step cheaper: where it seems to, plain steps are faster now than they were.
        self._since += cost if cost > 0.75 else inf
        self._brought = 0.95 * self._brought + tokens / rows
        self._spent = 0.95 * self._spent + cost
        self._earned += tokens / rows - cost
        self._peak = max(self._peak, self._earned)
        least = ALLOWANCE if not self.failures else 0.0
        if self._peak - self._earned > min(max(self._peak, least), MOST):
            self._pause()

    def _pause(self) -> None:
        self.wait = CHECK
        if self._earned > 0:
            self.failures = 0
        else:
            if self.failures:
                multiple = min(FIRST * 2 ** (self.failures - 1), LONGEST)
                self.wait = ceil((self._debt - self._earned) * multiple)
            self.failures += 1
        self._earned = self._peak = self._debt = 0.0

    def _plain_seconds(self, rows: int) -> float:
        return max(median_low(self._plain[rows]), 1e-9)


class Guarded:
    """Any drafter, asked only when `pace` finds that it pays.

    The drafter is not told of the other steps: all that it knows of a sequence is that it has grown. It starts as late
    as it is wanted, with sequences that have grown or ended meanwhile, so a call that is paused to its end never runs
    the draft's prompt. One that wants the target's hidden states starts at once and observes every step, as they come
    only once: where it was not asked, the draft is a bare root.
    """

    def __init__(self, drafter: Drafter, pace: Pace) -> None:
        self.drafter, self.pace = drafter, pace
        self.wants_hidden = drafter.wants_hidden

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self.pace.begin()
        self._started = self.wants_hidden or not self.pace.paused
        if self._started:
            self.drafter.start(seqs, hidden)

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        self._asked = self.pace.drafts(len(seqs))
        self._length = sum(len(seq.tokens) for seq in seqs)
        self._begun = self.pace.clock()
        if not self._asked:
            return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
        if not self._started:
            self._started = True
            self.drafter.start(seqs)
            now = self.pace.clock()
            self.pace.charge(len(seqs), now - self._begun)
            self._begun = now
        return self.drafter.propose(seqs)

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        if self._asked or self.wants_hidden:
            self.drafter.observe(seqs, drafts, verdicts, hidden)
        tokens = sum(len(seq.tokens) for seq in seqs) - self._length
        # A drafter that had nothing to propose has shown what a plain step costs.
        drafted = any(draft.drafted for draft in drafts)
        self.pace.saw(len(seqs), tokens, self.pace.clock() - self._begun, drafted)

    def keep(self, rows: list[int]) -> None:
        if self._started:
            self.drafter.keep(rows)
