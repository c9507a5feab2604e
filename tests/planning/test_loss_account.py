"""What drafting may lose in all: the balance of everything that is booked is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.planning.loss_account import (
    ALLOWED_LOSS,
    CHECK_PAUSE,
    CREDIT,
    MAX_PAUSE_PER_LOSS,
    PAUSE_PER_LOSS,
    LossAccount,
)

WORST_STEP = 2.0  # plain steps that a drafting step may lose below
READING = 10.0  # the most that is read at once below


class Ledger:
    """Runs an account, and keeps what was booked in all and how many plain steps were taken."""

    def __init__(self) -> None:
        self.account = LossAccount()
        self.booked = 0.0
        self.plain = 0
        self.worst_trial = 0.0  # the most that one trial lost below its beginning
        self._of_trial = 0.0

    def step(self, gain: float) -> None:
        """Take a drafting step, or a plain one in a pause."""
        if self.account.paused:
            self.account.pay_back()
            self.plain += 1
            self._of_trial = 0.0
            return
        self.account.book_step(gain)
        self._add(gain)

    def read(self, cost: float, may_be_regained: bool) -> None:
        if not self.account.paused:
            self.account.book_reading(cost, may_be_regained)
            self._add(-cost)

    def _add(self, gain: float) -> None:
        self.booked += gain
        self._of_trial += gain
        self.worst_trial = max(self.worst_trial, -self._of_trial)

    @property
    def bound(self) -> float:
        """The most that may be lost: twice the share, because new sequences halve pauses."""
        return CREDIT + 2 * self.worst_trial + 2 * self.plain / PAUSE_PER_LOSS


@given(st.data())
def test_whatever_is_booked_the_loss_is_bounded(data: st.DataObject) -> None:
    """By adverse steps, readings and new sequences in any order, and with luck in between."""
    ledger = Ledger()
    kinds = st.sampled_from(["lose", "lose", "lose", "gain", "read", "read late", "new"])
    for kind in data.draw(st.lists(kinds, max_size=30)):
        size = data.draw(st.floats(0.0, 1.0))
        if kind == "lose":
            for _ in range(data.draw(st.sampled_from([1, 6, 40, 300]))):
                ledger.step(-WORST_STEP * size)
                assert ledger.booked >= -ledger.bound - 1e-6
        elif kind == "gain":
            for _ in range(data.draw(st.integers(1, 12))):
                ledger.step(size)
        elif kind == "new":
            ledger.account.shorten_pause(1)
        else:
            ledger.read(READING * size, kind == "read late")
        assert ledger.booked >= -ledger.bound - 1e-6


def test_little_luck_does_not_excuse_large_losses() -> None:
    """Trials that end a little above nothing leave no right to lose much more for nothing."""
    ledger = Ledger()
    for step in range(4000):
        ledger.step(1.0 if step % 9 < 4 else -1.0)
    assert ledger.booked > -CREDIT - 2 * ledger.worst_trial - ledger.plain / PAUSE_PER_LOSS
    assert ledger.plain > 3000


def test_drafts_that_never_pay_cost_a_small_share_in_the_end() -> None:
    ledger = Ledger()
    for _ in range(20_000):
        ledger.step(-1.0)
    assert -ledger.booked < 20_000 / MAX_PAUSE_PER_LOSS + 20


def test_gains_pay_for_later_losses_up_to_the_credit_only() -> None:
    """A trial that has gained most ends after the allowed loss, and so does the next one."""
    ledger = Ledger()
    for _ in range(500):
        ledger.step(1.0)
    gained = ledger.booked
    for _ in range(40):
        ledger.step(-1.0)
    lost = gained - ledger.booked
    assert lost <= 2 * (ALLOWED_LOSS + 1) + 2
    assert ledger.plain >= 40 - lost


def test_every_source_of_loss_is_in_the_one_balance() -> None:
    account = LossAccount()
    account.book_step(-1.0)
    account.book_reading(2.0, may_be_regained=True)
    account.book_reading(0.5, may_be_regained=False)
    assert account.balance == CREDIT - 3.5 and not account.paused
    account.book_step(-ALLOWED_LOSS)
    assert account.wait == CHECK_PAUSE and account.balance == 0.0  # no credit after a failure
    for _ in range(CHECK_PAUSE):
        account.pay_back()
    account.book_reading(3.0, may_be_regained=True)
    assert not account.paused
    account.book_step(-1.0)
    assert account.wait == 4 * PAUSE_PER_LOSS and account.balance == -4.0
    for _ in range(PAUSE_PER_LOSS):
        account.pay_back()
    assert account.balance == -3.0
    # A new sequence takes off half of the pause that was, and that part of the debt.
    account.shorten_pause()
    assert account.wait == PAUSE_PER_LOSS and account.balance == -1.0
    account.pay_back()
    for _ in range(PAUSE_PER_LOSS):
        account.pay_back()
    assert not account.paused and account.balance == 0.0
