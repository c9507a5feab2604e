"""The common base of drafters with a head over the target's hidden states."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.backends.quantised_heads import Beams
from forerun.drafters.beams import Array, Logits, searching
from forerun.drafters.beams import grow as grow_trees
from forerun.engine.draft import Draft
from forerun.engine.step import Proposal
from forerun.engine.target import next_size
from forerun.methods.head import Heads, Paced
from forerun.planning.cost_model import Costs, CostSource
from forerun.planning.forecast import PlannedDrafter
from forerun.planning.tree_plan import TreePlan, TreePlanner
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.backends.heads import HiddenLM
    from forerun.backends.quantised_heads import Growth
    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.engine.target import ChunkSize

ENOUGH_READ = 2048  # a step reads whole prompts until it has read so many tokens
# Costs of the embedded target, if none were measured.
EMBEDDED_COSTS = Costs({1: 3.9, 8: 5.8, 32: 10.6}, {}, head={1: 0.4, 16: 0.8})


@dataclass
class HeadWork:
    """The head's work in a step: its forwards and their seconds."""

    forwards: int = 0
    seconds: float = 0.0

    def add(self, forwards: int, started_at: float) -> None:
        """Add forwards that have just ended."""
        self.forwards += forwards
        self.seconds += perf_counter() - started_at


class NewFeatures(NamedTuple):
    """What a head has not run: features [n, d] of each sequence, and the tokens after these."""

    features: list[Tensor]
    after: list[list[int]]


class HeadDrafter(PlannedDrafter):
    """Draft point masses with a head by the settings of its method.

    Attributes:
        features: {sequence: parts [n, d]} the target's features that the head has not run yet. The
            last one is at the position before the last token.
        unread: {sequence: a generator that makes the head read its prompt}, until it is read.
    """

    def __init__(
        self, settings: Heads, head: HiddenLM, costs: CostSource | None = None, beams: int = 1
    ) -> None:
        """Take over a head.

        Args:
            settings: those of the method.
            head: with a cache of its own.
            costs: for paced methods.
            beams: the number of states that the head drafts at a depth.
        """
        self.head = head
        self.width = settings.width
        self.wants_hidden = head.capture
        self.nodes = settings.nodes if settings.width > 1 else settings.depth
        self.depth = min(settings.depth, self.nodes)
        self.extra_nodes = self.nodes if self.width > 1 else 0
        self.reads = head.reads
        self.features: dict[int, list[Tensor]] = {}
        self.unread: dict[int, Iterator[int]] = {}
        self.planner: TreePlanner | None = None
        if isinstance(settings, Paced):
            known = costs if costs is not None and costs.table.head else EMBEDDED_COSTS
            self.planner = TreePlanner(head, known, settings.block, self.nodes, beams)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterable[int]:
        """Keep what the head reads of a prompt, for the first step that drafts."""
        head = self.head
        if hidden is None:
            hidden = torch.zeros(0, head.width, dtype=head.dtype, device=head.device)
        # A view would keep the states of the whole prompt.
        hidden = hidden[-head.reads :].clone()
        # The first draft runs the last feature, because it needs the state.
        self.features[seq.id] = [hidden[-1:].clone()]
        # The token after each state but the last.
        after = seq.tokens[len(seq.tokens) - len(hidden) : -1]
        reserve = seq.limit + self.depth * self.width
        self.unread[seq.id] = head.prefill(seq.id, hidden[:-1], after, next_size(chunk), reserve)
        return ()

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self.features.pop(seq.id, None)
        self.unread.pop(seq.id, None)
        self.head.drop(seq.id)

    def take(self, seqs: list[Sequence]) -> NewFeatures:
        """Return what the head has not run of each sequence, for it to run that now."""
        features = []
        after = []
        for seq in seqs:
            parts = torch.cat(self.features[seq.id])
            self.features[seq.id] = [parts[:0]]
            features.append(parts)
            after.append(seq.tokens[len(seq.tokens) - len(parts) :])
        return NewFeatures(features, after)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Read prompts, up to a limit, and return a draft for each sequence that is read."""
        prompt_seconds = self._read(seqs)
        limits = []
        for seq in seqs:
            # A sequence of a single token has no feature yet.
            is_ready = seq.id not in self.unread and any(map(len, self.features[seq.id]))
            limits.append(min(self.depth, seq.remaining - 1) if is_ready else 0)
        if max(limits) < 1:
            drafts = [Draft.root(seq.tokens[-1]) for seq in seqs]
            return Proposal(drafts, prompt_seconds=prompt_seconds)
        work = HeadWork()
        drafts = self.draft(seqs, limits, work)
        return Proposal(
            drafts,
            work.forwards,
            work.seconds,
            prompt_seconds=prompt_seconds,
            forward_rows=sum(limit > 0 for limit in limits),
            by_head=True,
        )

    def _read(self, seqs: list[Sequence]) -> float:
        """Read the prompts of sequences, until enough is read, and return the seconds."""
        started_at = perf_counter()
        left = ENOUGH_READ
        for seq in seqs:
            if seq.id in self.unread and seq.remaining > 1 and left > 0:
                left -= sum(self.unread.pop(seq.id))
        return perf_counter() - started_at if left < ENOUGH_READ else 0.0

    def draft(self, seqs: list[Sequence], limits: list[int], work: HeadWork) -> list[Draft]:
        """Return a draft for each sequence.

        Args:
            seqs: the sequences.
            limits: the greatest depth of each draft. At least one is above 0.
            work: counts the head's forwards.
        """
        raise NotImplementedError

    def draft_in_c(
        self,
        seqs: list[Sequence],
        limits: list[int],
        work: HeadWork,
        old: abc.Sequence[Tensor | None] = (),
    ) -> list[tuple[Draft, Tensor]]:
        """Return drafts, and the logits [n, S] of the places of each. C drafts a block at a time.

        Args:
            seqs: the sequences.
            limits: the greatest depth of each draft, above 0.
            work: counts the head's forwards.
            old: see `Beams`.
        """
        plan = self.plan(seqs, limits)
        started_at = perf_counter()
        roots = [seq.tokens[-1] for seq in seqs]
        new = self.take(seqs)
        beams = Beams(roots, self.width, self.nodes, limits, old)
        deep = limits if plan is None else plan.deep
        search = _BlockSearch(self.head, [seq.id for seq in seqs], new, beams, deep, plan)
        drafts = grow_trees(roots, search, limits, self.width, self.nodes, plan)
        # Several threads of torch would wait actively beside the next forward.
        with one_thread(sum(block.logits.numel() for block in search.blocks)):
            logits = torch.cat([block.logits for block in search.blocks])
        work.add(len(logits), started_at)
        return [
            (draft, logits[:depth, row])
            for row, (draft, depth) in enumerate(zip(drafts, deep, strict=True))
        ]

    def plan(self, seqs: list[Sequence], limits: list[int]) -> TreePlan | None:
        """Return the plan of a step in which all states are new, if steps have one."""
        if self.planner is None:
            return None
        return self.planner.plan(seqs, limits, list(range(len(seqs))), [0] * len(seqs))

    def grow(
        self,
        seqs: list[Sequence],
        logits: Logits,
        limits: list[int],
        plan: TreePlan | None,
        origin: str = "draft",
    ) -> list[Draft]:
        """Return the drafts that follow from logits which Python computes."""
        roots = [seq.tokens[-1] for seq in seqs]
        search = searching(logits, self.head.hot, self.width, self.nodes, plan)
        return grow_trees(roots, search, limits, self.width, self.nodes, plan, origin)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        """Keep the features of the accepted path of each sequence."""
        for outcome in outcomes:
            assert outcome.hidden is not None
            # Indexing copies. A view would keep the states of all rows.
            states = outcome.hidden[outcome.verdict.path]
            self.features[outcome.sequence.id].append(states)


class _BlockSearch:
    """Search in C, which drafts a block of places at a time (`beams.Search`).

    Attributes:
        blocks: those that were drafted.
    """

    def __init__(
        self,
        head: HiddenLM,
        ids: list[int],
        new: NewFeatures,
        beams: Beams,
        deep: list[int],
        plan: TreePlan | None,
    ) -> None:
        """Begin a draft.

        Args:
            head: what drafts.
            ids: the sequences of the rows.
            new: what the head runs first.
            beams: how the draft goes on.
            deep: the places of each row, which the plan may add to.
            plan: may end paths.
        """
        self._head = head
        self._ids = ids
        self._new = new
        self._beams = beams
        self._deep = deep
        self._plan = plan
        self.blocks: list[Growth] = []

    def __call__(
        self, k: int, tokens: Array, at: Array, values: Array, ends: Array
    ) -> tuple[Array, Array, Array]:
        if k == self._beams.start:
            self._draft(k, tokens, ends)
        block = self.blocks[-1]
        place = k - self._beams.start + len(block.states)
        return block.tokens[:, place], block.parents[:, place], block.found[:, place]

    def _draft(self, k: int, tokens: Array, ends: Array) -> None:
        """Draft the next block, from depth k on."""
        places = max(self._deep) - k
        if self._plan is not None:
            curves = [row_curves[k : k + places] for row_curves in self._plan.curves]
            self._beams.curves = np.array(curves)[:, :, :2]
        self._beams.ends[:] = ends
        states, after = self._new
        if self.blocks:
            states = list(self.blocks[-1].states[-1:])
            after = tokens[:, :1].tolist()
        self.blocks.append(self._head.grow(self._ids, states, after, places, self._beams))
