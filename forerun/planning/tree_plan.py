"""Choose a step's depth and number of nodes by their expected gain: Pacer's idea (arXiv 2602.01274) applied to trees.
The rule is ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from operator import mul
from typing import Any

import numpy as np

from forerun.backends.heads import HiddenLM
from forerun.engine.sequence import Sequence
from forerun.planning.cost_model import Costs, mean_context, rounded

Array = np.ndarray[Any, Any]
_CERTAIN = 1 - 1e-6  # probabilities are capped at this for log-odds


class StepCosts:
    """Milliseconds of a head's next state, for `beams` beams a row, and of target forwards of R rows by the number of
    their nodes, of which a row has at most `nodes`."""

    def __init__(self, costs: Costs, rows: int, nodes: int, beams: int = 1) -> None:
        self.state, self.nodes = costs.heading(rows * beams), nodes
        self.verify = [costs.verify(rows + count) for count in range(rows * nodes + 1)]


@dataclass
class Group:
    """Rows that stop together. They are drafted and verified together, so a node of one costs all of them time.

    Attributes:
        costs: of steps with this number of rows.
        fresh: whether the head drafts states for any of them.
        spent: ms of states so far.
    """

    rows: list[int]
    costs: StepCosts
    fresh: bool
    spent: float = 0.0

    @property
    def state(self) -> float:
        """Return ms of one more state."""
        return self.costs.state if self.fresh else 0.0

    def rate(self, survival: list[list[float]], ms: float = 0.0) -> tuple[float, int]:
        """Return the highest expected tokens a ms of a step, and the number of best nodes with which it has it.
        `survival`: the probabilities that the nodes of each row are accepted. `ms`: of further states."""
        spent, tokens = self.spent + ms, float(len(survival))
        most, size = tokens / (spent + self.costs.verify[0]), 0
        for count, probability in enumerate(sorted(chain(*survival), reverse=True), 1):
            tokens += probability
            rate = tokens / (spent + self.costs.verify[count])
            if rate > most:
                most, size = rate, count
        return most, size


class Budget:
    """Find the depth and the number of nodes with the most expected tokens a ms, by the head's calibrated probabilities
    and a table of costs.

    Attributes:
        block: number of states that are drafted at a time.
        deep: number of states of each row so far.
    """

    def __init__(
        self,
        groups: list[Group],
        curves: list[list[float]],
        block: int,
        limits: list[int],
        ahead: list[int],
    ) -> None:
        """Begin a step. `curves`: the calibration (`HiddenConfig`). `limits`: the most depth of each row. `ahead`:
        places by which each row's first logits were drafted ahead in an earlier step; 0 for new ones."""
        self.groups, self.block, self.limits = groups, block, limits
        # [row][depth]
        self.curves = [
            [curves[min(at + k, len(curves) - 1)] for k in range(max(*limits, 1) + 1)]
            for at in ahead
        ]
        self.deep = [min(limit, block) for limit in limits]
        for group in groups:
            group.spent = self._deepest(group) * group.state
        self.sure: list[list[float]] = [
            [] for _ in limits
        ]  # survival of each row's best paths so far, best first
        self.ends = [
            1.0 if limit else 0.0 for limit in limits
        ]  # survival of each row's longest path; 0 once it has ended

    def _deepest(self, group: Group) -> int:
        return max(self.deep[row] for row in group.rows)

    def gains(self, k: int, logs: Array) -> Array:
        """Return calibrated log-probabilities [B, w, m] for those of tokens at depth k."""
        shift, slope, _ = np.array([own[k] for own in self.curves]).T[:, :, None, None]
        odds = logs - np.log1p(-np.exp(logs).clip(max=_CERTAIN))
        with np.errstate(invalid="ignore"):  # of logits that are not numbers
            return -np.logaddexp(0, -shift - slope * odds)

    def deeper(self, k: int, values: Array) -> list[bool]:
        """Return whether each row grows deeper than k + 1 places. `values` [B, m] are log-probabilities of its paths of
        that length, best first; -inf in a row that has ended."""
        for row, survival in enumerate(np.exp(values).tolist()):
            self.sure[row] = self._first([*self.sure[row], *survival])
            self.ends[row] = survival[0] if k + 1 < self.limits[row] else 0.0
        self._go_on(k)
        return [end > 0 for end in self.ends]

    def sizes(self) -> list[int]:
        """Return the number of best paths that each row takes."""
        sizes = [0] * len(self.limits)
        for group in self.groups:
            _, size = group.rate([self.sure[row] for row in group.rows])
            best = sorted((-survival, row) for row in group.rows for survival in self.sure[row])
            for _, row in best[:size]:
                sizes[row] += 1
        return sizes

    def _first(self, survival: list[float]) -> list[float]:
        return sorted(survival, reverse=True)[: self.groups[0].costs.nodes]

    def _go_on(self, k: int) -> None:
        """End rows that are not to go deeper than k + 1 places, and count new states for the rest."""
        for group in self.groups:
            going = [row for row in group.rows if self.ends[row]]
            if not going or k + 1 < self._deepest(group):  # drafted already
                continue
            steps = min(self.block, max(self.limits[row] for row in going) - k - 1)
            if self._pays(group, going, k + 1, steps):
                group.spent += steps * group.state
                for row in going:
                    self.deep[row] = min(self.limits[row], self.deep[row] + steps)
            else:
                for row in going:
                    self.ends[row] = 0.0

    def _pays(self, group: Group, going: list[int], k: int, steps: int) -> bool:
        """Return whether `steps` more states are worth their time at the mean acceptance of their places."""
        further = list(self.sure)
        for row in going:
            means = [mean for _, _, mean in self.curves[row][k : min(k + steps, self.limits[row])]]
            usual = accumulate([self.ends[row], *means], mul)
            further[row] = self._first([*self.sure[row], *list(usual)[1:]])
        there, _ = group.rate([further[row] for row in group.rows], steps * group.state)
        return there > group.rate([self.sure[row] for row in group.rows])[0]


class Budgets:
    """Make the budget of each step. Greedy sequences stop together, sampled ones each on its own."""

    def __init__(
        self, head: HiddenLM, costs: Costs, block: int, nodes: int, beams: int = 1
    ) -> None:
        """Take the head and its costs. `nodes`: the most of a row. `beams`: see `StepCosts`."""
        self.head, self.block = head, block

        def step_costs(greedy: bool, rows: int, context: int) -> StepCosts:
            table = costs if greedy else costs.sampled
            return StepCosts(table.at(context, rows), rows, nodes, beams)

        self._step_costs, self.pays = lru_cache(step_costs), lru_cache(self._pays)

    def _pays(self, rows: int, context: int = 0) -> bool:
        """Return whether a first block is expected to pay in a greedy step of N rows after so many tokens each, at the
        mean acceptance of its places."""
        means, costs = (
            [mean for _, _, mean in self.head.curves],
            self._step_costs(True, rows, context),
        )
        count = min(self.block, costs.nodes)
        survival = list(accumulate((means + means[-1:] * count)[:count], mul))
        group = Group(list(range(rows)), costs, True)
        return group.rate([survival] * rows, count * group.state)[0] > group.rate([[]] * rows)[0]

    def of(
        self, seqs: list[Sequence], limits: list[int], fresh: list[int], ahead: list[int]
    ) -> Budget:
        """Return the budget of a step. `fresh`: rows that need new states. `limits`, `ahead`: see `Budget`."""
        together = [row for row, seq in enumerate(seqs) if seq.greedy]
        groups = [together] if together else []
        groups += [[row] for row, seq in enumerate(seqs) if not seq.greedy]
        parts = []
        for rows in groups:
            context = rounded(mean_context([seqs[row] for row in rows]))
            costs = self._step_costs(seqs[rows[0]].greedy, len(rows), context)
            parts.append(Group(rows, costs, bool(set(rows) & set(fresh))))
        return Budget(parts, self.head.curves, self.block, limits, ahead)
