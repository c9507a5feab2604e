"""Choose which sequences are stepped together after a failed step."""

from __future__ import annotations

from forerun.engine.sequence import Sequence

PATIENCE = 128  # steps with the most allowed rows that must pass before more are tried


class Retries:
    """Find the cause of failed steps.

    Sequences of a failed step are suspects, and each is stepped alone once. One that fails alone is to blame. If all
    pass alone and fail together again, their number is the cause, as if memory is short: then fewer run together.
    """

    def __init__(self, rows: int) -> None:
        self._rows, self._most = rows, rows
        self._failed_together, self._passed = False, 0

    def choose(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences to step now: a suspect alone, else all."""
        return [seq for seq in running if seq.suspect] or running

    def may_join(self, running: list[Sequence]) -> bool:
        """Return whether another sequence may run beside these."""
        return len(running) < self._most and not any(seq.suspect for seq in running)

    def passed(self, seqs: list[Sequence]) -> None:
        """Count a step that passed."""
        for seq in seqs:
            seq.suspect = False
        if self._most == self._rows:
            return
        self._passed += len(seqs) >= self._most
        if self._passed >= PATIENCE:
            self._most, self._passed = min(2 * self._most, self._rows), 0
            self._failed_together &= self._most < self._rows

    def failed(self, seqs: list[Sequence]) -> bool:
        """Count a step or a prefill that failed. Return whether its only sequence is to blame."""
        if len(seqs) == 1 and (seqs[0].suspect or seqs[0].error is not None):
            self._failed_together = False
            return True
        for seq in seqs:
            seq.suspect = True
        if len(seqs) > 1:
            if self._failed_together:
                self._most = max(1, len(seqs) // 2)
            self._failed_together, self._passed = True, 0
        return False
