"""Stores weights in 8 or 6 bits with one scale a row, as `forerun.zoo.quantise` reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from forerun.zoo.quantise import WEIGHTS


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return symmetric integers (int8) of a matrix [rows, columns] and its scales [rows, 1]."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / largest
    return (weight / scale).round_().to(torch.int8), scale


def pack6(values: Tensor) -> Tensor:
    """Pack integers from -31 to 31 [rows, columns], four columns in three bytes.

    The result is uint8 [rows, columns * 3 / 4].
    """
    a, b, c, d = (values + 32).to(torch.uint8).unflatten(1, (-1, 4)).unbind(-1)
    return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], -1).flatten(1)


def save_quantised(
    model: PreTrainedModel, folder: Path, metadata: dict[str, str], bits: int = 8
) -> None:
    """Write config.json and one safetensors file.

    Matrices are in 8 or 6 bits with scales, vectors in float32, buffers as they are. In 6 bits the
    number of columns must be a multiple of four.
    """
    assert bits in (6, 8)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = model.state_dict().keys() - parameters.keys()
    tensors = {name: model.get_buffer(name) for name in buffers}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        if value.ndim == 2:
            values, tensors[f"{name}.scale"] = quantise(value, bits)
            tensors[name] = values if bits == 8 else pack6(values)
        else:
            tensors[name] = value.clone()
    temporary = folder / f"{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata=metadata)
    temporary.replace(folder / WEIGHTS)
