"""The question whether drafts are expected to pay, and what answers it from a table of costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from forerun.engine.step import Drafter


@dataclass(frozen=True)
class StepSituation:
    """What a planner is asked about: a step, or a row whose text a drafter has yet to read.

    Attributes:
        rows: all rows of the step. The others are assumed to be like the one asked about.
        context: tokens of a row; of several rows the mean.
        greedy: whether the rows asked about decode greedily. The others are assumed to do so too.
        unread: tokens of the row that the drafter must read before it can draft.
        remaining: tokens that the row may still get, whose savings must make good the reading.
    """

    rows: int
    context: float = 0.0
    greedy: bool = True
    unread: int = 0
    remaining: int = 0


@dataclass(frozen=True)
class Forecast:
    """What drafts are expected to save in a situation, in ms.

    Attributes:
        saved: the time per token of each row without these drafts, less that with them.
        gained: what the drafts save in all, in this step and for the remaining tokens.
        reading: how long the drafter takes to read what it has not read.
    """

    saved: float
    gained: float = 0.0
    reading: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether drafts save time, and enough of it to make good the reading."""
        return self.saved > 0 and self.gained >= self.reading


UNKNOWN = Forecast(inf, inf)  # drafts without known costs are tried, and a guard measures them


class Planner(Protocol):
    """What forecasts from a table of costs how much a kind of draft saves."""

    def forecast(self, situation: StepSituation) -> Forecast:
        """Return what drafts are expected to save in a situation."""
        raise NotImplementedError


class PlannedDrafter(Drafter):
    """A drafter that declares what its drafts cost, by its planner; None if that is not known."""

    planner: Planner | None = None


class PlannerByMode:
    """The planner of two drafters, one of which drafts for greedy rows and one for sampled rows."""

    def __init__(self, greedy: Drafter, sampled: Drafter) -> None:
        self.drafters = {True: greedy, False: sampled}

    def forecast(self, situation: StepSituation) -> Forecast:
        """Return the forecast of the mode's drafter. A step of both modes is asked about twice."""
        return forecast(self.drafters[situation.greedy], situation)


def forecast(drafter: Drafter, situation: StepSituation) -> Forecast:
    """Return what a drafter's planner forecasts, `UNKNOWN` if it has none."""
    planner = drafter.planner if isinstance(drafter, PlannedDrafter) else None
    return planner.forecast(situation) if planner is not None else UNKNOWN
