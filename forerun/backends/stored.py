"""Models whose weights are stored in few bits, for inference only."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.backends.panels import (
    BLOCK_INPUTS,
    Dense,
    PackedMatrix,
    RawMatrix,
    check_inputs,
    quantise,
)
from forerun.kinds import WEIGHT_FORMATS

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
    factor = embedding_factor(embedding)
    is_known = type(embedding) is nn.Embedding or factor != 1
    if is_known and isinstance(embedding, nn.Embedding):
        raw = RawMatrix.quantised(embedding.weight, Type.BF16)
        model.set_input_embeddings(StoredEmbedding(raw, model.dtype, factor))
    return model


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
