"""Pacer: draft block by block, and stop where a trained layer finds that the target will not follow.

The idea of blockwise pre-verification is that of arXiv 2602.01274. The stop rule that follows from measured costs, and
what the layer sees (forerun/nn/pre_verifier.py), are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, log

import numpy as np
import torch
from torch import Tensor, nn

from forerun.costs import Costs
from forerun.decode import Generation
from forerun.draft import Draft
from forerun.lengths import LengthPolicy, Look
from forerun.lengths.confidence import CumulativeStop
from forerun.nn.echo import SIZES, Echo
from forerun.nn.pre_verifier import LEAST, USUAL, PreVerifier, chances_of
from forerun.nn.quick import Array, QuickState, quick
from forerun.sampling import Verdict

BLOCK, BLOCKS = 4, (1, 2, 4, 8)
SCORES: dict[str, Callable[[Array], Array]] = {
    "last": lambda blocks: blocks[..., -1],
    "mean": lambda blocks: blocks.mean(-1),
    "min": lambda blocks: blocks.min(-1),
}


def best_threshold(
    traces: Array,
    block: int,
    rho: float,
    score: Callable[[Array], Array],
    costs: Costs,
    rows: int = 1,
    evidence: Array | None = None,
) -> tuple[float, float]:
    """The threshold under which decoding is fastest by a table of costs, and its tokens per ms.

    `traces` [N, G] are a calibrated layer's survival of the tokens of drafts. A draft that stops behind n of them is
    worth 1 + the sum of their survival tokens, and takes n draft forwards, n / block calls of the layer and a forward
    of the target on n + 1 tokens: the threshold with the largest ratio of the sums over all drafts is the solution of
    the stopping problem among rules of this form. `evidence` [N, G] is what the rule goes by instead of them.

    Several `rows` draft and are verified as long as the longest of them, so they stop together, by the mean of their
    scores: drafts are put together at random.
    """
    block = min(block, traces.shape[1])
    blocks = traces.shape[1] // block
    evidence = traces if evidence is None else evidence
    scores = score(evidence[:, : blocks * block].reshape(len(traces), blocks, block))
    tokens = 1 + traces.cumsum(-1)[:, block - 1 :: block][:, :blocks]
    if rows > 1:
        together = np.random.default_rng(0).integers(len(traces), size=(len(traces), rows))
        scores, tokens = scores[together].mean(1), tokens[together].mean(1)
    ends = block * np.arange(1, blocks + 1)
    prices = np.array([end * costs.drafting(rows) + costs.verify(rows * (end + 1)) for end in ends])
    prices = (prices + costs.policy * np.arange(1, blocks + 1)) / rows
    best, found = 0.0, 0.5
    for threshold in np.linspace(0.02, 0.98, 49):
        stops = scores < threshold * rho ** np.arange(blocks)
        stops[:, -1] = True
        at = stops.argmax(-1)
        rate = float(tokens[np.arange(len(at)), at].sum() / prices[at].sum())
        if rate > best:
            best, found = rate, float(threshold)
    return found, best


class PacerStop(LengthPolicy):
    """Drafts in blocks of `block` tokens, at most `most`; stops behind the k-th block (from 0) if the `score` of its
    tokens' survival is below `threshold * rho ** k`.

    Without a threshold it takes the best one for the drafts that the layer carries as a sample, greedy or drawn, by the
    table of costs and the number of rows (`best_threshold`), and without a block as well the best of BLOCKS; where even
    so the layer's calls would cost more than they bring, it goes by the product of the draft's own probabilities, token
    by token (`cheap`). Greedy rows then stop together. No clock is read. Without costs the threshold is 0.5.
    """

    def __init__(
        self,
        layer: PreVerifier,
        embeddings: nn.Module,
        block: int | None,
        most: int,
        threshold: float | None = None,
        rho: float = 1.0,
        score: str = "last",
        costs: Costs | None = None,
    ) -> None:
        self.layer = quick(layer)
        self.embeddings, self.most = embeddings, most
        free = threshold is None and costs is not None
        self.blocks = BLOCKS if block is None and free else (block or BLOCK,)
        self.fixed, self.rho, self.score, self.costs = threshold, rho, score, costs
        self.priced = repr(costs)
        inputs = layer.config.inputs
        self.wants_draft, self.wants_target = "hidden" in inputs, "target" in inputs
        self.echoing, self.embedding = "echoes" in inputs, "token" in inputs

    def start(self, seqs: Sequence[Generation]) -> None:
        self.seqs = list(seqs)
        self.echoes = [Echo() for _ in seqs]
        self.runs = [[0.0, USUAL, USUAL] for _ in seqs]
        self.target: Tensor | None = None
        self.looks: list[Look] = []
        self.state_rows: list[int] = []
        self.mode = "greedy" if seqs[0].sampler.greedy else "drawn"
        self.cheap: CumulativeStop | None = None
        self._set_threshold()

    def _set_threshold(self) -> None:
        if self.fixed is not None or self.costs is None:
            self.block, self.threshold = self.blocks[0], self.fixed if self.fixed is not None else 0.5
            self.together = 1
            return
        # Drawn rows draft as they would alone: their random numbers must not depend on their neighbours.
        greedy = self.mode == "greedy"
        count, costs = (len(self.seqs), self.costs) if greedy else (1, self.costs.drawn)
        known = self.layer.thresholds
        key = self.priced, self.mode, count, self.blocks, self.most, self.rho, self.score
        if key not in known:
            traces, products = self.layer.traces[self.mode][..., : self.most]
            score = SCORES[self.score]
            found = {block: best_threshold(traces, block, self.rho, score, costs, count) for block in self.blocks}
            if len(self.blocks) > 1:
                glancing = replace(costs, policy=costs.glance)
                found[0] = best_threshold(traces, 1, 1.0, SCORES["last"], glancing, count, products)
            block = max(found, key=lambda block: found[block][1])
            known[key] = block, found[block][0]
        self.block, self.threshold = known[key]
        self.together = count
        self.cheap = None if self.block else CumulativeStop(self.threshold, self.most, self.together)

    def more(self, look: Look) -> list[bool]:
        if self.cheap is not None:
            return self.cheap.more(look)
        self.looks.append(look)
        if look.depth < self.most and look.depth % self.block:
            return [True] * len(look.rows)
        said = self._ask(look)
        if look.depth >= self.most:
            return [False] * len(look.rows)
        least = min(self.threshold * self.rho ** (look.depth // self.block - 1), 1.0)
        if self.together > 1:
            return [SCORES[self.score](1 / (1 + np.exp(-said))).sum() >= least * self.together] * len(look.rows)
        if not self.layer.acceptance:  # what it said are logits, and their order is all that counts
            if self.score == "mean":
                said = 1 / (1 + np.exp(-said))
            else:
                least = log(least / (1 - least)) if 0 < least < 1 else inf if least else -inf
        return (SCORES[self.score](said) >= least).tolist()

    def certain(self, rows: Sequence[int], depth: int) -> int:
        if self.cheap is not None:
            return self.cheap.certain(rows, depth)
        return min(self.block - depth % self.block, self.most - depth)

    def _ask(self, look: Look) -> Array:
        """What the layer says [R, b] of the last block of the rows that have come here."""
        looks, rows = self.looks, look.rows
        self.looks = []
        if look.depth <= self.block:
            self.state = self._begin(rows)
        elif rows != self.state_rows:
            self.state = self.state.select([self.state_rows.index(row) for row in rows])
        self.state_rows = rows
        new = len(looks)
        tokens = [drafted[-new:] for drafted in look.tokens]
        ids = torch.tensor(tokens, device=look.scores.device)
        picks = [None if each.rows == rows else [each.rows.index(row) for row in rows] for each in looks]

        def gathered(parts: list[Tensor]) -> Tensor:
            return torch.stack([part if at is None else part[at] for part, at in zip(parts, picks, strict=True)], 1)

        scores = looks[0].scores[:, None] if new == 1 else gathered([each.scores for each in looks])
        chances = chances_of(scores, ids).tolist()
        said, self.state = self.layer.step(
            self.state,
            [[log(max(chance, LEAST)) for chance in row] for row in chances],
            [self._echo(row, drafted, new) for row, drafted in zip(rows, look.tokens, strict=True)]
            if self.echoing
            else None,
            gathered([each.hidden for each in looks]) if self.wants_draft else None,  # type: ignore[misc]
            self.embeddings(ids) if self.embedding else None,
        )
        return said

    def _begin(self, rows: list[int]) -> QuickState:
        target = None
        if self.wants_target:
            size = self.layer.target_size
            target = self.target[rows] if self.target is not None else torch.zeros(len(rows), size)
        return self.layer.begin(target, [self.runs[row] for row in rows])

    def _echo(self, row: int, drafted: list[int], new: int) -> list[tuple[int, ...]]:
        text, echo, reach = self.seqs[row].tokens, self.echoes[row], max(SIZES)
        echo.hear(text)
        return echo.answers([*text[-reach:], *drafted[:-new]][-reach:], drafted[-new:])

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None) -> None:
        self.looks = []  # of rows that ended within a block
        if hidden is not None:
            self.target = hidden[range(len(verdicts)), [verdict.path[-1] for verdict in verdicts]]
        for runs, verdict in zip(self.runs, verdicts, strict=True):
            runs[0] += verdict.accepted
            if verdict.rejected:
                runs[:] = [0.0, runs[0], runs[1]]
            else:
                runs[0] += 1

    def keep(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[row] for row in rows]
        self.echoes = [self.echoes[row] for row in rows]
        self.runs = [self.runs[row] for row in rows]
        if self.target is not None:
            self.target = self.target[rows]
        if rows:
            self._set_threshold()
