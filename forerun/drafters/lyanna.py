"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224).

States are drafted without drafted tokens, and tokens are chosen from all states at the end. So
states after a rejected token remain valid, and can be reused with the correct token.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.drafters.head import HeadDrafter, HeadWork, NewFeatures
from forerun.engine.draft import Draft
from forerun.methods.head import Lyanna
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.backends.heads import HiddenLM
    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.planning.cost_model import CostSource


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
    """Draft `depth` states a step, and a chain or tree of tokens from them.

    Attributes:
        old: {sequence: logits of an earlier step}.
    """

    def __init__(self, settings: Lyanna, head: HiddenLM, costs: CostSource | None = None) -> None:
        """Take over a head. `costs`: for paced methods."""
        super().__init__(settings, head, costs)
        self.reuse = settings.reuse
        self.weight = settings.weight
        self.least = settings.least
        self.old: dict[int, OldLogits] = {}
        if self.reuse == "both":
            self.extra_nodes += self.nodes

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence and its old logits."""
        super().drop(seq)
        self.old.pop(seq.id, None)

    def draft(self, seqs: list[Sequence], limits: list[int], work: HeadWork) -> list[Draft]:
        """Return a draft for each sequence: from new states, from old logits, or from both."""
        old = [self.old.get(seq.id) for seq in seqs]
        free = self._free(seqs, limits, old)
        drafts = [Draft.root(seq.tokens[-1]) for seq in seqs]
        fresh = [row for row, limit in enumerate(limits) if limit > 0 and not free[row]]
        if fresh:
            self._draft_fresh(fresh, drafts, seqs, limits, work)
        reused: dict[int, OldLogits] = {}
        for row, logits in enumerate(old):
            is_wanted = limits[row] > 0 and (free[row] or self.reuse == "both")
            if logits is not None and is_wanted:
                reused[row] = logits
        if not reused:
            return drafts
        depths = [min(limits[row], len(logits.places)) for row, logits in reused.items()]
        branches = self._draft_again([seqs[row] for row in reused], depths, [*reused.values()])
        for row, branch in zip(reused, branches, strict=True):
            drafts[row] = branch if free[row] else drafts[row].merge(branch)
        return drafts

    def _draft_fresh(
        self,
        rows: list[int],
        drafts: list[Draft],
        seqs: list[Sequence],
        limits: list[int],
        work: HeadWork,
    ) -> None:
        """Draft new states for some rows, put the drafts in their places, and keep the logits."""
        draft_rows = self.draft_in_c if self.head.grows(self.width) else self._draft_in_torch
        old = [self.old.get(seqs[row].id) for row in rows]
        added = [self._added(logits) for logits in old]
        row_seqs = [seqs[row] for row in rows]
        fresh = draft_rows(row_seqs, [limits[row] for row in rows], work, added)
        for row, logits, (draft, new_logits) in zip(rows, old, fresh, strict=True):
            drafts[row] = draft
            left = len(logits.places) if logits is not None else 0
            self._keep(seqs[row], draft, new_logits, left)

    def _added(self, old: OldLogits | None) -> Tensor | None:
        """Return the old logits [n, S] that are added to fresh ones, if any."""
        if old is None or self.reuse != "add":
            return None
        # Several threads of torch would wait actively beside the next forward.
        with one_thread(old.places.numel()):
            return old.places * self.weight

    def _draft_in_torch(
        self,
        seqs: list[Sequence],
        limits: list[int],
        work: HeadWork,
        old: abc.Sequence[Tensor | None],
    ) -> list[tuple[Draft, Tensor]]:
        """Do what `draft_in_c` does."""
        ids = [seq.id for seq in seqs]
        plan = self.plan(seqs, limits)
        deep = limits if plan is None else plan.deep
        rolled = _RolledStates(self.head, ids, self.take(seqs), deep, work)

        def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            scores = rolled.logits(k).clone()  # the new logits are kept unchanged
            for row, added in enumerate(old):
                if added is not None and k < len(added):
                    scores[row] += added[k]
            return self._informed(scores, tokens)

        drafts = self.grow(seqs, logits, limits, plan)
        self.head.crop(ids, rolled.lengths)
        places = torch.stack(rolled.places)
        return [
            (draft, places[:depth, row])
            for row, (draft, depth) in enumerate(zip(drafts, deep, strict=True))
        ]

    def _draft_again(
        self, seqs: list[Sequence], limits: list[int], old: list[OldLogits]
    ) -> list[Draft]:
        """Return drafts from old logits alone."""

        def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            # A row that has ended gets those of its last place.
            rows = [row.places[min(k, len(row.places) - 1)] for row in old]
            return self._informed(torch.stack(rows), tokens)

        plan = None
        if self.planner is not None:
            plan = self.planner.plan(seqs, limits, [], [row.ahead for row in old])
        return self.grow(seqs, logits, limits, plan, "reused")

    def _informed(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [B, w, S] after tokens [B, w] from those [B, S] of a place."""
        if self.head.information is not None:
            return logits[:, None] + self.head.information(tokens)
        # They do not depend on the token before.
        return logits[:, None].repeat(1, tokens.shape[1], 1)

    def _keep(self, seq: Sequence, draft: Draft, logits: Tensor, left: int) -> None:
        """Keep a fresh draft's logits [n, S]; its first `left` places had old ones."""
        if self.reuse == "add":
            for node, depth in enumerate(draft.depths):
                if 0 < depth <= left:
                    draft.origins[node] = "reused"
        if self.reuse != "off":
            self.old[seq.id] = OldLogits(logits)

    def _free(
        self, seqs: list[Sequence], limits: list[int], old: list[OldLogits | None]
    ) -> list[bool]:
        """Return which sequences draft from old logits alone.

        Greedy ones do so only if all of them can, because otherwise the head runs anyway.
        """
        if self.reuse != "free":
            return [False] * len(seqs)
        free = [logits is not None and len(logits.places) >= self.least for logits in old]
        greedy = [row for row, seq in enumerate(seqs) if seq.greedy]
        if not all(free[row] or limits[row] < 1 for row in greedy):
            for row in greedy:
                free[row] = False
        return free

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        """Keep the features of the accepted path, and the old logits of the places after it."""
        super().observe(outcomes, memo)
        for outcome in outcomes:
            old = self.old.pop(outcome.sequence.id, None)
            left = old.after(len(outcome.verdict.path)) if old is not None else None
            if left is not None:
                self.old[outcome.sequence.id] = left


class _RolledStates:
    """States that torch drafts, a block at a time, and the logits of their places.

    Attributes:
        places: [R, S] the logits of each place so far.
        lengths: of the head's rows without drafted states.
    """

    def __init__(
        self, head: HiddenLM, ids: list[int], new: NewFeatures, deep: list[int], work: HeadWork
    ) -> None:
        """Begin a draft.

        Args:
            head: what drafts.
            ids: the sequences of the rows.
            new: what the head runs first.
            deep: the places of each row, which a plan may add to.
            work: counts the head's forwards.
        """
        self._head = head
        self._ids = ids
        self._new = new
        self._deep = deep
        self._work = work
        self._last: Tensor | None = None  # [R, d] the states of the last place
        self.places: list[Tensor] = []
        self.lengths: list[int] = []

    def logits(self, k: int) -> Tensor:
        """Return the logits [R, S] of place k, at most one block after the last one."""
        if k == len(self.places):
            self._draft(max(self._deep) - k)
        return self.places[k]

    def _draft(self, count: int) -> None:
        """Draft so many further states. One product gives the logits of all."""
        head = self._head
        started_at = perf_counter()
        states: list[Tensor] = []
        last = self._last
        if last is None:
            last = head.extend(self._ids, *self._new)
            states.append(last)
            self.lengths = [head.length(id) for id in self._ids]
        states += head.roll(self._ids, last, count - len(states))
        self._last = states[-1]
        logits = head.logits(torch.cat(states)).view(count, len(self._ids), -1)
        self.places.extend(logits.unbind())
        self._work.add(count, started_at)
