"""How a model runs: its weight formats, its kernel, whether it is exact."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from forerun.backends.panels import Panels
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import StoredLinear, bytes_by_format
from forerun.csrc.library import variant
from forerun.model.causal_lm import CausalLM


def facts_of(model: CausalLM) -> dict[str, Any]:
    """Return the format of most linear layers, bytes of weights by format, the kernel, `CausalLM.exact`, the device."""
    formats = bytes_by_format(model.model)
    layers = [each.stored for each in model.model.modules() if isinstance(each, StoredLinear)]
    linears = Counter(each.type.name for each in layers)
    main = linears.most_common(1)[0][0] if linears else next(iter(formats))
    in_c = isinstance(model.backend, QuantisedForward) or any(
        isinstance(each, Panels) for each in layers
    )
    kernel = f"C for {variant()}" if in_c else f"{main} products in torch"
    return {
        "weights": main,
        "weight_bytes": formats,
        "kernel": kernel,
        "exact": model.exact,
        "device": str(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
    }


def processor() -> str:
    """Return the name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
