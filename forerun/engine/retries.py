"""Which sequences are stepped together after a failed step."""

from __future__ import annotations

from forerun.engine.sequence import Sequence

# So many steps with the most rows that are allowed must pass before more rows are tried.
PASSES_BEFORE_MORE_ROWS = 128


class Retries:
    """The search for the cause of failed steps.

    The sequences of a failed step are suspects, and each is stepped alone once. One that fails
    alone is to blame. If all pass alone and then fail together again, their number is the cause,
    for example because memory is short: then fewer run together.
    """

    def __init__(self, rows: int) -> None:
        self._max_rows = rows
        self._allowed_rows = rows
        self._failed_together = False
        self._passes = 0  # of steps with `_allowed_rows` rows, since that number changed

    def choose(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences to step now: the suspect alone if there is one, else all.

        There is at most one, because nothing joins beside a suspect (`may_join`).
        """
        return [seq for seq in running if seq.suspect] or running

    def may_join(self, running: list[Sequence]) -> bool:
        """Return whether another sequence may run beside these."""
        return len(running) < self._allowed_rows and not any(seq.suspect for seq in running)

    def passed(self, seqs: list[Sequence]) -> None:
        """Count a step that passed."""
        for seq in seqs:
            seq.suspect = False
        if self._allowed_rows == self._max_rows:
            return
        self._passes += len(seqs) >= self._allowed_rows
        if self._passes >= PASSES_BEFORE_MORE_ROWS:
            self._passes = 0
            self._allowed_rows = min(2 * self._allowed_rows, self._max_rows)
            self._failed_together &= self._allowed_rows < self._max_rows

    def failed(self, seqs: list[Sequence]) -> bool:
        """Count a step or a prefill that failed. Return whether its only sequence is to blame."""
        if len(seqs) == 1 and (seqs[0].suspect or seqs[0].error is not None):
            self._failed_together = False
            return True
        for seq in seqs:
            seq.suspect = True
        if len(seqs) > 1:
            if self._failed_together:
                self._allowed_rows = max(1, len(seqs) // 2)
            self._failed_together = True
            self._passes = 0
        return False
