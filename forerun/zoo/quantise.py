"""Weights in 8 or 6 bits with one scale a row, so that the embedded pair stays small in git.

The restored weights *are* the model: the draft is distilled on them, and every number is measured with them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from forerun.model.claims import QUANTISED

WEIGHTS = QUANTISED


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return symmetric integers (int8) of a matrix [rows, columns] and its scales [rows, 1]."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / largest
    return (weight / scale).round_().to(torch.int8), scale


def pack6(values: Tensor) -> Tensor:
    """Pack integers from -31 to 31 [rows, columns], four columns in three bytes: uint8 [rows, columns * 3 / 4]."""
    a, b, c, d = (values + 32).to(torch.uint8).unflatten(1, (-1, 4)).unbind(-1)
    return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], -1).flatten(1)


def unpack6(packed: Tensor) -> Tensor:
    """Undo `pack6`, as int8."""
    x, y, z = packed.unflatten(1, (-1, 3)).unbind(-1)
    values = torch.stack([x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2], -1)
    return (values.flatten(1).to(torch.int16) - 32).to(torch.int8)


def save_quantised(model: PreTrainedModel, folder: Path, metadata: dict[str, str], bits: int = 8) -> None:
    """Write config.json and one safetensors file.

    Matrices are in 8 or 6 bits with scales, vectors in float32, buffers as they are. In 6 bits the number of columns
    must be a multiple of four.
    """
    assert bits in (6, 8)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    kept = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    tensors = {name: model.get_buffer(name) for name in kept}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        if value.ndim == 2:
            values, tensors[f"{name}.scale"] = quantise(value, bits)
            tensors[name] = values if bits == 8 else pack6(values)
        else:
            tensors[name] = value.clone()
    temporary = folder / f"{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, folder / WEIGHTS)


def load_quantised(folder: Path) -> LlamaForCausalLM:
    """Return the float32 model of the stored weights. Tied weights are tied again."""
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):  # random numbers, which would be replaced, take as long as the weights themselves
        model: Any = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    restore(model, folder)
    return model.eval()


@torch.no_grad()
def restore(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the weights that are stored in a folder."""
    tensors = load_file(folder / WEIGHTS)
    for name, parameter in model.named_parameters():
        value = tensors[name]
        if value.dtype == torch.uint8:
            value = unpack6(value)
        parameter.copy_(value.float() * tensors[f"{name}.scale"] if value.dtype == torch.int8 else value)
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])
