"""Cost tables of machines that are not at hand: what a forward takes where nothing but memory, arithmetic and waiting
count (Williams et al., CACM 2009). The constants are ours, from vendors' data sheets; shares of peaks are guesses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forerun.bench.sizes import SHAPES, ModelShape
from forerun.costs import Costs
from forerun.files import read_text
from forerun.methods import Method
from forerun.profiles import costs_of


@dataclass(frozen=True)
class GPU:
    """Of one: GB/s of its memory, dense TFLOP/s in 16 bits and in 8, GB/s that it sends to others."""

    memory: float
    tflops: float
    tflops8: float
    link: float


GPUS = {
    "a100": GPU(2039, 312, 312, 300),
    "h100": GPU(3350, 989, 1979, 450),
    "h200": GPU(4800, 989, 1979, 450),
    "rtx4090": GPU(1008, 165, 330, 32),
}
MEMORY, ARITHMETIC = 0.85, 0.6  # shares of these peaks that forwards get
LAYER_MS = 0.012  # a layer's kernels, one waiting for the other, in a CUDA graph
REDUCE_MS = 0.008  # an all-reduce of little
CONTEXT = 1024  # tokens that are read from the cache
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def read_costs(text: str) -> Costs:
    """A table from a .json file of milliseconds, {"target": {"1": ms, ...}, "draft": {...}, ...} with the fields of
    `Costs`, or a roofline: GPU[xCOUNT]:TARGET[:DRAFT], as in h100x8:llama-3-70b:llama-160m, with weights in 16 bits or,
    behind a shape's -fp8, in 8. Its target and heads are spread over all GPUs, its draft runs on one.
    Whether they fit the memory is not asked, and of the cache one row is read.

    Raises ValueError for a file that is missing or holds no such table, and for a GPU, a count or a shape that is none.
    """
    if text.endswith(".json"):
        try:
            return costs_of(asdict(Costs({}, {})) | json.loads(read_text(Path(text))))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"--costs {text} holds no table of costs: {error}") from None
    machine, colon, models = text.partition(":")
    target, _, draft = models.partition(":")
    name = next((name for name in GPUS if machine == name or machine.startswith(f"{name}x")), None)
    count = machine[len(name or "") + 1 :] or "1"
    if not colon or not target:
        raise ValueError(f"--costs takes FILE.json or GPU[xCOUNT]:TARGET[:DRAFT], not {text!r}")
    if name is None or not count.isdecimal() or not int(count):
        raise ValueError(f"--costs {text}: the GPU must be one of {', '.join(GPUS)}, or so many, as h100x8")
    for shape in filter(None, (target, draft)):
        if shape.removesuffix("-fp8") not in SHAPES:
            raise ValueError(f"--costs {text}: a shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    gpu, gpus = GPUS[name], int(count)
    return Costs(
        target=table(gpu, gpus, target),
        draft=table(gpu, 1, draft) if draft else {},
        head=table(gpu, gpus, target, head=True),
    )


def check_costs(costs: Costs, methods: Mapping[str, Method]) -> None:
    """Raises ValueError where a method drafts with what the table has no costs of."""
    for name, each in methods.items():
        for part, needed in (("draft", each.needs_draft), ("head", each.head is not None)):
            if needed and not getattr(costs, part):
                raise ValueError(f"method {name!r} needs the costs of a {part}; the table has none")


def table(gpu: GPU, count: int, shape: str, head: bool = False) -> dict[int, float]:
    """{new tokens: ms} of a forward of this shape on so many GPUs (tensor parallel), or of a head of one such layer
    that answers for a quarter of the vocabulary."""
    sizes, width = SHAPES[shape.removesuffix("-fp8")], 1 if shape.endswith("-fp8") else 2
    if head:
        sizes = replace(sizes, num_hidden_layers=1, vocab_size=sizes.vocab_size // 4)
    return {tokens: round(_forward(gpu, count, sizes, width, tokens), 4) for tokens in COUNTS}


def _forward(gpu: GPU, count: int, shape: ModelShape, width: int, tokens: int) -> float:
    keys = shape.num_key_value_heads * shape.head_dim

    def ms(weights: int, cached: int) -> float:
        memory = (weights * width + 2 * cached) / (gpu.memory * MEMORY * 1e6)
        arithmetic = 2 * weights * tokens / ((gpu.tflops if width == 2 else gpu.tflops8) * ARITHMETIC * 1e9)
        return max(memory, arithmetic) / count

    each = max(ms(shape.layer_weights, 2 * keys * CONTEXT), LAYER_MS)
    if count > 1:  # two all-reduces a layer, of the new tokens' states
        each += 2 * (REDUCE_MS + 2 * tokens * shape.hidden_size * 2 / (gpu.link * 1e6))
    return shape.num_hidden_layers * each + ms(shape.hidden_size * shape.vocab_size, 0)
