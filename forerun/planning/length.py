"""How many tokens a chain drafts: the number with the least expected ms per token. Ours."""

from __future__ import annotations

from collections import abc
from itertools import accumulate
from operator import mul

from forerun.planning.cost_model import CostSource
from forerun.planning.forecast import Forecast, StepSituation

LONGEST_CHAIN = 16  # tokens of the longest chain whose length follows from costs
EXPECTED_ACCEPTANCE = 0.75  # how often a token is accepted, where no estimate is made
# An estimate is a mean in which each draft counts DRAFT_DECAY times as much as the next one, and
# the expected acceptance counts as PRIOR_DRAFTS drafts.
PRIOR_ACCEPTANCE = 0.7
PRIOR_DRAFTS = 4.0
DRAFT_DECAY = 0.98


class ChainPlanner:
    """Forecast from a table of costs what the chains of a draft model save."""

    def __init__(self, costs: CostSource) -> None:
        self._costs = costs

    def forecast(self, situation: StepSituation) -> Forecast:
        """Return what chains of the best length save, if EXPECTED_ACCEPTANCE comes true.

        Estimates (`LengthChooser`) would not do here, because nothing corrects them while nothing
        is drafted. Whether enough tokens are accepted is the guard's question.

        All rows read their prompts, and then share the time that is saved.
        """
        step_ms = _steps(self._costs, situation)
        # At least 0, because a step without drafts is one of these.
        saved = step_ms[0] - min(token_ms(step_ms, [EXPECTED_ACCEPTANCE] * LONGEST_CHAIN))
        reading = 0.0
        if situation.unread:  # nothing is sampled while a prompt is read
            middle = self._costs.table.at(situation.context - situation.unread / 2)
            reading = middle.reading(situation.rows * situation.unread)
        return Forecast(saved, saved * situation.remaining, reading)


class LengthChooser:
    """Choose the length of a draft model's chains, by costs and by what was accepted lately.

    It estimates how often tokens of each place are accepted, in greedy decoding and in sampling
    apart. The first place is expected to have PRIOR_ACCEPTANCE, and each later one the estimate of
    the place before it.
    """

    def __init__(self, costs: CostSource) -> None:
        self._costs = costs
        # By greediness and place: drafts that tested it, and drafts in which it was accepted.
        self._tested = {greedy: [0.0] * LONGEST_CHAIN for greedy in (True, False)}
        self._accepted = {greedy: [0.0] * LONGEST_CHAIN for greedy in (True, False)}

    def length(self, situation: StepSituation) -> int:
        """Return the number of tokens to draft.

        It is at least 1, because the forecast has decided that the step drafts, and because
        acceptance is only estimated where something is drafted.
        """
        step_ms = _steps(self._costs, situation)
        return max(1, best_length(step_ms, self.estimates(situation.greedy)))

    def estimates(self, greedy: bool) -> list[float]:
        """Return how often a token of each place is accepted if those before it are."""
        estimates = []
        estimate = PRIOR_ACCEPTANCE
        for tested, accepted in zip(self._tested[greedy], self._accepted[greedy], strict=True):
            estimate = (accepted + PRIOR_DRAFTS * estimate) / (tested + PRIOR_DRAFTS)
            estimates.append(estimate)
        return estimates

    def record(self, greedy: bool, tested: int, accepted: int) -> None:
        """Record how many tokens of a draft were tested, and how many of them accepted."""
        of_tested = self._tested[greedy]
        of_accepted = self._accepted[greedy]
        for place in range(min(tested, LONGEST_CHAIN)):
            of_tested[place] = DRAFT_DECAY * of_tested[place] + 1
            of_accepted[place] = DRAFT_DECAY * of_accepted[place] + (place < accepted)


def _steps(costs: CostSource, situation: StepSituation) -> tuple[float, ...]:
    """Return the ms of steps in a situation that draft 0, 1, ... tokens (`Costs.steps`)."""
    table = costs.table if situation.greedy else costs.table.sampled
    return table.at(situation.context, situation.rows).steps(situation.rows, LONGEST_CHAIN)


def token_ms(step_ms: abc.Sequence[float], acceptance: abc.Sequence[float]) -> list[float]:
    """Return the expected ms per token by the number of drafted tokens, from 0 on.

    Args:
        step_ms: the time of a whole step by the same number (`Costs.steps`).
        acceptance: how often the token of each place is accepted if those before it are.
    """
    tokens = accumulate(accumulate(acceptance, mul), initial=1.0)
    return [ms / count for ms, count in zip(step_ms, tokens, strict=False)]


def best_length(step_ms: abc.Sequence[float], acceptance: abc.Sequence[float]) -> int:
    """Return the number of drafted tokens with the least ms per token (arguments: `token_ms`)."""
    by_length = token_ms(step_ms, acceptance)
    return by_length.index(min(by_length))
