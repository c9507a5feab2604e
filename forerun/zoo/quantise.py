"""Weights as int8 with one scale a row, so that the embedded pair stays small in git.

What is loaded *is* the model: the draft is distilled on, and every number measured with, the weights as restored.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

WEIGHTS = "model.int8.safetensors"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of a matrix [rows, columns] and its scales [rows, 1]."""
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scale).round_().to(torch.int8), scale


def save_quantised(model: PreTrainedModel, folder: Path, metadata: dict[str, str]) -> None:
    """Writes config.json and one safetensors file: matrices as int8 with scales, vectors in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tensors = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        if value.ndim == 2:
            tensors[name], tensors[f"{name}.scale"] = quantise(value)
        else:
            tensors[name] = value.clone()
    temporary = folder / f"{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, folder / WEIGHTS)


def load_quantised(folder: Path) -> LlamaForCausalLM:
    """The float32 model that the int8 weights stand for; tied weights are tied again."""
    tensors = load_file(folder / WEIGHTS)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = tensors[name]
            parameter.copy_(value.float() * tensors[f"{name}.scale"] if value.dtype == torch.int8 else value)
    return model.eval()
