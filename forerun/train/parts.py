"""Losses over many rows of logits, made a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 128  # whose logits stay in a processor's cache while they are used


def in_parts(states: Tensor, loss: Callable[[Tensor, slice], Tensor], share: float) -> Tensor:
    """The sum of `loss(states[part], part)` over parts of states [n, d], divided by `share`. Logits of all n are never
    there at once.

    Each part goes backward by itself. So gradients of whatever else `loss` uses are added as it goes, and backward must
    be called just once on what comes, unscaled.
    """
    parts = [slice(start, start + ROWS) for start in range(0, len(states), ROWS)]
    if not (torch.is_grad_enabled() and states.requires_grad):
        return torch.stack([states.new_zeros(()), *(loss(states[part], part) / share for part in parts)]).sum()
    total, gradients = states.new_zeros(()), []
    for part in parts:
        leaf = states[part].detach().requires_grad_()
        found = loss(leaf, part) / share
        found.backward()
        total = total + found.detach()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    if not gradients:
        return total + 0 * states.sum()
    # Its gradient by the states is the one that was found.
    way = (states * torch.cat(gradients)).sum()
    return total + way - way.detach()
