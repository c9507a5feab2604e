"""What a forward costs, measured on the machine at hand: all that a good draft length depends on beside the text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from forerun.draft import Draft
from forerun.model import CausalLM

COUNTS = (1, 2, 4, 8, 16, 32)
RUN = 10


@torch.inference_mode()
def forward_costs(
    model: CausalLM, counts: Sequence[int] = COUNTS, context: int = 256, repeats: int = 30
) -> dict[int, float]:
    """Median milliseconds of one forward of each number of new tokens behind `context` others, batch 1.

    Each count is measured in runs of ten, as decoding does one kind of forward after the other, and the runs take
    turns, so that a busy moment of the machine does not fall on one of them. Counts that the model's context has no
    room for are left out. Raises ValueError where that leaves none.
    """
    room = None if model.context is None else model.context - context
    counts = [count for count in counts if room is None or count <= room]
    if not counts:
        raise ValueError(f"a context of {model.context} has no room behind {context} tokens: choose fewer")
    model = model.fresh()
    model.start([[number % model.vocab_size for number in range(context)]])
    drafts = {count: [Draft.chain(0, [0] * (count - 1))] for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(-(-repeats // RUN)):
        for count, draft in drafts.items():
            for repeat in range(RUN + 2):
                begun = perf_counter()
                model.forward(draft)
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat >= 2:  # the first ones warm up
                    seconds[count].append(perf_counter() - begun)
    return {count: round(1000 * median(taken), 4) for count, taken in seconds.items()}
