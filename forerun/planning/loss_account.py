"""The account of what drafting may lose against plain decoding. Its rules are ours."""

from __future__ import annotations

from math import ceil

# Losses below are in plain steps.
# With a smaller allowed loss, drafts that gain are ended by bad luck alone.
ALLOWED_LOSS = 4.0  # since the balance was highest
ALLOWED_TRIAL_LOSS = 0.75  # in a trial after a failed one, if it has gained nothing
CREDIT = 2 * ALLOWED_LOSS  # the first balance, and the most that a later trial inherits
CHECK_PAUSE = 4  # the least pause: plain steps are measured again
# A longer pause is a multiple of the debt. The multiple doubles with each failed trial, so that
# trials that never pay cost 1/128 of the time.
PAUSE_PER_LOSS = 16
MAX_PAUSE_PER_LOSS = 128


class LossAccount:
    """One balance of drafting against plain decoding, in plain steps.

    Everything that drafting costs or gains is booked here: drafting steps, the time in which
    drafters read prompts, and the tokens of a pause that a draft model runs late.

    Drafting goes on, as one trial, until the balance has fallen by `ALLOWED_LOSS` since it was
    highest. After a failed trial it ends after it has lost as much as it had gained, or
    `ALLOWED_TRIAL_LOSS`. Then a pause of plain steps follows. If drafting is in debt, the pause
    pays the debt back, at a rate of at most 1 / `PAUSE_PER_LOSS`. Only the first failure after a
    trial that paid is followed by a short pause, because plain steps may have been measured
    wrongly. Its debt is carried into the next trial. Gains beyond `CREDIT` pay for no later trial.

    So what is lost in all is bounded: by CREDIT, by what is booked in two trials, and by
    1 / `PAUSE_PER_LOSS` for each plain step in a pause. New sequences may double this share.

    Attributes:
        balance: of everything that was booked, less what pauses have paid back.
        wait: plain steps until drafting is tried again.
        failures: successive trials that did not pay.
        begins: whether the next drafting step is the first of a trial.
    """

    def __init__(self) -> None:
        self.balance = CREDIT
        self.wait = 0
        self.failures = 0
        self.begins = True
        self._inherited = CREDIT  # the balance when the trial began
        # The same, less the reading that the trial may gain back. From here it gains.
        self._lowest_start = CREDIT
        self._highest = CREDIT  # the highest balance of the trial, less the same reading
        self._repaid = 0.0  # of the debt, by each plain step of the pause
        self._spare_wait = 0  # the part of the pause that new sequences may shorten

    @property
    def paused(self) -> bool:
        """Whether nothing is drafted for the time being."""
        return self.wait > 0

    def book_step(self, gain: float) -> None:
        """Book a drafting step that took `gain` plain steps less than its tokens are worth."""
        self.begins = False
        self.balance += gain
        self._highest = max(self._highest, self.balance)
        allowed = ALLOWED_LOSS
        if self.failures:
            gained = self._highest - self._lowest_start
            allowed = min(max(gained, ALLOWED_TRIAL_LOSS), ALLOWED_LOSS)
        if self._highest - self.balance > allowed:
            self._end_trial()

    def book_reading(self, cost: float, may_be_regained: bool) -> None:
        """Book the time in which drafters read texts.

        Args:
            cost: in plain steps.
            may_be_regained: whether the trial goes on although it has lost this. It counts when
                the trial ends.
        """
        self.balance -= cost
        if may_be_regained:
            self._lowest_start -= cost
            self._highest -= cost

    def pay_back(self) -> None:
        """Count a plain step, which shortens a pause."""
        self._shorten(1)

    def pause(self, steps: int, repaid: float = 0.0) -> None:
        """Begin a pause of plain steps. Each pays back `repaid` plain steps of the debt."""
        self.wait = steps
        self._repaid = repaid
        self._spare_wait = steps // 2

    def shorten_pause(self, rows: int = 1) -> None:
        """Shorten a pause for a new sequence, because its text may suit drafting.

        A single row takes off the latter half of the pause, a row of a batch its share of that.
        That part of the debt is forgiven.
        """
        share = self._spare_wait // rows
        self._spare_wait -= share
        self._shorten(share)

    def _shorten(self, steps: int) -> None:
        """Take steps off a pause, and the debt that they pay back, if there is a pause."""
        if not self.wait:
            return
        self.wait = max(self.wait - steps, 0)
        if self._repaid:
            self._inherit(-self.wait * self._repaid)

    def _end_trial(self) -> None:
        # A trial must pay an inherited debt before it gains. Inherited credit is no gain.
        gained = min(self.balance - self._inherited, self.balance)
        pause = CHECK_PAUSE
        repaid = 0.0
        if gained > CREDIT:
            self.failures = 0
        elif gained > 0:  # this may have been luck
            self.failures = max(0, self.failures - 1)
        else:
            debt = max(-self.balance, 0.0)
            if self.failures and debt:
                per_loss = min(PAUSE_PER_LOSS * 2 ** (self.failures - 1), MAX_PAUSE_PER_LOSS)
                pause = max(pause, ceil(debt * per_loss))
                repaid = debt / pause
            self.failures += 1
            self.balance = -debt  # no credit is left after a failure
        self._inherit(min(self.balance, CREDIT))
        self.begins = True
        self.pause(pause, repaid)

    def _inherit(self, balance: float) -> None:
        """Set the balance with which the next trial begins."""
        self.balance = balance
        self._inherited = balance
        self._lowest_start = balance
        self._highest = balance
