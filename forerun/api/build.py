"""What a decoder needs before its first step: costs of forwards, and what drafts, for greedy and sampled sequences."""

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
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import PlannedDrafter, PlannerByMode
from forerun.planning.guard import Guard, GuardedDrafter

if TYPE_CHECKING:
    from forerun.model.prompt_folder import PromptFolder


def measured(methods: list[Method], parts: Parts) -> Costs | None:
    """Return the costs that are known, with those that methods need."""
    needing, target = [each for each in methods if each.needs_costs], parts.target
    head = parts.head if any(each.head is not None for each in needing) else None
    if not needing:
        return parts.costs
    if parts.costs is not None:
        return (
            parts.costs
            if head is None or parts.costs.head
            else replace(parts.costs, head=head_costs(head))
        )
    models: dict[str, Any] = {"layer": parts.pre_verifier, "head": head}
    file = file_of(target, parts.draft, **models)
    return kept(file, lambda: measure_costs(target, parts.draft, **models))


def build_engine(
    methods: list[Method],
    parts: Parts,
    options: EngineOptions,
    trackers: dict[tuple[Method, bool], Guard],
) -> Engine:
    """Return an engine whose sequences are drafted for by one method, or by one if greedy and one if sampled.

    `trackers` keep the speeds of each method, for greedy decoding (True) and for sampling.
    """
    folder = folder_of(options)
    (target,) = fresh(parts.target, 1, options, folder)
    drafts = fresh(parts.draft, len(methods), options, folder) if parts.draft is not None else []
    clock, is_guarded = parts.target.clock, options.guard is not False
    drafters = []
    for number, method in enumerate(methods):
        draft = drafts[number] if drafts else None
        guarded = (lambda drafter: GuardedDrafter(drafter, Guard(clock))) if is_guarded else None
        drafters.append(method.build(replace(parts, draft=draft, guarded=guarded)))
    drafter = drafters[0] if len(drafters) == 1 else Split(*drafters)
    if is_guarded and not all(isinstance(method, AR) for method in methods):
        # Sampling costs and accepts otherwise than greedy decoding.
        keys = (methods[0], True), (methods[-1], False)
        drafter = GuardedDrafter(drafter, *(trackers.setdefault(key, Guard(clock)) for key in keys))
    return Engine(
        target,
        drafter,
        max_rows=options.max_rows,
        max_queue=options.max_queue,
        kv_memory=options.kv_memory,
    )


def folder_of(options: EngineOptions) -> PromptFolder | None:
    """Return the prompt folder that options name. Raises ValueError for one that is not the user's
    alone to write."""
    if options.prompt_cache is None:
        return None
    from forerun.model.prompt_folder import PromptFolder  # late, because Windows lacks its locks

    return PromptFolder(Path(options.prompt_cache).expanduser(), options.prompt_cache_bytes)


def fresh(
    model: CausalLM, count: int, options: EngineOptions, folder: PromptFolder | None
) -> list[CausalLM]:
    """Return a model so many times, each with caches of its own, which keep texts in a folder."""
    made = [model.fresh(options.prefix_bytes) for _ in range(count)]
    if folder is None:
        return made
    digest = identity(model)
    if digest is None:
        name, reason = type(model.model).__name__, "its layers are adapted, hooked or custom code"
        folder.say(f"no text of {name} is kept in {folder.path}: {reason}")
        return made
    for each in made:
        each.keep_in(folder, digest)
    return made


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
        self.spread = max(greedy.spread, sampled.spread)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        drafter = self.drafters[seq.greedy]
        return drafter.admit(seq, hidden if drafter.wants_hidden else None, chunk)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts: dict[int, Draft] = {}
        proposals: dict[bool, Proposal] = {}
        for greedy, drafter in self.drafters.items():
            asking = [seq for seq in seqs if seq.greedy == greedy]
            if asking:
                proposal = proposals[greedy] = drafter.propose(asking)
                drafts |= zip([seq.id for seq in asking], proposal.drafts, strict=True)
        memo = SplitMemo({greedy: proposal.memo for greedy, proposal in proposals.items()})
        return Proposal.together([drafts[seq.id] for seq in seqs], [*proposals.values()], memo)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: SplitMemo | None) -> None:
        for greedy, drafter in self.drafters.items():
            rows = [outcome for outcome in outcomes if outcome.sequence.greedy == greedy]
            if not drafter.wants_hidden:
                rows = [replace(outcome, hidden=None) for outcome in rows]
            if rows:
                drafter.observe(rows, memo.inner.get(greedy) if memo is not None else None)

    def drop(self, seq: Sequence) -> None:
        self.drafters[seq.greedy].drop(seq)
