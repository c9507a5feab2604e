"""Models whose weights are stored in few bits, for inference only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from forerun.backends.panels import (
    BLOCK_INPUTS,
    Dense,
    PackedMatrix,
    RawMatrix,
    check_inputs,
    quantise,
)
from forerun.kinds import WEIGHT_FORMATS

_CLAMP = 7.0
_CLAMPED_SLOPE = 1.702
# What float weights are rounded to.
STORED_TYPES = {"int4": Type.Q4_1, "int8": Type.Q8_0, "bfloat16": Type.BF16}


class StoredLinear(nn.Module):
    """A linear layer for inference. Its outputs have the dtype of its inputs.

    Attributes:
        in_features, out_features: the sizes.
        stored: the weight.
        bias: [out], or None.
    """

    def __init__(self, weight: PackedMatrix | Dense, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = weight.inputs
        self.out_features = weight.out
        self.stored = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [.., out] of inputs [.., in]."""
        y = self.stored(x.reshape(-1, self.in_features)).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


Linear = nn.Linear | StoredLinear


class StoredEmbedding(nn.Module):
    """An embedding that looks up rows as they are in a file.

    Attributes:
        num_embeddings, embedding_dim: the sizes.
        stored: the rows.
        dtype: the dtype of its outputs.
        factor: what they are multiplied with.
    """

    def __init__(self, raw: RawMatrix, dtype: torch.dtype, factor: float = 1.0) -> None:
        super().__init__()
        self.num_embeddings = raw.out
        self.embedding_dim = raw.inputs
        self.stored = raw
        self.dtype = dtype
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [.., d] of tokens [..], in the model's dtype."""
        rows = self.stored.floats(ids.flatten().tolist()).to(self.dtype).view(*ids.shape, -1)
        return rows if self.factor == 1 else rows * self.factor


@dataclass(frozen=True)
class ExpertLinears:
    """The linear layers of one expert."""

    gate: Linear
    up: Linear
    down: Linear


class StoredExperts(nn.Module):
    """The experts of a layer for inference, in place of transformers' module.

    Attributes:
        linears: the linear layers of each expert.
        gate, up, down: all of one kind.
        activation: transformers' name of the activation, or "clamped" for that of gpt-oss.
    """

    def __init__(self, experts: Iterable[ExpertLinears], activation: str) -> None:
        super().__init__()
        self.linears = list(experts)
        # As modules, so that whoever goes through a model finds them.
        self.gate = nn.ModuleList(expert.gate for expert in self.linears)
        self.up = nn.ModuleList(expert.up for expert in self.linears)
        self.down = nn.ModuleList(expert.down for expert in self.linears)
        self.activation = activation

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums [n, d] of the experts [n, k] that states [n, d] chose."""
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            linears = self.linears[expert]
            gate = linears.gate(x[token])
            up = linears.up(x[token])
            output = linears.down(gated(self.activation, gate, up))
            total.index_add_(0, token, output * weights[token, place, None].to(x.dtype))
        return total


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return an activation of the gate times the values, as `ACTIVATIONS` names it."""
    if activation == "clamped":
        gate = gate.clamp(max=_CLAMP)
        return (up.clamp(-_CLAMP, _CLAMP) + 1) * gate * torch.sigmoid(gate * _CLAMPED_SLOPE)
    result: Tensor = ACT2FN[activation](gate) * up
    return result


def expert_linears(experts: Any) -> list[ExpertLinears]:
    """Return the linear layers of a `StoredExperts`, or of transformers' experts, without copies.

    transformers keeps gate and up in one tensor, one after the other or alternating, and some
    matrices transposed.
    """
    if isinstance(experts, StoredExperts):
        return list(experts.linears)
    return [_expert(experts, index) for index in range(len(experts.down_proj))]


def _expert(experts: Any, index: int) -> ExpertLinears:
    both = experts.gate_up_proj[index].detach()
    down = experts.down_proj[index].detach()
    if experts.is_transposed:
        both = both.T
        down = down.T
    gate, up = _halves(experts, both)
    gate_bias = up_bias = down_bias = None
    if experts.has_bias:
        gate_bias, up_bias = _halves(experts, experts.gate_up_proj_bias[index].detach())
        down_bias = experts.down_proj_bias[index].detach()
    return ExpertLinears(
        linear_of(gate, gate_bias), linear_of(up, up_bias), linear_of(down, down_bias)
    )


def _halves(experts: Any, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up of transformers' tensor of both."""
    if experts.is_concatenated:
        gate, up = both.chunk(2)
        return gate, up
    return both[::2], both[1::2]


def join_halves(experts: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Return gate and up [E, I, ..] as transformers' experts keep them, untransposed."""
    if experts.is_concatenated:
        return torch.cat([gate, up], 1)
    return torch.stack([gate, up], 2).flatten(1, 2)


def expert_activation(experts: Any) -> str:
    """Return the activation of transformers' experts, as `gated` names it."""
    clamped = getattr(experts, "limit", None), getattr(experts, "alpha", None)
    if clamped == (_CLAMP, _CLAMPED_SLOPE):
        return "clamped"
    return str(experts.config.hidden_act)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer of a weight [out, in] and a bias [out], which are not copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def is_experts(module: Any) -> bool:
    """Return whether a module is transformers' experts, each with a gate."""
    names = ("gate_up_proj", "down_proj", "is_transposed", "is_concatenated", "has_bias")
    return all(hasattr(module, name) for name in names)


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has experts, of transformers or stored."""
    return any(
        isinstance(module, StoredExperts) or is_experts(module) for module in model.modules()
    )


def embedding_factor(embedding: nn.Module) -> float:
    """Return the factor by which an embedding of transformers multiplies its rows itself."""
    factor = getattr(embedding, "scalar_embed_scale", 1.0)  # Gemma's embeddings have it
    return float(factor)


def store(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Round a model's linear layers to `kind` and its embedding to bfloat16, in place.

    The model is a float model on a CPU. With layers in 4 bits its LM head gets 8 bits. Afterwards
    it can be neither trained nor saved.

    Raises:
        ValueError: blocks do not divide a number of inputs, or no layer has an `nn.Linear`. The
            model is unchanged then.
    """
    assert kind in WEIGHT_FORMATS
    linears = {name: child for name, child in model.named_modules() if type(child) is nn.Linear}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if not set(linears.values()) - {head}:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear in its layers to store as {kind}: "
            "choose float32"
        )
    if kind != "bfloat16":
        for name, linear in linears.items():
            check_inputs(linear.in_features, f"{name} of {type(model).__name__}")
    for name, linear in linears.items():
        is_head = linear is head
        stored_kind = "int8" if is_head and kind == "int4" else kind
        weight = quantise(linear.weight, STORED_TYPES[stored_kind], is_head)
        model.set_submodule(name, StoredLinear(weight, linear.bias))
    for name, experts in [pair for pair in model.named_modules() if is_experts(pair[1])]:
        model.set_submodule(name, _stored_experts(experts, STORED_TYPES[kind]))
    factor = embedding_factor(embedding)
    is_known = type(embedding) is nn.Embedding or factor != 1
    if is_known and isinstance(embedding, nn.Embedding):
        raw = RawMatrix.quantised(embedding.weight, Type.BF16)
        model.set_input_embeddings(StoredEmbedding(raw, model.dtype, factor))
    return model


def _stored_experts(experts: Any, type: Type) -> StoredExperts:
    """Round transformers' experts to a format."""
    rounded = []
    for expert in expert_linears(experts):
        linears = [
            StoredLinear(quantise(linear.weight.contiguous(), type), linear.bias)
            for linear in (expert.gate, expert.up, expert.down)
            if isinstance(linear, nn.Linear)  # all of transformers' are
        ]
        rounded.append(ExpertLinears(*linears))
    return StoredExperts(rounded, expert_activation(experts))


def store_in_8_bits(module: nn.Module) -> None:
    """Round the linear layers of a draft's module on a CPU to 8 bits, in place.

    A layer stays as it is if blocks do not divide its inputs.
    """
    for name, linear in list(module.named_modules()):
        if type(linear) is nn.Linear and linear.in_features % BLOCK_INPUTS == 0:
            weight = quantise(linear.weight, Type.Q8_0)
            module.set_submodule(name, StoredLinear(weight, linear.bias))


def bytes_by_format(model: nn.Module) -> dict[str, int]:
    """Return {weight format: bytes} of a model, most bytes first."""
    sizes: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, StoredLinear | StoredEmbedding):
            name = module.stored.type.name
            sizes[name] = sizes.get(name, 0) + module.stored.nbytes
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def is_stored(model: nn.Module) -> bool:
    """Return whether a model has a `StoredLinear`."""
    return any(isinstance(module, StoredLinear) for module in model.modules())
