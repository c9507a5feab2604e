"""What a model runs as: its weights' bits, its kernels, whether it is exact."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from forerun.backends.bits import LinearSlice
from forerun.backends.kernels import variant
from forerun.backends.panels import Panels
from forerun.backends.stored import StoredLinear, kind_of, kinds_of
from forerun.backends.tiles import Tiles
from forerun.model.causal_lm import CausalLM

_OURS = "integers of 8 bits in C, blocks of 32"
_KERNELS = {
    "int4": "torch._weight_int4pack_mm_for_cpu, blocks of 32",
    "int8": "torch._weight_int4pack_mm_for_cpu on two halves of 4 bits, blocks of 32",
    "bfloat16": "torch.nn.functional.linear, bfloat16",
}


def facts_of(model: CausalLM) -> dict[str, Any]:
    """What most linear layers of a model are stored as, bytes of all weights by kind, the kernel, `CausalLM.exact`."""
    kinds = kinds_of(model.model)
    layers = [each.stored for each in model.model.modules() if isinstance(each, StoredLinear)]
    linears = [kind_of(each) for each in layers]
    ours = any(isinstance(each.whole if isinstance(each, LinearSlice) else each, Tiles) for each in layers)
    main = Counter(linears).most_common(1)[0][0] if linears else next(iter(kinds))
    if any(isinstance(each, Panels) for each in layers):
        kernel = f"C for {variant()}"
    else:
        kernel = (_OURS if ours and main != "bfloat16" else _KERNELS[main]) if linears else f"{main} products in torch"
    return {
        "weights": main,
        "weight_bytes": kinds,
        "kernel": kernel,
        "exact": model.exact,
        "device": str(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
    }
