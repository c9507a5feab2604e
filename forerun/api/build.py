"""What a decoder needs before its first step: costs of forwards, and what drafts."""

from __future__ import annotations

from dataclasses import replace

from forerun.api.options import EngineOptions
from forerun.backends.costs import head_costs, measure_costs
from forerun.backends.heads import HiddenLM
from forerun.engine.costs import Costs
from forerun.engine.engine import Drafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import AR, Method, Parts
from forerun.methods.guard import Guarded, SpeedTracker
from forerun.methods.split import Split
from forerun.model.causal_lm import CausalLM


def measured(
    methods: list[Method],
    costs: Costs | None,
    target: CausalLM,
    draft: CausalLM | None,
    layer: PreVerifier | None,
    head: HiddenLM | None,
) -> Costs | None:
    """Return these costs with those that methods need and that are not known yet."""
    for method in methods:
        if not method.needs_costs:
            continue
        if costs is None:
            costs = target.agreed(measure_costs(target, draft, layer=layer))
        if method.head is not None and head is not None and not costs.head:
            costs = replace(costs, head=target.agreed(head_costs(head)))
    return costs


def build_drafter(
    methods: list[Method], parts: Parts, options: EngineOptions, trackers: dict[tuple[Method, bool], SpeedTracker]
) -> Drafter:
    """Return what drafts: by one method for all sequences, or by one for greedy and one for sampled sequences.

    `trackers` keep the speeds of each method, for greedy decoding (True) and for sampling.
    """
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
