"""Models whose weights are stored in few bits, for inference alone."""

from __future__ import annotations

from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.backends.bits import Blocks, Dense, LinearSlice, Packed, check_inputs, quantise, stored, take
from forerun.backends.kernels import library
from forerun.backends.panels import Panels, Rows
from forerun.backends.scores import Scores, scores
from forerun.backends.tiles import Tiles
from forerun.kinds import KINDS


class StoredLinear(nn.Module):
    """A linear layer for inference, its weight stored in few bits. Inputs are rounded to bfloat16, as are outputs,
    which then come in the inputs' dtype."""

    def __init__(
        self, weight: Panels | Packed | Tiles | Dense | LinearSlice | Scores, inputs: int, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, weight.out
        self.stored, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.stored(x.reshape(-1, self.in_features)).to(x.dtype)
        y = y if self.bias is None else y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


class StoredEmbedding(nn.Module):
    """An embedding in the rows of a file, in blocks, or in bfloat16 [V, d]."""

    def __init__(self, weight: Rows | Blocks | Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        if isinstance(weight, Rows):
            self.num_embeddings, self.embedding_dim = weight.out, weight.inputs
        else:
            self.num_embeddings, self.embedding_dim = (weight.codes if isinstance(weight, Blocks) else weight).shape
        self.stored, self.dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[.., d] of tokens [..], in the model's dtype."""
        flat = ids.reshape(-1)
        found = self.stored.floats(flat.tolist()) if isinstance(self.stored, Rows) else take(self.stored, flat)
        return found.to(self.dtype).view(*ids.shape, -1)


def store(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A float model on a CPU with its linear layers stored as `kind`, in place. The LM head becomes `Scores`, over its
    own values in 8 bits or bfloat16; the embedding is kept in bfloat16. It can be neither trained nor saved any more.

    Raises ValueError, before anything is changed, for inputs that its blocks do not divide, and for models whose layers
    keep their weights in modules of their own.
    """
    assert kind in KINDS
    linears = {name: child for name, child in model.named_modules() if type(child) is nn.Linear}
    if not set(linears.values()) - {model.get_output_embeddings()}:
        raise ValueError(f"{type(model).__name__} has no nn.Linear in its layers to store as {kind}: choose float32")
    if kind != "bfloat16":
        for name, linear in linears.items():
            check_inputs(linear.in_features, f"{name} of {type(model).__name__}")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if library() is not None and all(linear.in_features % 8 == 0 for linear in linears.values()):
        return _store_panels(model, kind, linears, embedding)
    table = None
    if type(embedding) is nn.Embedding:
        table = embedding.weight.detach().bfloat16()
        model.set_input_embeddings(StoredEmbedding(table, model.dtype))
    for name, linear in linears.items():
        weight = linear.weight
        if linear is not head:
            own: Packed | Tiles | Dense | Scores = stored(weight, kind)
        elif table is not None and weight is embedding.weight:
            own = scores(table)
        else:
            own = scores(weight.detach().bfloat16() if kind == "bfloat16" else quantise(weight, 8))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, StoredLinear(own, linear.in_features, linear.bias))
    return model


FORMATS = {"int4": Type.Q4_1, "int8": Type.Q8_0, "bfloat16": Type.BF16, "float32": Type.F32}


def _store_panels(model: PreTrainedModel, kind: str, linears: dict[str, nn.Linear], embedding: Any) -> PreTrainedModel:
    """`store`, for the C library. The LM head has 8 bits where its layers have 4."""
    head, plain = model.get_output_embeddings(), type(embedding) is nn.Embedding
    for name, linear in linears.items():
        own = FORMATS["int8" if linear is head and kind == "int4" else kind]
        panels = Panels(Rows.quantised(linear.weight, own))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, StoredLinear(panels, linear.in_features, linear.bias))
    if plain:
        model.set_input_embeddings(StoredEmbedding(Rows.quantised(embedding.weight, Type.BF16), model.dtype))
    return model


def kinds_of(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's weights by what they are stored as."""
    found: dict[str, int] = {}
    seen = set()
    for module in model.modules():
        if not isinstance(module, StoredLinear | StoredEmbedding):
            continue
        weight = module.stored.whole if isinstance(module.stored, LinearSlice) else module.stored
        for part in (weight, weight.exact) if isinstance(weight, Scores) else (weight,):
            if id(part) not in seen:
                seen.add(id(part))
                found[kind_of(part)] = found.get(kind_of(part), 0) + part.nbytes
    for parameter in model.parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        found[kind] = found.get(kind, 0) + parameter.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kind_of(weight: Panels | Rows | Packed | Tiles | Dense | LinearSlice | Scores | Blocks | Tensor) -> str:
    """What one weight is stored as."""
    if isinstance(weight, Panels | Rows):
        return weight.type.name
    weight = weight.whole if isinstance(weight, LinearSlice) else weight
    if isinstance(weight, Scores):
        return "int8"
    return f"int{weight.bits}" if isinstance(weight, Packed | Tiles | Blocks) else "bfloat16"


def is_stored(model: nn.Module) -> bool:
    """Whether a model has linear layers of `store`'s."""
    return any(isinstance(module, StoredLinear) for module in model.modules())
