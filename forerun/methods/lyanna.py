"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224). States are drafted without looking at drafted
tokens, and tokens are chosen from all of them at the end. So states behind a rejected token are still valid, and can be
used again with the right token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter
from forerun.methods.base import Parts, at_least, between
from forerun.methods.hidden import HeadDrafter, Heads, Paced
from forerun.methods.later import torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.backends.heads import HiddenLM
    from forerun.engine.acceptance import Verdict
    from forerun.engine.costs import Costs
    from forerun.engine.sequence import Mode, Sequence
    from forerun.methods.budget import Budget

REUSE = ("off", "add", "both", "free")


@dataclass(frozen=True)
class Lyanna(Heads):
    """Drafts `depth` hidden states with a trained head (arXiv 2602.21224). For a `width` of 1 their tokens are a chain,
    else the best `nodes` of a tree that is so many beams wide.

    `reuse` of what an earlier step left behind a rejected token: "add" gives it `weight` in the fresh draft, "both"
    drafts from it beside the fresh draft, "free" drafts from it alone, without the head, where it holds `least` places
    or more (the paper's Figure 6), "off" drops it. The figure's tree has a `width` of 2: the best children of all beams
    go on, others end as leaves.
    """

    reuse: str = "add"
    weight: float = 0.25
    least: int = 2
    name: ClassVar[str] = "lyanna"
    head: ClassVar[str | None] = "lyanna"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("least", self.least, 1)
        between("weight", self.weight, 0, 10)
        if self.reuse not in REUSE:
            raise ValueError(f"reuse must be {', '.join(REUSE[:-1])} or {REUSE[-1]}, not {self.reuse!r}")

    def build(self, parts: Parts) -> Drafter:
        assert parts.head is not None
        return LyannaDrafter(
            parts.head.fresh(),
            *self.shape,
            self.reuse,
            self.weight,
            self.least,
            self.costs_for(parts),
            self.steps,
            self.drawing,
        )


@dataclass(frozen=True)
class PacerLyanna(Paced, Lyanna):
    """Lyanna, `depth` and `nodes` being limits: each step goes as deep, in blocks of `block` states, and takes as many
    tokens as its most probable paths are worth, by the head's calibration and what forwards cost here."""

    depth: int = 16
    nodes: int = 16
    block: int = 4
    name: ClassVar[str] = "pacer-lyanna"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse == "both":
            raise ValueError(
                "pacer-lyanna knows no value of a second draft: reuse must be off, add or free, not 'both'"
            )


@dataclass(frozen=True)
class OldLogits:
    """Logits that an earlier step drafted.

    Attributes:
        places: [n, S], for the next place of the sequence, the one behind it, and so on.
        ahead: how many places lay before the first of these when they were drafted.
    """

    places: Tensor
    ahead: int = 0

    def behind(self, count: int) -> OldLogits | None:
        """What is left when the sequence has grown by so many tokens."""
        if count >= len(self.places):
            return None
        return OldLogits(self.places[count:], self.ahead + count)


class LyannaDrafter(HeadDrafter):
    """Drafts `depth` states a step and makes a chain or tree of tokens from them.

    `reuse` of the logits that an earlier step drafted for places behind the new root:
        "add": they are added to the new ones with `weight` (mode A of METHODS; ours). Their tokens count as reused.
        "both": branches of their own beside the fresh draft, verified in the same target forward (mode B, the paper's
            verification fusion). They are as many nodes again, at most.
        "free": where `least` or more are left, the draft is made from them alone and the head does not run (Figure 6
            of the paper; mode D, and for a `least` of 1 mode C, in which re-sampled tokens always get a target forward
            of their own). The new root's token information goes to the oldest row that is left, that of the tokens
            behind it to the next ones. Greedy sequences do so only where all of a step can, as the head runs anyway.
        "off": they are dropped.

    With `costs_for`, the costs of forwards by mode, each step chooses its depth and number of nodes (`Budget`), and
    states are drafted in blocks of `block`.
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
        costs_for: Callable[[Mode], Costs] | None = None,
        block: int = 1,
        drawing: str | None = None,
    ) -> None:
        from forerun.methods.budget import Budgets

        super().__init__(head, depth, width, nodes, drawing)
        self.reuse, self.weight, self.least = reuse, weight, least
        self.budgets = Budgets(head, costs_for, block, nodes) if costs_for is not None else None
        self.old: dict[int, OldLogits] = {}  # by sequence
        if reuse == "both":
            self.spread += nodes

    def drop(self, seq: Sequence) -> None:
        super().drop(seq)
        self.old.pop(seq.id, None)

    def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        old = [self.old.get(seq.id) for seq in seqs]
        left = [len(each.places) if each is not None else 0 for each in old]
        free = self._free(seqs, limits, left)
        fresh = [row for row, limit in enumerate(limits) if limit > 0 and not free[row]]
        deep = [min(limit, left[row]) if free[row] else limit for row, limit in enumerate(limits)]
        ahead = [0 if row in fresh or each is None else each.ahead for row, each in enumerate(old)]
        budget = self.budgets.of(seqs, deep, fresh, ahead) if self.budgets is not None else None
        if fresh and self.reuse != "both":
            added = old[0].places if old[0] is not None and self.reuse == "add" else None
            guessed = self.guess(seqs, deep, budget, added, self.weight)
            if guessed is not None:
                self._keep(seqs[0], guessed[0], guessed[1], left[0])
                return [guessed[0]]
        logits = StepLogits(self, seqs, fresh, deep, old, budget)
        origins = ["reused" if is_free else "draft" for is_free in free]
        drafts = self.grow(seqs, logits, deep, budget, origins)
        logits.close()
        for row in fresh:
            self._keep(seqs[row], drafts[row], logits.drafted(row), left[row])
        if self.reuse == "both" and any(left):
            from forerun.methods import beams

            again = [min(pair) for pair in zip(limits, left, strict=True)]
            branches = StepLogits(self, seqs, [], again, old)
            roots = [seq.tokens[-1] for seq in seqs]
            tree = again, self.width, self.nodes
            more = beams.grow(roots, branches, self.head.hot, *tree, origins=["reused"] * len(seqs))
            drafts = [draft.merge(own) for draft, own in zip(drafts, more, strict=True)]
        return drafts

    def _keep(self, seq: Sequence, draft: Draft, logits: Tensor, left: int) -> None:
        """Keeps the logits [n, S] of a fresh draft, to which `left` old ones were added."""
        if self.reuse == "add":
            for node, depth in enumerate(draft.depths):
                if 0 < depth <= left:
                    draft.origins[node] = "reused"
        if self.reuse != "off":
            self.old[seq.id] = OldLogits(logits)

    def _free(self, seqs: list[Sequence], limits: list[int], left: list[int]) -> list[bool]:
        """Which rows draft from old logits alone."""
        if self.reuse != "free":
            return [False] * len(seqs)
        free = [count >= self.least for count in left]
        if not all(free[row] or limits[row] < 1 for row, seq in enumerate(seqs) if seq.greedy):
            free = [is_free and not seq.greedy for is_free, seq in zip(free, seqs, strict=True)]
        return free

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        super().observe(seqs, drafts, verdicts, hidden)
        for seq, verdict in zip(seqs, verdicts, strict=True):
            old = self.old.pop(seq.id, None)
            left = old.behind(len(verdict.path)) if old is not None else None
            if left is not None:
                self.old[seq.id] = left


class StepLogits:
    """The logits of one step, for `grow`. Rows in `fresh` get new ones: the head drafts their states when a depth is
    first asked for, all of them at once, or as far as a budget lets them go. Other rows take old ones."""

    def __init__(
        self,
        drafter: LyannaDrafter,
        seqs: list[Sequence],
        fresh: list[int],
        limits: list[int],
        old: list[OldLogits | None],
        budget: Budget | None = None,
    ) -> None:
        """`limits`: how deep each row may go."""
        self.drafter, self.head, self.old, self.budget, self.limits = drafter, drafter.head, old, budget, limits
        self.seqs, self.fresh = [seqs[row] for row in fresh], {row: index for index, row in enumerate(fresh)}
        self.places: list[Tensor] = []  # new logits [F, S] of each place
        self._state: Tensor | None = None  # the last one [F, d]
        self._lengths: list[int] = []  # of the head's rows before this step's states

    def __call__(self, k: int, tokens: Tensor, at: Tensor) -> Tensor:
        self._reach(k)
        found = self._summed(k, len(tokens))[:, None]
        if self.head.information is not None:
            return found + self.head.information(tokens)
        return found.repeat(1, tokens.shape[1], 1)  # whatever the token before, the logits are the same

    def drafted(self, row: int) -> Tensor:
        """A fresh row's new logits [n, S], as many as it would have alone: its next draft must not depend on others."""
        return torch.stack([place[self.fresh[row]] for place in self.places[: self._deep(row)]])

    def close(self) -> None:
        """Has the head forget the drafted states."""
        if self.fresh:
            self.head.crop([seq.id for seq in self.seqs], self._lengths)

    def _deep(self, row: int) -> int:
        return self.limits[row] if self.budget is None else self.budget.deep[row]

    def _reach(self, k: int) -> None:
        """Has the head draft states where those of depth k are not there yet."""
        if self.fresh and k == len(self.places):
            self._run(max(self._deep(row) for row in self.fresh) - k)

    def _summed(self, k: int, count: int) -> Tensor:
        """Logits [B, S] of one place without token information, old ones added."""
        found = self._at(k, count)
        if self.drafter.reuse == "add":
            old = [(row, self.old[row]) for row in self.fresh]
            more = {row: own.places[k] for row, own in old if own is not None and k < len(own.places)}
            if more:
                found = found.clone()  # the new ones are kept as they are
                for row, places in more.items():
                    found[row] += self.drafter.weight * places
        return found

    def _at(self, k: int, count: int) -> Tensor:
        """Logits [B, S] of one place without token information; of any place in rows that have ended before."""
        new = self.places[min(k, len(self.places) - 1)] if self.fresh else None
        if new is not None and len(new) == count:
            return new
        rows = []
        for row, old in enumerate(self.old):
            if new is not None and row in self.fresh:
                rows.append(new[self.fresh[row]])
            elif old is not None:
                rows.append(old.places[min(k, len(old.places) - 1)])
            else:
                rows.append(torch.zeros(len(self.head.hot), dtype=self.head.dtype, device=self.head.device))
        return torch.stack(rows)

    def _run(self, steps: int) -> None:
        """Drafts so many more states, and all of their logits."""
        if steps < 1:
            return
        begun, ids = perf_counter(), [seq.id for seq in self.seqs]
        states = []
        if self._state is None:
            self._state = self.drafter.run(self.seqs)
            self._lengths = [self.head.length(id) for id in ids]
            states.append(self._state)
        states += self.head.roll(ids, self._state, steps - len(states))
        self._state = states[-1]
        found = self.head.logits(torch.cat(states))  # one product for all
        self.places += found.view(steps, len(ids), -1).unbind()
        self.drafter.forwards += steps
        self.drafter.seconds += perf_counter() - begun
