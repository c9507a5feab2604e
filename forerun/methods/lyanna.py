"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224). States are drafted without drafted tokens, and
tokens are chosen from all states at the end. So states after a rejected token remain valid and can be reused with the
correct token."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter
from forerun.methods.base import Parts, integer, number, one_of
from forerun.methods.hidden import HeadDrafter, Heads, Paced
from forerun.methods.later import beams, budget, torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.backends.heads import HiddenLM
    from forerun.engine.acceptance import Verdict
    from forerun.engine.costs import Costs
    from forerun.engine.sequence import Sequence


@dataclass(frozen=True)
class Lyanna(Heads):
    """Draft `depth` hidden states with a trained head (arXiv 2602.21224). With a `width` of 1 the tokens are a chain,
    else the best `nodes` of a tree of `width` beams (2 in the paper's Figure 6).

    `reuse` of old logits, those that an earlier step drafted for places after a rejected token:
        "add": add them to the fresh logits, times `weight` (mode A, ours). Their tokens count as reused.
        "both": draft branches from them beside the fresh draft, at most `nodes` more, verified in the same target
            forward (mode B, the paper's verification fusion).
        "free": draft from them alone, without the head, if at least `least` places are left (Figure 6; mode D, or mode
            C for a `least` of 1). Token information is that of the new tokens, from the root on. Greedy sequences do so
            only if all of a step can, as otherwise the head runs anyway.
        "off": drop them.
    """

    reuse: str = one_of("add", "off", "add", "both", "free")
    weight: float = number(0.25, 0, 10)
    least: int = integer(2)
    name: ClassVar[str] = "lyanna"
    head: ClassVar[str | None] = "lyanna"

    def build(self, parts: Parts) -> Drafter:
        assert parts.head is not None
        return LyannaDrafter(self, parts.head.fresh(), parts.costs)


@dataclass(frozen=True)
class PacerLyanna(Paced, Lyanna):
    """Lyanna with `depth` and `nodes` as limits. Each step chooses its depth, in blocks of `block` states, and its
    number of nodes by the head's calibration and the table of costs."""

    depth: int = integer(16)
    nodes: int = integer(16)
    block: int = integer(4)
    name: ClassVar[str] = "pacer-lyanna"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse == "both":
            raise ValueError("pacer-lyanna cannot value a second draft: reuse must be off, add or free, not 'both'")


@dataclass(frozen=True)
class OldLogits:
    """Logits that an earlier step drafted.

    Attributes:
        places: [n, S] for the next n places of the sequence.
        ahead: the number of drafted places before these in that step.
    """

    places: Tensor
    ahead: int = 0

    def after(self, count: int) -> OldLogits | None:
        """Return what is left after the sequence has grown by `count` tokens."""
        if count >= len(self.places):
            return None
        return OldLogits(self.places[count:], self.ahead + count)


class LyannaDrafter(HeadDrafter):
    """Draft `depth` states a step, and a chain or tree of tokens from them."""

    def __init__(self, settings: Lyanna, head: HiddenLM, costs: Costs | None = None) -> None:
        super().__init__(settings, head, costs)
        self.reuse, self.weight, self.least = settings.reuse, settings.weight, settings.least
        self.old: dict[int, OldLogits] = {}  # by sequence
        if self.reuse == "both":
            self.spread += self.nodes

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
        plan = self.budgets.of(seqs, deep, fresh, ahead) if self.budgets is not None else None
        if fresh and self.reuse != "both":
            added = old[0].places if old[0] is not None and self.reuse == "add" else None
            fused = self.chain_alone(seqs, deep, plan, added, self.weight)
            if fused is not None:
                self._keep(seqs[0], fused[0], fused[1], left[0])
                return [fused[0]]
        logits = StepLogits(self, seqs, fresh, deep, old, plan)
        origins = ["reused" if is_free else "draft" for is_free in free]
        drafts = self.grow(seqs, logits, deep, plan, origins)
        logits.close()
        for row in fresh:
            self._keep(seqs[row], drafts[row], logits.drafted(row), left[row])
        if self.reuse == "both" and any(left):
            again = [min(pair) for pair in zip(limits, left, strict=True)]
            branches = StepLogits(self, seqs, [], again, old)
            roots = [seq.tokens[-1] for seq in seqs]
            tree = again, self.width, self.nodes
            more = beams.grow(roots, branches, self.head.hot, *tree, origins=["reused"] * len(seqs))
            drafts = [draft.merge(own) for draft, own in zip(drafts, more, strict=True)]
        return drafts

    def _keep(self, seq: Sequence, draft: Draft, logits: Tensor, left: int) -> None:
        """Keep the logits [n, S] of a fresh draft, in which the first `left` places had old ones."""
        if self.reuse == "add":
            for node, depth in enumerate(draft.depths):
                if 0 < depth <= left:
                    draft.origins[node] = "reused"
        if self.reuse != "off":
            self.old[seq.id] = OldLogits(logits)

    def _free(self, seqs: list[Sequence], limits: list[int], left: list[int]) -> list[bool]:
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
            left = old.after(len(verdict.path)) if old is not None else None
            if left is not None:
                self.old[seq.id] = left


class StepLogits:
    """The logits of one step, for `grow`. Rows in `fresh` get new ones. The head drafts their states when a depth is
    first needed: all depths at once, or as far as a `plan` allows. Other rows use old logits."""

    def __init__(
        self,
        drafter: LyannaDrafter,
        seqs: list[Sequence],
        fresh: list[int],
        limits: list[int],
        old: list[OldLogits | None],
        plan: budget.Budget | None = None,
    ) -> None:
        """Take the step's rows. `limits`: the depth of each row."""
        self.drafter, self.head, self.old, self.plan, self.limits = drafter, drafter.head, old, plan, limits
        self.seqs, self.fresh = [seqs[row] for row in fresh], {row: index for index, row in enumerate(fresh)}
        self.places: list[Tensor] = []  # new logits [F, S] of each place
        self._state: Tensor | None = None  # the last one [F, d]
        self._lengths: list[int] = []  # of the head's rows without this step's states

    def __call__(self, k: int, tokens: Tensor, at: Tensor) -> Tensor:
        if self.fresh and k == len(self.places):
            self._run(max(self._deep(row) for row in self.fresh) - k)
        found = self._summed(k, len(tokens))[:, None]
        if self.head.information is not None:
            return found + self.head.information(tokens)
        return found.repeat(1, tokens.shape[1], 1)  # the logits do not depend on the token before

    def drafted(self, row: int) -> Tensor:
        """Return a fresh row's new logits [n, S], as many as it would have alone, as rows must not depend on each
        other."""
        return torch.stack([place[self.fresh[row]] for place in self.places[: self._deep(row)]])

    def close(self) -> None:
        """Drop the drafted states from the head's cache."""
        if self.fresh:
            self.head.crop([seq.id for seq in self.seqs], self._lengths)

    def _deep(self, row: int) -> int:
        return self.limits[row] if self.plan is None else self.plan.deep[row]

    def _summed(self, k: int, count: int) -> Tensor:
        """Return logits [B, S] of place k without token information, with old logits added."""
        found = self._at(k, count)
        if self.drafter.reuse == "add":
            old = [(row, self.old[row]) for row in self.fresh]
            more = {row: own.places[k] for row, own in old if own is not None and k < len(own.places)}
            if more:
                found = found.clone()  # the new logits are kept unchanged
                for row, places in more.items():
                    found[row] += self.drafter.weight * places
        return found

    def _at(self, k: int, count: int) -> Tensor:
        """Return logits [B, S] of place k without token information; rows that have ended get those of any place."""
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
        found = self.head.logits(torch.cat(states))  # one product for all states
        self.places += found.view(steps, len(ids), -1).unbind()
        self.drafter.forwards += steps
        self.drafter.seconds += perf_counter() - begun
