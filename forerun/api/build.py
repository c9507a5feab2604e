"""What a decoder needs before its first step: the costs of forwards, and what drafts.

Greedy and sampled sequences may have different drafters.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forerun.api.options import EngineOptions
from forerun.backends.costs import file_of, head_costs, kept, measure_costs
from forerun.backends.identity import identity
from forerun.engine.draft import Draft
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.engine.step import Drafter, Proposal, RowOutcome
from forerun.methods import AR, Method, Parts
from forerun.model.causal_lm import CausalLM
from forerun.planning.corrected_costs import CorrectedCosts
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import PlannedDrafter, PlannerByMode
from forerun.planning.guard import Guard, GuardedDrafter

if TYPE_CHECKING:
    from forerun.engine.target import ChunkSize
    from forerun.model.prompt_folder import PromptFolder


def measured(methods: list[Method], parts: Parts) -> Costs | None:
    """Return the table of costs that methods need; measure what is not known yet."""
    needing = [method for method in methods if method.needs_costs]
    if not needing:
        return parts.costs
    needs_head = any(method.head is not None for method in needing)
    head = parts.head if needs_head else None
    if parts.costs is not None:
        if head is None or parts.costs.head:
            return parts.costs
        return replace(parts.costs, head=head_costs(head))
    target = parts.target
    models: dict[str, Any] = {"layer": parts.pre_verifier, "head": head}
    file = file_of(target, parts.draft, **models)
    return kept(file, lambda: measure_costs(target, parts.draft, **models))


def corrected(costs: Costs | None, known: CorrectedCosts | None) -> CorrectedCosts | None:
    """Return the table that steps correct: an earlier engine's of these costs, or a new one."""
    if costs is None or (known is not None and known.measured is costs):
        return known
    return CorrectedCosts(costs)


def build_engine(
    methods: list[Method],
    parts: Parts,
    options: EngineOptions,
    trackers: dict[tuple[Method, bool], Guard],
) -> Engine:
    """Return an engine with the drafter of one method, or of two: for greedy and for sampling.

    `trackers` keep the speeds of each method, for greedy decoding (True) and for sampling.
    """
    folder = folder_of(options)
    (target,) = fresh(parts.target, 1, options, folder)
    drafts = _drafts(parts, len(methods), options, folder)
    clock = parts.target.clock
    is_guarded = options.guard is not False
    drafters = []
    for number, method in enumerate(methods):
        draft = drafts[number] if drafts else None
        guarded = (lambda drafter: GuardedDrafter(drafter, Guard(clock))) if is_guarded else None
        drafters.append(method.build(replace(parts, draft=draft, guarded=guarded)))
    drafter = drafters[0] if len(drafters) == 1 else Split(*drafters)
    if is_guarded and not all(isinstance(method, AR) for method in methods):
        # Two guards, because sampling differs from greedy decoding in costs and acceptance. Each
        # has its own account, because what one mode loses is no reason to pause the other. What
        # the guards inside of a drafter try is booked here too, so these accounts bound it.
        keys = (methods[0], True), (methods[-1], False)
        guards = [trackers.setdefault(key, Guard(clock)) for key in keys]
        drafter = GuardedDrafter(drafter, guards[0], guards[1], parts.corrected)
    return Engine(
        target,
        drafter,
        max_rows=options.max_rows,
        max_queue=options.max_queue,
        kv_memory=options.kv_memory,
    )


def _drafts(
    parts: Parts, count: int, options: EngineOptions, folder: PromptFolder | None
) -> list[CausalLM]:
    """Return `count` copies of the draft model, if there is one.

    They keep earlier texts together, and as many positions as the target, because a prompt whose
    beginning the target has to run takes its time there.
    """
    if parts.draft is None:
        return []
    prefix_bytes = round(draft_share(parts.target, parts.draft) * options.prefix_limit)
    drafts = fresh(parts.draft, count, replace(options, prefix_bytes=prefix_bytes), folder)
    for other in drafts[1:]:
        other.share_texts(drafts[0])
    return drafts


def draft_share(target: CausalLM, draft: CausalLM) -> float:
    """Return the bytes of a position in a draft model over those in its target."""
    return draft.position_bytes / max(1, target.position_bytes)


def folder_of(options: EngineOptions) -> PromptFolder | None:
    """Return the prompt folder that options name, or None.

    Raises ValueError for a folder that others may write to.
    """
    if options.prompt_cache is None:
        return None
    from forerun.model.prompt_folder import PromptFolder

    return PromptFolder(Path(options.prompt_cache).expanduser(), options.prompt_cache_bytes)


def fresh(
    model: CausalLM, count: int, options: EngineOptions, folder: PromptFolder | None
) -> list[CausalLM]:
    """Return `count` copies of a model, each with its own caches, which keep texts in a folder."""
    copies = [model.fresh(options.prefix_limit) for _ in range(count)]
    if folder is None:
        return copies
    digest = identity(model)
    if digest is None:
        name = type(model.model).__name__
        reason = "its layers are adapted, hooked or custom code"
        folder.say(f"prompt cache {folder.path} keeps no text of {name}: {reason}")
        return copies
    for each in copies:
        each.keep_in(folder, digest)
    return copies


@dataclass(frozen=True)
class SplitMemo:
    """The memos of both drafters of a step, by whether they draft for greedy sequences."""

    inner: dict[bool, Any]


class Split(PlannedDrafter):
    """Pass each sequence to the drafter of its mode. In a step with both modes, both draft."""

    def __init__(self, greedy: Drafter, sampled: Drafter) -> None:
        self.drafters = {True: greedy, False: sampled}
        self.planner = PlannerByMode(greedy, sampled)
        self.wants_hidden = greedy.wants_hidden or sampled.wants_hidden
        self.extra_nodes = max(greedy.extra_nodes, sampled.extra_nodes)
        reads = [drafter.reads for drafter in (greedy, sampled) if drafter.wants_hidden]
        limits = [count for count in reads if count is not None]
        self.reads = max(limits) if limits and len(limits) == len(reads) else None

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterable[int]:
        """Let the drafter of the sequence's mode read the prompt."""
        drafter = self.drafters[seq.greedy]
        return drafter.admit(seq, hidden if drafter.wants_hidden else None, chunk)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return the drafts of both drafters as one proposal."""
        drafts: dict[int, Draft] = {}
        proposals: dict[bool, Proposal] = {}
        for greedy, drafter in self.drafters.items():
            asking = [seq for seq in seqs if seq.greedy == greedy]
            if asking:
                proposal = drafter.propose(asking)
                proposals[greedy] = proposal
                drafts |= zip([seq.id for seq in asking], proposal.drafts, strict=True)
        memo = SplitMemo({greedy: proposal.memo for greedy, proposal in proposals.items()})
        return Proposal.together([drafts[seq.id] for seq in seqs], [*proposals.values()], memo)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: SplitMemo | None) -> None:
        """Tell each drafter the outcomes of its own rows."""
        for greedy, drafter in self.drafters.items():
            rows = [outcome for outcome in outcomes if outcome.sequence.greedy == greedy]
            if not drafter.wants_hidden:
                rows = [replace(outcome, hidden=None) for outcome in rows]
            if rows:
                inner = memo.inner.get(greedy) if memo is not None else None
                drafter.observe(rows, inner)

    def drop(self, seq: Sequence) -> None:
        """Let the drafter of the sequence's mode forget it."""
        self.drafters[seq.greedy].drop(seq)
