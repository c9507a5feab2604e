"""How a model runs: its weight formats, its kernel, whether it is exact."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from forerun.backends.panels import PackedMatrix
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import StoredLinear, bytes_by_format
from forerun.csrc.library import variant
from forerun.model.causal_lm import CausalLM


def facts_of(model: CausalLM) -> dict[str, Any]:
    """Return how a model runs.

    Returns:
        The format of most linear layers, the bytes of weights by format, the kernel,
        `CausalLM.exact`, the device, and the threads of a CPU (0 for another device).
    """
    formats = bytes_by_format(model.model)
    modules = model.model.modules()
    matrices = [module.stored for module in modules if isinstance(module, StoredLinear)]
    counts = Counter(matrix.type.name for matrix in matrices)
    main = counts.most_common(1)[0][0] if counts else next(iter(formats))
    has_packed = any(isinstance(matrix, PackedMatrix) for matrix in matrices)
    in_c = has_packed or isinstance(model.backend, QuantisedForward)
    return {
        "weights": main,
        "weight_bytes": formats,
        "kernel": f"C for {variant()}" if in_c else f"{main} products in torch",
        "exact": model.exact,
        "device": str(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
    }


def processor() -> str:
    """Return the name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
