"""Weights laid out for products of a few rows, which is all that decoding does on a CPU.

`nn.Linear` keeps a weight as [out, in]. With one row that is as good as any layout; from two to sixteen rows the
product then costs up to three times as much, which is what verifying a draft would lose. Measured on 2 cores
(docs/log.md): the transposed weight is best while it is small, oneDNN's own packing where it is big and for bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

Product = Callable[[Tensor], Tensor]

SMALL = 1 << 21  # entries up to which float32 weights are transposed
ROWS = 8  # rows that oneDNN packs for; it takes any number


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """A function x [..., in] -> x @ weight.T + bias [..., out] for weight [out, in], which it keeps a copy of where
    another layout is faster. Equal to `functional.linear` but for rounding."""
    small = weight.numel() <= SMALL
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return lambda x: functional.linear(x, weight, bias)
    if weight.dtype == torch.float32 and (small or not onednn):
        turned = weight.detach().t().contiguous()
        if bias is None:
            return lambda x: torch.matmul(x, turned)
        return lambda x: torch.matmul(x, turned) + bias
    if not onednn:
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """A linear layer for inference in the layout of `product`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = product(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def pack(model: PreTrainedModel, in_place: bool = False) -> PreTrainedModel:
    """The same model with every plain `nn.Linear` packed; the model itself where it is not on a CPU.

    The given model stays as it is and shares everything else with the copy, unless `in_place`, which frees each weight
    as soon as its packed form is made. Packed weights do not follow later changes of the originals, and such a model
    can be neither trained nor saved.
    """
    if model.device.type != "cpu":
        return model
    if not in_place:
        shared = [*model.parameters(), *model.buffers()]
        model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return model
