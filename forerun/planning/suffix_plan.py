"""Where suffix drafts can pay: how probable a token must be to be worth its place. Ours."""

from __future__ import annotations

from forerun.planning.cost_model import CostSource
from forerun.planning.forecast import UNKNOWN, Forecast, StepSituation

# Counts promise more than comes true: tokens predicted at 0.8 were accepted 68 to 83 % of the time.
# So a token must be predicted at so many times what it needs to be worth its place.
SURE = 1.5


class SuffixPlanner:
    """Say by costs how probable a token of a suffix draft must be, and where none can pay."""

    def __init__(self, costs: CostSource, least: float) -> None:
        """Take a table of costs.

        Args:
            costs: gives the table.
            least: the least probability of a token wherever it is cheap to verify.
        """
        self._costs = costs
        self._least = least

    def least(self, situation: StepSituation) -> float:
        """Return the least probability of a token that is drafted; above 1 if none can pay."""
        table = self._costs.table if situation.greedy else self._costs.table.sampled
        worth = table.at(situation.context, situation.rows).marginal(situation.rows)
        return max(self._least, SURE * worth)

    def forecast(self, situation: StepSituation) -> Forecast:
        """Return that drafts may save time, unless no token can be worth its place.

        How much they save follows from the text. It is read in negligible time.
        """
        return UNKNOWN if self.least(situation) <= 1 else Forecast(0.0)
