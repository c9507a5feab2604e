"""Weights in 8 or 6 bits with one scale per row, so that the embedded pair stays small in git.

The restored weights *are* the model: the draft is distilled on them, and every figure is measured
with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

WEIGHTS = "model.quantised.safetensors"


def unpack6(packed: Tensor) -> Tensor:
    """Return what `benchmarks.training.quantise.pack6` packed, as int8."""
    x, y, z = packed.unflatten(1, (-1, 3)).unbind(-1)
    values = torch.stack([x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2], -1)
    return values.flatten(1).view(torch.int8) - 32


def load_quantised(folder: Path) -> LlamaForCausalLM:
    """Return the float32 model of the stored weights. Tied weights are tied again."""
    config = LlamaConfig.from_pretrained(folder, name_or_path=str(folder))
    # On the meta device, because random numbers that are replaced would take as long to make as the
    # weights take to read.
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    restore(model, folder)
    restored: LlamaForCausalLM = model.eval()
    return restored


@torch.no_grad()
def restore(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the weights that are stored in a folder."""
    tensors = load_file(folder / WEIGHTS)
    for name, parameter in model.named_parameters():
        value = tensors[name]
        if value.dtype == torch.uint8:
            value = unpack6(value)
        if value.dtype == torch.int8:
            value = value.float() * tensors[f"{name}.scale"]
        parameter.copy_(value)
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])
