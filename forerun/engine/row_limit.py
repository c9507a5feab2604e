"""How many rows run together, as failures show."""

from __future__ import annotations

PATIENCE = 128  # steps of the most rows that passed before more are tried


class RowLimit:
    """Bounds the rows of a step when several have failed although each of them passes alone, as for want of memory."""

    def __init__(self, rows: int) -> None:
        self._rows, self._most = rows, rows
        self._failed_together, self._passed = False, 0

    @property
    def most(self) -> int:
        return self._most

    def failed(self, rows: int) -> None:
        """Counts a step of several rows that failed. They are stepped alone next; if they fail together again, it is
        their number."""
        if self._failed_together:
            self._most = max(1, rows // 2)
        self._failed_together, self._passed = True, 0

    def explained(self) -> None:
        """One of the rows has failed alone."""
        self._failed_together = False

    def passed(self, rows: int) -> None:
        """Counts a step that passed; more rows are tried after PATIENCE steps of the most rows."""
        if self._most == self._rows:
            return
        self._passed += rows >= self._most
        if self._passed >= PATIENCE:
            self._most, self._passed = min(2 * self._most, self._rows), 0
            self._failed_together &= self._most < self._rows
