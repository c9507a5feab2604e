"""Models whose weights are stored in few bits, for inference alone."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.backends.panels import BLOCK, Dense, Panels, Rows, check_inputs, quantise
from forerun.kinds import WEIGHT_FORMATS

FORMATS = {
    "int4": Type.Q4_1,
    "int8": Type.Q8_0,
    "bfloat16": Type.BF16,
}  # what float weights are rounded to


class StoredLinear(nn.Module):
    """A linear layer for inference. Outputs come in the inputs' dtype."""

    def __init__(self, weight: Panels | Dense, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.out
        self.stored, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.stored(x.reshape(-1, self.in_features)).to(x.dtype)
        y = y if self.bias is None else y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


class StoredEmbedding(nn.Module):
    """An embedding that looks up a file's rows."""

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = rows.out, rows.inputs
        self.stored, self.dtype = rows, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [.., d] of tokens [..], in the model's dtype."""
        return self.stored.floats(ids.flatten().tolist()).to(self.dtype).view(*ids.shape, -1)


def store(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Round the linear layers of a float model on a CPU to `kind`, in place, and its embedding to bfloat16.

    With layers in 4 bits the LM head gets 8. The model can be neither trained nor saved afterwards. Raises ValueError,
    before any change, for numbers of inputs that blocks do not divide, and for layers without any `nn.Linear`.
    """
    assert kind in WEIGHT_FORMATS
    linears = {name: child for name, child in model.named_modules() if type(child) is nn.Linear}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not set(linears.values()) - {head}:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear in its layers to store as {kind}: choose float32"
        )
    if kind != "bfloat16":
        for name, linear in linears.items():
            check_inputs(linear.in_features, f"{name} of {type(model).__name__}")
    for name, linear in linears.items():
        own = "int8" if linear is head and kind == "int4" else kind
        weight = quantise(linear.weight, FORMATS[own], linear is head)
        model.set_submodule(name, StoredLinear(weight, linear.bias))
    if type(embedding) is nn.Embedding:
        model.set_input_embeddings(
            StoredEmbedding(Rows.quantised(embedding.weight, Type.BF16), model.dtype)
        )
    return model


def store_in_8_bits(module: nn.Module) -> None:
    """Round every `nn.Linear` of a draft's module on a CPU to 8 bits, in place, if blocks divide its inputs."""
    for name, linear in list(module.named_modules()):
        if type(linear) is nn.Linear and linear.in_features % BLOCK == 0:
            module.set_submodule(
                name, StoredLinear(quantise(linear.weight, Type.Q8_0), linear.bias)
            )


def bytes_by_format(model: nn.Module) -> dict[str, int]:
    """Return {weight format: bytes} of a model, most bytes first."""
    found: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, StoredLinear | StoredEmbedding):
            kind = module.stored.type.name
            found[kind] = found.get(kind, 0) + module.stored.nbytes
    for parameter in model.parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        found[kind] = found.get(kind, 0) + parameter.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def is_stored(model: nn.Module) -> bool:
    """Return whether a model has a `StoredLinear`."""
    return any(isinstance(module, StoredLinear) for module in model.modules())
