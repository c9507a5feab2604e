"""What a decoder needs before its first step: costs of forwards, and what drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.api.options import EngineOptions
from forerun.backends.costs import file_of, head_costs, kept, measure_costs
from forerun.engine.costs import Costs
from forerun.engine.engine import Drafter, Engine
from forerun.methods import AR, Method, Parts
from forerun.methods.guard import Guarded, SpeedTracker
from forerun.methods.split import Split


def measured(methods: list[Method], parts: Parts) -> Costs | None:
    """Return the costs that are known, with those that methods need."""
    needing, target = [each for each in methods if each.needs_costs], parts.target
    head = parts.head if any(each.head is not None for each in needing) else None
    if not needing:
        return parts.costs
    if parts.costs is not None:
        if head is None or parts.costs.head:
            return parts.costs
        return replace(parts.costs, head=head_costs(head))
    models: dict[str, Any] = {"layer": parts.pre_verifier, "head": head}
    file = file_of(target, parts.draft, **models)
    return kept(file, lambda: measure_costs(target, parts.draft, **models))


def build_engine(
    methods: list[Method], parts: Parts, options: EngineOptions, trackers: dict[tuple[Method, bool], SpeedTracker]
) -> Engine:
    """Return an engine whose sequences are drafted for by one method, or by one if greedy and one if sampled.

    `trackers` keep the speeds of each method, for greedy decoding (True) and for sampling.
    """
    target = parts.target.fresh(options.prefix_bytes)
    drafter = _drafter(methods, parts, options, trackers)
    return Engine(target, drafter, max_rows=options.max_rows, max_queue=options.max_queue, kv_memory=options.kv_memory)


def _drafter(
    methods: list[Method], parts: Parts, options: EngineOptions, trackers: dict[tuple[Method, bool], SpeedTracker]
) -> Drafter:
    clock, is_guarded = parts.target.clock, options.guard is not False
    drafters = []
    for method in methods:
        draft = parts.draft.fresh(options.prefix_bytes) if parts.draft is not None else None
        guarded = (lambda drafter: Guarded(drafter, SpeedTracker(clock))) if is_guarded else None
        drafters.append(method.build(replace(parts, draft=draft, guarded=guarded)))
    drafter = drafters[0] if len(drafters) == 1 else Split(*drafters)
    if not is_guarded or all(isinstance(method, AR) for method in methods):
        return drafter
    # Sampling costs and accepts otherwise than greedy decoding.
    keys = (methods[0], True), (methods[-1], False)
    return Guarded(drafter, *(trackers.setdefault(key, SpeedTracker(clock)) for key in keys))
