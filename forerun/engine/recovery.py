"""What an engine does after a failed step: undo it, and find the sequence that is to blame."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from forerun.engine.reporting import Reports
from forerun.engine.retries import Retries
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Phase, Sequence
from forerun.engine.step import Drafter
from forerun.engine.target import Target

_LOG = logging.getLogger("forerun.engine.recovery")


class Recovery:
    """The way back from a failed step."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        scheduler: Scheduler,
        retries: Retries,
        reports: Reports,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._scheduler = scheduler
        self._retries = retries
        self._reports = reports

    def undo(self) -> list[Sequence]:
        """Drop all rows, and requeue their sequences as they were before the step.

        A sequence keeps tokens that were reported, because its caller would see them twice.

        Return the sequences that the step ran; none if it failed before it ran any.
        """
        ended = self._reports.ended
        stepped = []
        for seq in self._scheduler.admitted:
            if seq.checkpoint is not None and seq.id not in ended:
                stepped.append(seq)
                if self._reports.holds_later(seq, seq.checkpoint.steps):
                    seq.checkpoint = None
                else:
                    seq.restore()
            self._drafter.drop(seq)  # after `restore`: undone tokens are no output to draft from
        self._target.reset()
        self._scheduler.requeue_all()
        return stepped

    def blame(self, seqs: list[Sequence], error: BaseException) -> None:
        """End the sequence of a failed step or prefill if it ran alone and is to blame.

        Otherwise the sequences, which are in the queue, are tried again one by one. The log has the
        error in one line then, because the same error with its traceback is the caller's if it
        recurs. At the level DEBUG the log has the traceback too.
        """
        if not self._retries.failed(seqs):
            _LOG.warning(
                "a step failed (%s); its requests (%d) are decoded again, each alone",
                _in_one_line(error),
                len(seqs),
            )
            _LOG.debug("the traceback of the failed step", exc_info=error)
            return
        seq = seqs[0]
        seq.error = error
        seq.phase = Phase.ENDED
        self._scheduler.waiting.remove(seq)
        self._reports.add_end(seq)


def _in_one_line(error: BaseException) -> str:
    """Return an error's type, its first line of text and the line of code that raised it."""
    text = str(error).strip() or "no reason given"
    frames = traceback.extract_tb(error.__traceback__)
    place = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text.splitlines()[0]}{place}"
