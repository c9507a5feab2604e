"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224): states go forward without drafted tokens, tokens
are chosen from all of them at the end, and states behind a rejected token are used again with the right one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import exp, log1p
from operator import mul
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.costs import Costs
from forerun.decode import Generation
from forerun.draft import Draft
from forerun.drafters.beams import Array, grow
from forerun.drafters.heads import HeadDrafter
from forerun.runtime.hidden import HiddenLM
from forerun.sampling import Verdict


class LyannaDrafter(HeadDrafter):
    """Drafts `depth` states a step and makes a chain or tree of tokens of them.

    Reuse of the logits that an earlier step left behind the new root: "add" gives them `weight` in the fresh ones,
    whose tokens then count as reused (mode A of our reading of the paper); "branch" makes a second branch of them,
    beside `nodes` fresh tokens (mode B); "free" drafts from them alone, without running the head, where there are
    `least` of them or more (mode D, ours; for a `least` of 1 it is mode C, all that is left verified in a forward of
    its own), in a batch that is decoded greedily where that holds for all rows; "off" drops them.

    With `costs`, depth and number of nodes are those that make a step's tokens a ms the most (`Budget`), and states are
    made in blocks of `block`.
    """

    def __init__(
        self,
        head: HiddenLM,
        depth: int,
        width: int,
        nodes: int,
        reuse: str,
        weight: float = 0.25,
        least: int = 2,
        costs: Costs | None = None,
        block: int = 1,
    ) -> None:
        super().__init__(head, depth, width, nodes)
        self.reuse, self.weight, self.least, self.costs, self.block = reuse, weight, least, costs, block

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        super().start(seqs, hidden)
        head, rows = self.head, len(seqs)
        self.greedy = seqs[0].sampler.greedy
        # Of each row the last drafted logits, how many of them are its own, and how many the text has passed by now.
        self.logits = torch.zeros(rows, self.depth, len(head.hot), dtype=head.dtype, device=head.device)
        self.drawn, self.passed = [0] * rows, [0] * rows
        self.prices: dict[int, Prices] = {}

    def draft(self, seqs: Sequence[Generation], features: list[Tensor], limits: list[int]) -> list[Draft]:
        roots = [seq.tokens[-1] for seq in seqs]
        left = [max(0, drawn - passed) for drawn, passed in zip(self.drawn, self.passed, strict=True)]
        free = [self.reuse == "free" and have >= self.least for have in left]
        if self.greedy and not all(is_free or limit < 1 for is_free, limit in zip(free, limits, strict=True)):
            free = [False] * len(seqs)  # the head runs for others anyway
        fresh = [row for row, limit in enumerate(limits) if not free[row] and limit > 0]
        other = None
        if self.reuse == "branch" and any(left):
            limited = [min(pair) for pair in zip(limits, left, strict=True)]
            other = self._grow(roots, limited, 1, self.depth, ["reused"] * len(roots))
        self._old = {row: self._of(row, left[row]).clone() for row in fresh if left[row] and self.reuse == "add"}
        deep = [min(limit, self.depth if row in fresh else left[row]) for row, limit in enumerate(limits)]
        budget = self._budget(fresh, deep) if self.costs is not None else None
        states = self._begin(seqs, fresh, features) if fresh else None
        if states is not None and budget is None:
            self._run(states, max(deep[row] for row in fresh))
            states = None
        origins = ["reused" if is_free else "draft" for is_free in free]
        drafts = self._grow(roots, deep, self.width, self.nodes, origins, states, budget)
        if fresh:
            self.head.crop(self._lengths)
            for row in fresh:  # as deep as it would be alone: what it does next must not depend on its neighbours
                self.drawn[row] = budget.deep[row] if budget is not None else deep[row]
        for row, old in self._old.items():
            origins_of = drafts[row].origins
            for node, depth in enumerate(drafts[row].depths):
                if 0 < depth <= len(old):
                    origins_of[node] = "reused"
        return drafts if other is None else [one.merge(more) for one, more in zip(drafts, other, strict=True)]

    def _budget(self, fresh: list[int], limits: list[int]) -> Budget:
        assert self.costs is not None
        count = len(limits) if self.greedy else 1
        if count not in self.prices:
            self.prices[count] = Prices(self.costs if self.greedy else self.costs.drawn, count, self.nodes)
        passed = [0 if row in fresh else passed for row, passed in enumerate(self.passed)]
        return Budget(self.prices[count], self.head.curves, self.block, fresh, limits, passed, self.greedy)

    def _begin(self, seqs: Sequence[Generation], rows: list[int], features: list[Tensor]) -> Tensor:
        """The first states [B, d] of a draft for these rows."""
        begun = perf_counter()
        self._rows = rows
        states = self.run(seqs, [own if row in rows else own[:0] for row, own in enumerate(features)])
        self._lengths, self._deep = list(self.head.cache.lengths), 0
        for row in rows:
            self.passed[row] = 0
        self.seconds += perf_counter() - begun
        self.forwards += 1
        return states

    def _run(self, state: Tensor, steps: int) -> Tensor:
        """Drafts so many states from the first one or behind the last one, and all of their logits; the last state."""
        begun, first = perf_counter(), [] if self._deep else [state]
        states = first + self.head.roll(state, steps - len(first), self._rows)
        self.forwards += steps - len(first)
        self._say(torch.stack(states, 1))
        self.seconds += perf_counter() - begun
        return states[-1]

    def _say(self, states: Tensor) -> None:
        """Keeps what the head says of the next states [B, K, d] of the drafting rows."""
        rows, first, last = self._rows, self._deep, self._deep + states.shape[1]
        own = slice(None) if len(rows) == len(states) else rows  # a GPU waits for numbers of rows from the host
        said = self.head.logits(states[own].flatten(0, 1))
        self.logits[own, first:last] = said.view(len(rows), last - first, -1)
        self._deep = last

    def _of(self, row: int, count: int) -> Tensor:
        """Logits [count, S] of a row's next places."""
        return self.logits[row, self.passed[row] : self.passed[row] + count]

    def _grow(
        self,
        roots: Sequence[int],
        limits: list[int],
        width: int,
        nodes: int,
        origins: list[str],
        states: Tensor | None = None,
        budget: Budget | None = None,
    ) -> list[Draft]:
        """Trees from the kept logits; from `states` on the head goes deeper as it is asked to."""
        head = self.head
        rows = torch.arange(len(roots), device=head.device)
        passed = torch.tensor(self.passed, device=head.device) if any(self.passed) else None

        def law(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            nonlocal states
            if states is not None and budget is not None and k == self._deep:
                more = max(budget.deep[row] for row in self._rows) - k
                if more > 0:
                    states = self._run(states, more)
            said = self.logits[:, k] if passed is None else self.logits[rows, (passed + k).clamp(max=self.depth - 1)]
            said = said[:, None] + head.information(tokens)
            for row, old in self._old.items():
                if k < len(old):
                    said[row] += self.weight * old[k]
            return said

        return grow(roots, law, head.hot, limits, width, nodes, budget, origins)

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        super().observe(seqs, drafts, verdicts, hidden)
        for row, verdict in enumerate(verdicts):
            self.passed[row] += verdict.accepted + 1

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.logits = self.logits[rows]
        self.drawn, self.passed = ([each[row] for row in rows] for each in (self.drawn, self.passed))


class Prices:
    """What a step of so many rows costs."""

    def __init__(self, costs: Costs, rows: int, nodes: int) -> None:
        self.state = costs.heading(rows)
        self.verify = [costs.verify(rows * (count + 1)) for count in range(nodes + 1)]  # by nodes of a row


class Budget:
    """Depth and number of nodes of a step: what makes its tokens a ms the most, by the head's calibrated probabilities
    and a table of costs. Pacer's idea (arXiv 2602.01274) on a tree; the rule is ours.

    Rows that are drafted for and verified together take as long as the largest of them, so they are of one size and go
    deeper together; drawn rows do what they would alone, as their random numbers must not depend on their neighbours.

    Attributes:
        block: how many states are made at a time.
        deep: how many states each row has been given.
    """

    def __init__(
        self,
        prices: Prices,
        curves: list[list[float]],
        block: int,
        fresh: list[int],
        limits: list[int],
        passed: list[int],
        together: bool,
    ) -> None:
        """`fresh`: rows whose states are yet to be made; `limits`: how deep each may go; `passed`: how far behind the
        first place that they stand for the other rows' states begin, for the calibration."""
        self.prices, self.block, self.limits = prices, block, limits
        rows = range(len(limits))
        self.groups = [list(rows)] if together else [[row] for row in rows]
        self.curves = [
            [curves[min(at + k, len(curves) - 1)] for k in range(max(*limits, 1) + 1)] for at in passed
        ]  # of each row by depth
        self.going_on = [prices.state if set(group) & set(fresh) else 0.0 for group in self.groups]
        self.deep = [min(limit, block) for limit in limits]
        self.spent = [self._deepest(group) * each for group, each in zip(self.groups, self.going_on, strict=True)]
        self.sure: list[list[float]] = [[] for _ in limits]  # survival of the best paths so far, the best one first
        self.ends = [1.0 if limit else 0.0 for limit in limits]  # survival of chains; 0 where they have ended

    def _deepest(self, group: list[int]) -> int:
        return max(self.deep[row] for row in group)

    def worth(self, k: int, chances: Array) -> Array:
        shift, slope, _ = np.array([own[k] for own in self.curves]).T[:, :, None, None]
        odds = chances - np.log1p(-np.exp(chances).clip(max=1 - 1e-6))
        return -np.logaddexp(0, -shift - slope * odds)

    def more(self, k: int, values: Array) -> list[bool]:
        nodes = len(self.prices.verify) - 1
        for row, survival in enumerate(np.exp(values).tolist()):
            self.sure[row] = sorted([*self.sure[row], *survival], reverse=True)[:nodes]
            self.ends[row] = survival[0] if k + 1 < self.limits[row] else 0.0
        self._go_on(k)
        return [end > 0 for end in self.ends]

    def further(self, k: int, chances: list[list[float]]) -> bool:
        for row, own in enumerate(chances):
            for place, chance in enumerate(own[: max(0, self.limits[row] - k)], k):
                if not self.ends[row]:
                    break
                shift, slope, _ = self.curves[row][place]
                odds = chance - log1p(-min(exp(chance), 1 - 1e-6))
                self.ends[row] /= 1 + exp(min(-shift - slope * odds, 700.0))
                self.sure[row].append(self.ends[row])
            if k + len(own) >= self.limits[row]:
                self.ends[row] = 0.0
        self._go_on(k + len(chances[0]) - 1)
        return any(self.ends)

    def _go_on(self, k: int) -> None:
        """Sets `ends` to 0 in rows that go no deeper than k + 1 places, and gives the others states."""
        for number, group in enumerate(self.groups):
            going = [row for row in group if self.ends[row]]
            if not going or k + 1 < self._deepest(group):  # the states are there
                continue
            steps = min(self.block, max(self.limits[row] for row in going) - k - 1)
            if self._pays(number, going, k + 1, steps):
                self.spent[number] += steps * self.going_on[number]
                for row in going:
                    self.deep[row] = min(self.limits[row], self.deep[row] + steps)
            else:
                for row in going:
                    self.ends[row] = 0.0

    def _pays(self, number: int, going: list[int], k: int, steps: int) -> bool:
        """Whether the usual tokens behind the best paths are worth so many states."""
        nodes, further = len(self.prices.verify) - 1, list(self.sure)
        for row in going:
            means = [mean for _, _, mean in self.curves[row][k : min(k + steps, self.limits[row])]]
            usual = accumulate([self.ends[row], *means], mul)
            further[row] = sorted([*self.sure[row], *list(usual)[1:]], reverse=True)[:nodes]
        group, spent = self.groups[number], self.spent[number]
        there, _ = self._rate([further[row] for row in group], spent + steps * self.going_on[number])
        return there > self._rate([self.sure[row] for row in group], spent)[0]

    def sizes(self) -> list[int]:
        sizes = [0] * len(self.limits)
        for group, spent in zip(self.groups, self.spent, strict=True):
            _, size = self._rate([self.sure[row] for row in group], spent)
            for row in group:
                sizes[row] = min(size, len(self.sure[row]))
        return sizes

    def _rate(self, survival: list[list[float]], spent: float) -> tuple[float, int]:
        """The most tokens a ms that a step has which takes the first of these nodes of each row, and how many."""
        verify = self.prices.verify
        tokens = float(len(survival))
        best, size = tokens / (spent + verify[0]), 0
        for count, chances in enumerate(zip_longest(*survival, fillvalue=0.0), 1):
            tokens += sum(chances)
            rate = tokens / (spent + verify[count])
            if rate > best:
                best, size = rate, count
        return best, size
