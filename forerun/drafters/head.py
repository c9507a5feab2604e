"""The common base of methods that draft with a head over the target's hidden states."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.backends import quantised_heads
from forerun.drafters import beams
from forerun.drafters.beams import Array
from forerun.engine.draft import Draft
from forerun.engine.step import Proposal
from forerun.methods.head import Heads, Paced
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import PlannedDrafter
from forerun.planning.tree_plan import TreePlan, TreePlanner
from forerun.sampling import threads

if TYPE_CHECKING:
    from forerun.backends.heads import HiddenLM
    from forerun.backends.quantised_heads import Growth
    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome

PIECE = 2048  # a step reads prompts until it has read so many tokens
# Costs of the embedded target, if none were measured.
USUAL = Costs({1: 3.9, 8: 5.8, 32: 10.6}, {}, head={1: 0.4, 16: 0.8})


class HeadDrafter(PlannedDrafter):
    """Draft point masses with a head by the settings of its method.

    Attributes:
        features: {sequence: parts [n, d]} the target's features that the head has not run yet. The last one is at the
            position before the last token.
        unread: {sequence: what makes the head read its prompt}, of those that it has not read.
        seconds, forwards: of the head in the present step.
    """

    def __init__(
        self, settings: Heads, head: HiddenLM, costs: Costs | None = None, beams: int = 1
    ) -> None:
        """Take over a head. `costs`: for paced methods. `beams`: number of states that the head drafts at a depth."""
        self.head, self.width, self.wants_hidden = head, settings.width, head.capture
        self.nodes = settings.nodes if settings.width > 1 else settings.depth
        self.depth = min(settings.depth, self.nodes)
        self.spread = self.nodes if self.width > 1 else 0
        self.reads = head.reads
        self.features: dict[int, list[Tensor]] = {}
        self.unread: dict[int, Iterator[int]] = {}
        self.seconds, self.forwards = 0.0, 0
        self.planner: TreePlanner | None = None
        if isinstance(settings, Paced):
            known = costs if costs is not None and costs.head else USUAL
            self.planner = TreePlanner(head, known, settings.block, self.nodes, beams)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        head = self.head
        if hidden is None:
            hidden = torch.zeros(0, head.width, dtype=head.dtype, device=head.device)
        hidden = hidden[
            -head.reads :
        ].clone()  # because a view would keep the states of the whole prompt
        # The first draft runs the last feature, as it needs the state.
        self.features[seq.id] = [hidden[-1:].clone()]
        most = seq.limit + self.depth * self.width
        after = seq.tokens[
            len(seq.tokens) - len(hidden) : -1
        ]  # the token after each state but the last
        self.unread[seq.id] = head.prefill(seq.id, hidden[:-1], after, chunk, most)
        return ()

    def drop(self, seq: Sequence) -> None:
        self.features.pop(seq.id, None)
        self.unread.pop(seq.id, None)
        self.head.drop(seq.id)

    def take(self, seqs: list[Sequence]) -> tuple[list[Tensor], list[list[int]]]:
        """Return all features [n, d] of each sequence that the head has not run, for it to run them, and the tokens
        after these."""
        features = [torch.cat(self.features[seq.id]) for seq in seqs]
        for seq, own in zip(seqs, features, strict=True):
            self.features[seq.id] = [own[:0]]
        return features, [
            seq.tokens[len(seq.tokens) - len(own) :]
            for seq, own in zip(seqs, features, strict=True)
        ]

    def propose(self, seqs: list[Sequence]) -> Proposal:
        self.seconds, self.forwards, begun, left = 0.0, 0, perf_counter(), PIECE
        for seq in seqs:
            if seq.id in self.unread and seq.remaining > 1 and left > 0:
                left -= sum(self.unread.pop(seq.id))
        read = perf_counter() - begun if left < PIECE else 0.0
        # A sequence of a single token has no feature yet.
        ready = [seq.id not in self.unread and any(map(len, self.features[seq.id])) for seq in seqs]
        limits = [
            min(self.depth, seq.remaining - 1) * is_ready
            for seq, is_ready in zip(seqs, ready, strict=True)
        ]
        if max(limits) < 1:
            return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs], prompt_seconds=read)
        return Proposal(self.draft(seqs, limits), self.forwards, self.seconds, prompt_seconds=read)

    def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """Return a draft for each sequence, at most `limits[r]` deep. At least one limit is above 0."""
        raise NotImplementedError

    def draft_in_c(
        self, seqs: list[Sequence], limits: list[int], old: abc.Sequence[Tensor | None] = ()
    ) -> list[tuple[Draft, Tensor]]:
        """Return drafts of sequences whose limits are above 0, and the logits [n, S] of the places of each. C drafts a
        block at a time. `old`: see `Beams`."""
        head, ids, plan, begun = (
            self.head,
            [seq.id for seq in seqs],
            self.plan(seqs, limits),
            perf_counter(),
        )
        roots = [seq.tokens[-1] for seq in seqs]
        features, after = self.take(seqs)
        state = quantised_heads.Beams(roots, self.width, self.nodes, limits, old)
        blocks: list[Growth] = []

        def search(
            k: int, tokens: Array, at: Array, values: Array, ends: Array
        ) -> tuple[Array, Array, Array]:
            if k == state.start:
                most = max(limits if plan is None else plan.deep) - k
                if plan is not None:
                    state.curves = np.array([own[k : k + most] for own in plan.curves])[:, :, :2]
                state.ends[:] = ends
                own, before = (
                    (list(blocks[-1].states[-1:]), tokens[:, :1].tolist())
                    if blocks
                    else (features, after)
                )
                blocks.append(head.grow(ids, own, before, most, state))
            here = blocks[-1]
            place = k - state.start + len(here.states)
            return here.tokens[:, place], here.parents[:, place], here.found[:, place]

        drafts = beams.grow(roots, search, limits, self.width, self.nodes, plan)
        with threads.one_thread(
            sum(block.logits.numel() for block in blocks)
        ):  # as for `LyannaDrafter._added`
            logits = torch.cat([block.logits for block in blocks])
        self.forwards += len(logits)
        self.seconds += perf_counter() - begun
        deep = limits if plan is None else plan.deep
        return [
            (draft, logits[:own, row])
            for row, (draft, own) in enumerate(zip(drafts, deep, strict=True))
        ]

    def plan(self, seqs: list[Sequence], limits: list[int]) -> TreePlan | None:
        """Return the plan of a step in which all states are new, if steps have one."""
        rows = range(len(seqs))
        return (
            self.planner.plan(seqs, limits, list(rows), [0 for _ in rows])
            if self.planner is not None
            else None
        )

    def grow(
        self,
        seqs: list[Sequence],
        logits: beams.Logits,
        limits: list[int],
        plan: TreePlan | None,
        origin: str = "",
    ) -> list[Draft]:
        """Return drafts of `beams.grow` by this drafter's settings and by logits that Python computes."""
        roots = [seq.tokens[-1] for seq in seqs]
        search = beams.searching(logits, self.head.hot, self.width, self.nodes, plan)
        return beams.grow(roots, search, limits, self.width, self.nodes, plan, origin or "draft")

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        for outcome in outcomes:
            assert outcome.hidden is not None
            # Indexing copies. A view would keep the states of all rows.
            states = outcome.hidden[outcome.verdict.path]
            self.features[outcome.sequence.id].append(states)
