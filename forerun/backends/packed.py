"""Weights laid out for products of a few rows, as in decoding on a CPU.

`nn.Linear` keeps a weight as [out, in]. For one row that is as good as any layout. From two to sixteen rows the product
then costs up to three times as much, and verifying a draft would lose that. In panels of 32 columns a core reads memory
in order, and eight rows cost little more than one. On 2 cores this is a third faster than oneDNN's own packing at small
sizes, a tenth faster at big ones, and a tenth slower at some between (docs/log.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from forerun.backends.facts import processor
from forerun.backends.panels import BLOCK, quantise
from forerun.csrc.library import library

Product = Callable[[Tensor], Tensor]

PANEL = 32  # outputs of a panel
TWICE = 1_000_000_000  # the most parameters of a model whose weights are kept in two layouts


def product(weight: Tensor, bias: Tensor | None = None, one_row: bool = False, few: bool = False) -> Product:
    """Return the function x [n, in] -> x @ weight.T + bias [n, out] for a weight [out, in]. It equals
    `functional.linear` but for rounding.

    In float32 on a CPU it keeps a copy of the weight in panels. With `one_row` it keeps the weight itself too, which
    makes single rows 5 to 20 percent faster; but not on AMD's processors, where MKL runs single rows on one thread.
    Elsewhere it is `functional.linear`.

    With `few`, for drafts, which may round, the weight is kept in 8 bits if it is on a CPU, the C library is there and
    blocks divide its inputs. Outputs are float32 then.
    """
    if few and weight.device.type == "cpu" and weight.shape[1] % BLOCK == 0 and library() is not None:
        packed = quantise(weight, Type.Q8_0)
        return packed if bias is None else lambda x: packed(x) + bias
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda x: functional.linear(x, weight, bias)
    size = len(weight)
    ragged = size % PANEL != 0
    padded = functional.pad(weight.detach(), (0, 0, 0, -size % PANEL))
    panels = padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()  # [out / 32, in, 32]
    count, single = len(panels), weight.detach() if one_row and not is_amd() else None

    def multiply(x: Tensor) -> Tensor:
        rows = x.size(0)
        if rows > 1:
            y = torch.bmm(x.expand(count, -1, -1), panels).transpose(0, 1).reshape(rows, -1)
        elif single is not None:
            return functional.linear(x, single, bias)
        else:  # a batch of vector products is slower than one of two rows
            y = torch.bmm(x.repeat(2, 1).expand(count, -1, -1), panels)[:, :1].reshape(1, -1)
        if ragged:
            y = y[:, :size]
        return y if bias is None else y + bias

    return multiply


@cache
def is_amd() -> bool:
    """Return whether the processor is AMD's."""
    return "AMD" in processor()


class PackedLinear(nn.Module):
    """A linear layer for inference in the layout of `product`."""

    def __init__(self, linear: nn.Linear, one_row: bool, few: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = product(linear.weight, linear.bias, one_row, few)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack(model: PreTrainedModel, in_place: bool = False) -> PreTrainedModel:
    """Return the model with every `nn.Linear` packed, or the model itself if it is not in float32 on a CPU.

    The given model stays as it is and shares everything else with the copy. With `in_place` it is packed itself, and
    beyond TWICE parameters each weight is freed once it is packed. Packed weights do not follow later changes of the
    originals. A packed model can be neither trained nor saved.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return model
    if not in_place:
        shared = [*model.parameters(), *model.buffers()]
        model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    pack_linears(model, model.num_parameters() <= TWICE)
    return model


def pack_linears(module: nn.Module, one_row: bool, few: bool = False) -> None:
    """Pack every `nn.Linear` of a module in place; `one_row` and `few` are as in `product`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, one_row, few))
