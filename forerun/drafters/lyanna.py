"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224): states go forward without tokens, tokens are
chosen from all of them at the end, and states behind a rejected token are used again with the right one."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from forerun.costs import Costs
from forerun.decode import Generation
from forerun.draft import Draft
from forerun.drafters.beams import grow
from forerun.drafters.heads import HeadDrafter
from forerun.runtime.hidden import HiddenLM
from forerun.sampling import Verdict


class LyannaDrafter(HeadDrafter):
    """Drafts `depth` states a step and makes a chain or tree of tokens of them.

    Reuse of the logits that an earlier step left behind the new root: "add" gives them `weight` in the fresh ones (mode
    A of our reading of the paper); "branch" makes a second branch of them (mode B); "free" drafts from them alone,
    without running the head, where there are `least` of them or more (mode D, ours; for a `least` of 1 it is mode C,
    all that is left verified in a forward of its own); "off" drops them.

    With `costs`, depth and number of nodes are those that make the step's tokens a ms the most (`Budget`).
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
    ) -> None:
        super().__init__(head, depth, width, nodes)
        self.reuse, self.weight, self.least, self.costs = reuse, weight, least, costs

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        super().start(seqs, hidden)
        head, rows = self.head, len(seqs)
        self.greedy = seqs[0].sampler.greedy
        # Of each row the last drafted logits, how many there are, and how many of them the text has passed by now.
        self.logits = torch.zeros(rows, self.depth, len(head.hot), dtype=head.dtype, device=head.device)
        self.drawn, self.passed = [0] * rows, [0] * rows

    def draft(self, seqs: Sequence[Generation], limits: list[int]) -> list[Draft]:
        roots = [seq.tokens[-1] for seq in seqs]
        left = [max(0, drawn - passed) for drawn, passed in zip(self.drawn, self.passed, strict=True)]
        free = [self.reuse == "free" and have >= self.least for have in left]
        fresh = [
            row
            for row, features in enumerate(self.features)
            if not free[row] and limits[row] > 0 and len(features)  # none at the start behind a single token
        ]
        old: list[Draft] | None = None
        if self.reuse == "branch" and any(left):
            limited = [min(pair) for pair in zip(limits, left, strict=True)]
            old = self._grow(roots, limited, 1, self.depth, ["reused"] * len(roots))
        states = self._begin(seqs, fresh, left) if fresh else None
        deep = [min(limit, self.depth if row in fresh else left[row]) for row, limit in enumerate(limits)]
        if states is not None and self.costs is None:
            self._run(states, max(deep[row] for row in fresh))
            states = None
        origins = ["reused" if is_free else "draft" for is_free in free]
        drafts = self._grow(roots, deep, self.width, self.nodes, origins, states)
        if fresh:
            self.head.crop(self._lengths)
            for row in fresh:
                self.drawn[row] = self._deep
        return drafts if old is None else [one.merge(other) for one, other in zip(drafts, old, strict=True)]

    def _begin(self, seqs: Sequence[Generation], rows: list[int], left: list[int]) -> Tensor:
        """The first states [B, d] of a draft for these rows."""
        head, begun = self.head, perf_counter()
        self._rows = rows
        self._old = {row: self._of(row, left[row]).clone() for row in rows if left[row] and self.reuse == "add"}
        nothing = self.features[0][:0]
        new = [own if row in rows else nothing for row, own in enumerate(self.features)]
        behind = [seq.tokens[len(seq.tokens) - len(own) :] for seq, own in zip(seqs, new, strict=True)]
        states = head.extend(new, behind if head.known else None)
        self._lengths, self._deep = list(head.cache.lengths), 0
        for row in rows:
            self.features[row] = nothing
            self.passed[row] = 0
        self.seconds += perf_counter() - begun
        self.forwards += 1
        return states

    def _run(self, state: Tensor, steps: int) -> None:
        """Drafts so many states and then all of their logits."""
        begun, states = perf_counter(), [state]
        for _ in range(steps - 1):
            states.append(self._next(states[-1]))
        self._say(torch.stack(states, 1))
        self.seconds += perf_counter() - begun
        self.forwards += steps - 1

    def _next(self, states: Tensor) -> Tensor:
        nothing = states[:0]
        return self.head.extend([states[row : row + 1] if row in self._rows else nothing for row in range(len(states))])

    def _say(self, states: Tensor) -> None:
        """Keeps what the head says of the next states [B, K, d] of the drafting rows."""
        rows, first, last = self._rows, self._deep, self._deep + states.shape[1]
        chosen = states[rows].flatten(0, 1)
        self.logits[rows, first:last] = self.head.logits(chosen).view(len(rows), last - first, -1)
        for row, old in self._old.items():
            part = old[first:last]
            self.logits[row, first : first + len(part)] += self.weight * part
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
    ) -> list[Draft]:
        """Trees from the kept logits; from `states` on the head goes deeper as it is asked to."""
        head = self.head
        rows = torch.arange(len(roots), device=head.device)
        passed = torch.tensor(self.passed, device=head.device) if any(self.passed) else None

        def law(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            nonlocal states
            if states is not None:
                begun = perf_counter()
                if k:
                    states = self._next(states)
                    self.forwards += 1
                self._say(states[:, None])
                self.seconds += perf_counter() - begun
            at_k = (slice(None), k) if passed is None else (rows, (passed + k).clamp(max=self.depth - 1))
            return self.logits[at_k][:, None] + head.table[tokens]

        budget = None
        if self.costs is not None:
            ready = [states is None or row not in self._rows for row in range(len(roots))]
            # Drawn rows draft as they would alone: their random numbers must not depend on their neighbours.
            budget = Budget(self.costs, head.curves, ready, len(roots) if self.greedy else 1)
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


class Budget:
    """Depth and number of nodes of a step: what makes its tokens a ms the most, by the head's calibrated probabilities
    and a table of costs. Pacer's idea (arXiv 2602.01274) on a tree; the rule is ours."""

    def __init__(self, costs: Costs, curves: list[list[float]], ready: list[bool], rows: int) -> None:
        """`ready`: the rows whose states are there already; `rows`: how many share a forward."""
        self.curves = curves
        self.state = costs.heading(rows) / rows
        self.prices = [0.0 if is_ready else self.state for is_ready in ready]  # of going on
        self.spent = list(self.prices)
        self.verify = lambda nodes: costs.verify(rows * (nodes + 1)) / rows
        self.sure: list[list[float]] = [[] for _ in ready]  # survival of the paths so far

    def worth(self, k: int, chances: Tensor) -> Tensor:
        shift, slope, _ = self._curve(k)
        return functional.logsigmoid(shift + slope * (chances - torch.log1p(-chances.exp().clamp(max=1 - 1e-6))))

    def _curve(self, k: int) -> list[float]:
        return self.curves[min(k, len(self.curves) - 1)]

    def more(self, k: int, values: Tensor) -> list[bool]:
        going = []
        for row, survival in enumerate(values.exp().tolist()):
            self.sure[row] = sorted([*self.sure[row], *survival], reverse=True)
            further = sorted([*self.sure[row], survival[0] * self._curve(k + 1)[2]], reverse=True)
            here, _ = self._best(self.sure[row], self.spent[row])
            there, _ = self._best(further, self.spent[row] + self.prices[row])
            going.append(there > here and survival[0] > 0)
            if going[-1]:
                self.spent[row] += self.prices[row]
        return going

    def sizes(self, values: Tensor) -> list[int]:
        return [self._best(own, spent)[1] for own, spent in zip(values.exp().tolist(), self.spent, strict=True)]

    def _best(self, survival: list[float], spent: float) -> tuple[float, int]:
        """The most tokens a ms that a step has which takes the first of these nodes, and how many those are."""
        tokens, best, size = 1.0, 1 / (spent + self.verify(0)), 0
        for count, chance in enumerate(survival, 1):
            tokens += chance
            rate = tokens / (spent + self.verify(count))
            if rate > best:
                best, size = rate, count
        return best, size
