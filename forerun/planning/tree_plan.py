"""How deep and how wide a step's trees grow, by their expected tokens per ms.

This applies Pacer's idea (arXiv 2602.01274) to trees. The rule is ours.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from forerun.planning.cost_model import Costs, CostSource, mean_context, rounded
from forerun.planning.forecast import Forecast, StepSituation

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence

Array = np.ndarray[Any, Any]
# (shift, slope, mean acceptance) of each place ahead. The first two calibrate log-odds.
Curves = abc.Sequence[abc.Sequence[float]]

TreeKey = tuple[bool, int, int]  # greediness, rows and context of a step

_CERTAIN = 1 - 1e-6  # probabilities are capped at this, because log-odds of 1 are infinite


class Calibrated(Protocol):
    """A head that knows how often its tokens are accepted."""

    curves: list[list[float]]


class TreeCosts:
    """The ms of a step's parts, for a number of rows.

    Attributes:
        state: a head's next state for all rows.
        nodes: the most nodes of a row.
        verify: [n] a target forward of the rows' last tokens and n nodes.
    """

    def __init__(self, costs: Costs, rows: int, nodes: int, beams: int = 1) -> None:
        """Take the costs from a table. `beams`: states that a row has at one depth."""
        self.state = costs.head_ms(rows * beams)
        self.nodes = nodes
        self.verify = [costs.verify(rows + count) for count in range(rows * nodes + 1)]


@dataclass
class Group:
    """Rows that stop together, because a node of one takes time of all of them.

    Attributes:
        costs: of steps with this number of rows.
        fresh: whether the head drafts states for any of them.
        spent: ms of the states so far.
    """

    rows: list[int]
    costs: TreeCosts
    fresh: bool
    spent: float = 0.0

    @property
    def state(self) -> float:
        """The ms of one more state."""
        return self.costs.state if self.fresh else 0.0

    def rate(self, survival: list[list[float]], ms: float = 0.0) -> tuple[float, int]:
        """Return the highest expected tokens per ms of a step, and the number of nodes for it.

        Args:
            survival: the probabilities that the nodes of each row are accepted.
            ms: the time of further states.
        """
        spent = self.spent + ms
        tokens = float(len(survival))
        highest = tokens / (spent + self.costs.verify[0])
        size = 0
        for count, probability in enumerate(sorted(chain(*survival), reverse=True), 1):
            tokens += probability
            rate = tokens / (spent + self.costs.verify[count])
            if rate > highest:
                highest = rate
                size = count
        return highest, size


class TreePlan:
    """One step's depth and number of nodes: those with the most expected tokens per ms.

    They follow from the head's calibrated probabilities and a table of costs.

    Attributes:
        curves: [row][depth] the calibration of each place.
        deep: the number of states of each row so far.
        survival: [row] the probabilities that its best paths so far are accepted, highest first.
        longest: [row] the probability that its longest path is accepted; 0 once that has ended.
    """

    def __init__(
        self, groups: list[Group], curves: Curves, block: int, limits: list[int], ahead: list[int]
    ) -> None:
        """Begin a step.

        Args:
            groups: the rows that stop together.
            curves: the head's calibration (`HiddenConfig`).
            block: the number of states that are drafted at a time.
            limits: the greatest depth of each row.
            ahead: by how many places each row's first logits were drafted ahead in an earlier step;
                0 for new ones.
        """
        self.groups = groups
        self.block = block
        self.limits = limits
        self.curves: list[list[abc.Sequence[float]]] = []
        depths = range(max(*limits, 1) + 1)
        for first in ahead:
            self.curves.append([curves[min(first + k, len(curves) - 1)] for k in depths])
        self.deep = [min(limit, block) for limit in limits]
        for group in groups:
            group.spent = self._deepest(group) * group.state
        self.survival: list[list[float]] = [[] for _ in limits]
        self.longest = [1.0 if limit else 0.0 for limit in limits]

    def gains(self, k: int, logs: Array) -> Array:
        """Return calibrated log-probabilities [B, w, m] for those of tokens at depth k."""
        curves = np.array([curves_of_row[k] for curves_of_row in self.curves])
        shift, slope, _ = curves.T[:, :, None, None]
        odds = logs - np.log1p(-np.exp(logs).clip(max=_CERTAIN))
        with np.errstate(invalid="ignore"):  # because logits may be NaN
            return -np.logaddexp(0, -shift - slope * odds)

    def deeper(self, k: int, values: Array) -> list[bool]:
        """Return whether each row grows deeper than k + 1 places.

        Args:
            k: the depth of the paths that were found last, from 0.
            values: [B, m] the log-probabilities of these paths, highest first; -inf in a row that
                has ended.
        """
        for row, survival in enumerate(np.exp(values).tolist()):
            self.survival[row] = self._best([*self.survival[row], *survival])
            self.longest[row] = survival[0] if k + 1 < self.limits[row] else 0.0
        self._grow(k + 1)
        return [survival > 0 for survival in self.longest]

    def sizes(self) -> list[int]:
        """Return how many of its best paths each row takes."""
        sizes = [0] * len(self.limits)
        for group in self.groups:
            _, size = group.rate([self.survival[row] for row in group.rows])
            best = sorted((-survival, row) for row in group.rows for survival in self.survival[row])
            for _, row in best[:size]:
                sizes[row] += 1
        return sizes

    def _deepest(self, group: Group) -> int:
        return max(self.deep[row] for row in group.rows)

    def _best(self, survival: list[float]) -> list[float]:
        return sorted(survival, reverse=True)[: self.groups[0].costs.nodes]

    def _grow(self, depth: int) -> None:
        """End rows that are to be no deeper than `depth`, and count new states for the others."""
        for group in self.groups:
            growing = [row for row in group.rows if self.longest[row]]
            if not growing or depth < self._deepest(group):  # these states are drafted already
                continue
            states = min(self.block, max(self.limits[row] for row in growing) - depth)
            if self._gains_by_states(group, growing, depth, states):
                group.spent += states * group.state
                for row in growing:
                    self.deep[row] = min(self.limits[row], self.deep[row] + states)
            else:
                for row in growing:
                    self.longest[row] = 0.0

    def _gains_by_states(self, group: Group, growing: list[int], depth: int, states: int) -> bool:
        """Return whether more states raise the rate, at the mean acceptance of their places."""
        expected = list(self.survival)
        for row in growing:
            places = self.curves[row][depth : min(depth + states, self.limits[row])]
            means = [mean for _, _, mean in places]
            survival = list(accumulate([self.longest[row], *means], mul))
            expected[row] = self._best([*self.survival[row], *survival[1:]])
        with_states, _ = group.rate([expected[row] for row in group.rows], states * group.state)
        without, _ = group.rate([self.survival[row] for row in group.rows])
        return with_states > without


class TreePlanner:
    """Make the plan of each step, and tell where trees pay.

    Greedy rows of a step stop together. Each sampled row stops by itself.
    """

    def __init__(
        self, head: Calibrated, costs: CostSource, block: int, nodes: int, beams: int = 1
    ) -> None:
        """Take a head and its costs.

        Args:
            head: read anew in each step.
            costs: gives the table, with the head's times.
            block: the number of states that are drafted at a time.
            nodes: the most nodes of a row.
            beams: the states that a row has at one depth.
        """
        self.head = head
        self.block = block
        self._nodes = nodes
        self._beams = beams
        self._source = costs
        # What was computed from this table, by greediness, rows and context.
        self._table = costs.table
        self._known_costs: dict[TreeKey, TreeCosts] = {}
        self._known_savings: dict[TreeKey, float] = {}

    def forecast(self, situation: StepSituation) -> Forecast:
        """Return what trees save in a step. The head reads prompts in negligible time."""
        self._refresh()
        key = situation.greedy, situation.rows, rounded(situation.context)
        if key not in self._known_savings:
            self._known_savings[key] = self._saved_by_block(*key)
        saved = self._known_savings[key]
        return Forecast(saved, saved * situation.remaining)

    def plan(
        self, seqs: list[Sequence], limits: list[int], fresh: list[int], ahead: list[int]
    ) -> TreePlan:
        """Return the plan of a step.

        Args:
            seqs: the sequences of the rows.
            limits: see `TreePlan`.
            fresh: the rows that need new states.
            ahead: see `TreePlan`.
        """
        self._refresh()
        greedy = [row for row, seq in enumerate(seqs) if seq.greedy]
        parts = [greedy] if greedy else []
        parts += [[row] for row, seq in enumerate(seqs) if not seq.greedy]
        groups = []
        for rows in parts:
            context = rounded(mean_context([seqs[row] for row in rows]))
            costs = self._costs(seqs[rows[0]].greedy, len(rows), context)
            groups.append(Group(rows, costs, not set(rows).isdisjoint(fresh)))
        return TreePlan(groups, self.head.curves, self.block, limits, ahead)

    def _refresh(self) -> None:
        """Forget what was computed from an earlier table."""
        if self._table is not self._source.table:
            self._table = self._source.table
            self._known_costs.clear()
            self._known_savings.clear()

    def _costs(self, greedy: bool, rows: int, context: int) -> TreeCosts:
        """Return the costs of a step's parts."""
        key = greedy, rows, context
        if key not in self._known_costs:
            table = (self._table if greedy else self._table.sampled).at(context, rows)
            self._known_costs[key] = TreeCosts(table, rows, self._nodes, self._beams)
        return self._known_costs[key]

    def _saved_by_block(self, greedy: bool, rows: int, context: int) -> float:
        """Return the ms that a token of each row saves if a first block is drafted.

        Its nodes are expected to be accepted as often as those of their places are on average.
        """
        costs = self._costs(greedy, rows, context)
        means = [mean for _, _, mean in self.head.curves]
        states = min(self.block, costs.nodes)
        survival = list(accumulate((means + means[-1:] * states)[:states], mul))
        group = Group(list(range(rows)), costs, fresh=True)
        plain, _ = group.rate([[]] * rows)
        drafted, _ = group.rate([survival] * rows, states * group.state)
        return rows / plain - rows / drafted
