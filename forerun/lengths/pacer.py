"""Pacer: draft block by block, and stop where a trained layer finds that the target will not follow.

The idea of blockwise pre-verification is that of arXiv 2602.01274. The stop rule that follows from measured costs, and
what the layer sees (forerun/nn/pre_verifier.py), are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from forerun.costs import Costs
from forerun.decode import Generation
from forerun.draft import Draft
from forerun.lengths import LengthPolicy, Look
from forerun.nn.echo import SIZES, Echo
from forerun.nn.pre_verifier import USUAL, PreVerifier, State, scalars_of
from forerun.sampling import Verdict

SCORES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda block: block[-1],
    "mean": lambda block: sum(block) / len(block),
    "min": min,
}
MEMORY = 0.95  # of the rate that a step more is weighed against


class PacerStop(LengthPolicy):
    """Drafts in blocks of `block` tokens, at most `most`; stops behind the k-th block (from 0) if the `score` of its
    tokens' survival is below `threshold * rho ** k`.

    Without a threshold it stops where the expected tokens of the next block are fewer than decoding has been making in
    the time that this block would take, by the table of costs: the block's draft forwards, the layer, and what the
    target's forward grows by. That is the rule of optimal stopping with a horizon of one block; the rate is a running
    mean over steps, of tokens and of their time by the same table, so that no clock is read.
    """

    def __init__(
        self,
        layer: PreVerifier,
        embeddings: nn.Module,
        block: int,
        most: int,
        threshold: float | None = None,
        rho: float = 1.0,
        score: str = "last",
        costs: Costs | None = None,
    ) -> None:
        assert threshold is not None or costs is not None
        self.layer, self.embeddings, self.block, self.most = layer, embeddings, block, most
        self.threshold, self.rho, self.score, self.costs = threshold, rho, SCORES[score], costs
        inputs = layer.config.inputs
        self.wants_draft, self.wants_target = "hidden" in inputs, "target" in inputs
        self.echoing, self.embedding = "echoes" in inputs, "token" in inputs
        self.brought = self.spent = 0.0

    def start(self, seqs: Sequence[Generation]) -> None:
        self.seqs = list(seqs)
        self.echoes = [Echo() for _ in seqs]
        self.runs = [[0.0, USUAL, USUAL] for _ in seqs]
        self.target: Tensor | None = None
        self.looks: list[Look] = []
        self.state_rows: list[int] = []

    def more(self, look: Look) -> list[bool]:
        self.looks.append(look)
        if look.depth < self.most and look.depth % self.block:
            return [True] * len(look.rows)
        logits, survival = self._ask(look)
        rows, done = len(look.rows), look.depth
        if done >= self.most:
            return [False] * rows
        if self.threshold is not None:
            least = self.threshold * self.rho ** (done // self.block - 1)
            return [self.score(block) >= least for block in survival.tolist()]
        ahead = (self.block * logits[:, -1, 1].sigmoid()).tolist()
        least = self._rate() * self._price(rows, done)
        return [tokens >= least for tokens in ahead]

    def _ask(self, look: Look) -> tuple[Tensor, Tensor]:
        """Logits [R, b, 2] and survival [R, b] of the last block of the rows that have come here."""
        looks, rows = self.looks, look.rows
        self.looks = []
        if look.depth <= self.block:
            self.state = self._begin(rows)
        elif rows != self.state_rows:
            self.state = self.state.select(torch.tensor([self.state_rows.index(row) for row in rows]))
        self.state_rows = rows
        new = len(looks)
        tokens = [drafted[-new:] for drafted in look.tokens]
        ids = torch.tensor(tokens, device=look.scores.device)
        picks = [None if each.rows == rows else [each.rows.index(row) for row in rows] for each in looks]

        def gathered(parts: list[Tensor]) -> Tensor:
            return torch.stack([part if at is None else part[at] for part, at in zip(parts, picks, strict=True)], 1)

        hidden = gathered([each.hidden for each in looks]) if self.wants_draft else None  # type: ignore[misc]
        echoes = None
        if self.echoing:
            echoes = torch.tensor(
                [self._echo(row, drafted)[-new:] for row, drafted in zip(rows, look.tokens, strict=True)]
            )
        logits, survival, self.state = self.layer.step(
            self.state,
            scalars_of(gathered([each.scores for each in looks]), ids),
            echoes,
            hidden,
            self.embeddings(ids) if self.embedding else None,
        )
        return logits, survival

    def _begin(self, rows: list[int]) -> State:
        target = None
        if self.wants_target:
            size = self.layer.config.target_size
            target = self.target[rows] if self.target is not None else torch.zeros(len(rows), size)
        return self.layer.begin(target, torch.tensor([self.runs[row] for row in rows]))

    def _echo(self, row: int, drafted: list[int]) -> list[tuple[int, ...]]:
        text = self.seqs[row].tokens
        self.echoes[row].hear(text)
        return self.echoes[row].answers(text[-max(SIZES) :], drafted)

    def _rate(self) -> float:
        """Tokens per ms lately; at first that of plain decoding."""
        assert self.costs is not None
        return self.brought / self.spent if self.spent else len(self.seqs) / self.costs.verify(len(self.seqs))

    def _price(self, rows: int, done: int) -> float:
        """ms that a block more of each of `rows` drafts takes, as one row's share."""
        assert self.costs is not None
        growth = self.costs.verify(rows * (done + 1 + self.block)) - self.costs.verify(rows * (done + 1))
        return (self.block * self.costs.drafting(rows) + self.costs.policy + growth) / rows

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
        if self.costs is not None:
            longest = max(draft.drafted for draft in drafts)
            calls = -(-longest // self.block)
            spent = longest * self.costs.drafting(len(drafts)) + calls * self.costs.policy
            spent += self.costs.verify(len(drafts) * (longest + 1))
            self.spent = MEMORY * self.spent + spent
            self.brought = MEMORY * self.brought + sum(verdict.accepted + 1 for verdict in verdicts)

    def keep(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[row] for row in rows]
        self.echoes = [self.echoes[row] for row in rows]
        self.runs = [self.runs[row] for row in rows]
        if self.target is not None:
            self.target = self.target[rows]
