"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224). States are drafted without drafted tokens, and
tokens are chosen from all states at the end. So states after a rejected token remain valid and can be reused with the
correct token."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.drafters.head import HeadDrafter
from forerun.engine.draft import Draft
from forerun.methods.head import Lyanna
from forerun.sampling import threads

if TYPE_CHECKING:
    from forerun.backends.heads import HiddenLM
    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.planning.cost_model import Costs


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
        drafts, known = (
            [Draft.root(seq.tokens[-1]) for seq in seqs],
            [self.old.get(seq.id) for seq in seqs],
        )
        free = self._free(seqs, limits, known)
        fresh = [row for row, limit in enumerate(limits) if limit > 0 and not free[row]]
        if fresh:
            own, old = [seqs[row] for row in fresh], [known[row] for row in fresh]
            added = [self._added(each) for each in old]
            draft_now = self.draft_in_c if self.head.grows(self.width) else self._draft_in_torch
            found = draft_now(own, [limits[row] for row in fresh], added)
            for row, each, (draft, logits) in zip(fresh, old, found, strict=True):
                drafts[row] = draft
                self._keep(seqs[row], draft, logits, len(each.places) if each is not None else 0)
        reused = [
            limit > 0 and (is_free or self.reuse == "both")
            for limit, is_free in zip(limits, free, strict=True)
        ]
        if again := [(row, each) for row, each in enumerate(known) if each and reused[row]]:
            deep = [min(limits[row], len(each.places)) for row, each in again]
            branches = self._draft_again(
                [seqs[row] for row, _ in again], deep, [each for _, each in again]
            )
            for (row, _), branch in zip(again, branches, strict=True):
                drafts[row] = branch if free[row] else drafts[row].merge(branch)
        return drafts

    def _added(self, old: OldLogits | None) -> Tensor | None:
        """Return the old logits [n, S] that are added to fresh ones, if any."""
        if old is None or self.reuse != "add":
            return None
        with threads.one_thread(
            old.places.numel()
        ):  # because others would wait actively beside the next forward
            return old.places * self.weight

    def _draft_in_torch(
        self, seqs: list[Sequence], limits: list[int], old: abc.Sequence[Tensor | None]
    ) -> list[tuple[Draft, Tensor]]:
        """Do what `draft_in_c` does."""
        head, ids, plan, places = (
            self.head,
            [seq.id for seq in seqs],
            self.plan(seqs, limits),
            list[torch.Tensor](),
        )
        deep, lengths, state = limits if plan is None else plan.deep, list[int](), torch.empty(0)

        def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            nonlocal lengths, state
            if k == len(places):
                begun, steps = perf_counter(), max(deep) - k
                states = [head.extend(ids, *self.take(seqs))] if not k else []
                if not k:
                    lengths = [head.length(id) for id in ids]
                states += head.roll(ids, states[0] if states else state, steps - len(states))
                state = states[-1]
                places.extend(
                    head.logits(torch.cat(states)).view(steps, len(ids), -1).unbind()
                )  # one product for all
                self.forwards += steps
                self.seconds += perf_counter() - begun
            found = places[k].clone()  # the new logits are kept unchanged
            for row, own in enumerate(old):
                if own is not None and k < len(own):
                    found[row] += own[k]
            return self._informed(found, tokens)

        drafts = self.grow(seqs, logits, limits, plan)
        head.crop(ids, lengths)
        whole = torch.stack(places)
        return [
            (draft, whole[:own, row])
            for row, (draft, own) in enumerate(zip(drafts, deep, strict=True))
        ]

    def _draft_again(
        self, seqs: list[Sequence], limits: list[int], old: list[OldLogits]
    ) -> list[Draft]:
        """Return drafts from old logits alone."""

        def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            # A row that has ended gets those of any place.
            return self._informed(
                torch.stack([each.places[min(k, len(each.places) - 1)] for each in old]), tokens
            )

        plan = (
            self.planner.plan(seqs, limits, [], [each.ahead for each in old])
            if self.planner is not None
            else None
        )
        return self.grow(seqs, logits, limits, plan, "reused")

    def _informed(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [B, w, S] after tokens [B, w] from those [B, S] of a place."""
        if self.head.information is not None:
            return logits[:, None] + self.head.information(tokens)
        return logits[:, None].repeat(
            1, tokens.shape[1], 1
        )  # they do not depend on the token before

    def _keep(self, seq: Sequence, draft: Draft, logits: Tensor, left: int) -> None:
        """Keep the logits [n, S] of a fresh draft, in which the first `left` places had old ones."""
        if self.reuse == "add":
            for node, depth in enumerate(draft.depths):
                if 0 < depth <= left:
                    draft.origins[node] = "reused"
        if self.reuse != "off":
            self.old[seq.id] = OldLogits(logits)

    def _free(
        self, seqs: list[Sequence], limits: list[int], known: list[OldLogits | None]
    ) -> list[bool]:
        """Return which sequences draft from old logits alone."""
        if self.reuse != "free":
            return [False] * len(seqs)
        free = [each is not None and len(each.places) >= self.least for each in known]
        if not all(free[row] or limits[row] < 1 for row, seq in enumerate(seqs) if seq.greedy):
            free = [is_free and not seq.greedy for is_free, seq in zip(free, seqs, strict=True)]
        return free

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        super().observe(outcomes, memo)
        for outcome in outcomes:
            old = self.old.pop(outcome.sequence.id, None)
            left = old.after(len(outcome.verdict.path)) if old is not None else None
            if left is not None:
                self.old[outcome.sequence.id] = left
