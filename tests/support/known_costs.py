"""What forwards cost, for decoders that need no measurement of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.api.build import draft_share
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs

COSTS = Costs({1: 4.0, 2: 4.2, 4: 4.6, 8: 5.2, 32: 10.0}, {1: 0.4, 4: 0.5}, 0.1, read_prob_ms=9.0)


def costs_for(
    target: CausalLM, draft: CausalLM | None, layer: Any = None, head: Any = None
) -> Costs:
    """Stand in for `measure_costs`, with a table that goes by the sizes of the models.

    A measurement takes a second for each pair of models, and figures of a busy machine would decide
    what is drafted.
    """
    # As if the time went with the size: a copy of the target is no cheaper than the target.
    share = 1.0 if draft is None else draft_share(target, draft)
    is_fused = draft is not None and draft.fused_draft is not None
    return replace(
        COSTS,
        draft={} if draft is None else {count: share * ms for count, ms in COSTS.target.items()},
        policy=0.0 if layer is None else 0.1,
        read_prob_ms=0.0 if layer is None else 0.05,
        chained=0.5 * share * COSTS.target[1] if is_fused else 0.0,
        chained_sampled=0.6 * share * COSTS.target[1] if is_fused else 0.0,
        head={} if head is None else {1: 0.2, 16: 0.6},
    )
