"""A head's token information (`HiddenDrafter.token_information`), as decoding needs it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.native import LANES
from forerun.backends.native_heads import LARGEST_TABLE, tiles_of
from forerun.backends.packed import Product, product
from forerun.backends.tiles import BLOCK, Tiles, has_tiles
from forerun.heads.heads import HiddenDrafter


@dataclass(frozen=True)
class NativeInformation:
    """The product of tokens' states [V, r], in bfloat16, with a weight [S, r], in C. The weight is filled up to a
    multiple of 16 rows."""

    states: Tensor
    answer: Tiles
    size: int

    def __call__(self, ids: Tensor) -> Tensor:
        """[.., S] of tokens [..]."""
        return self.answer(self.states[ids.flatten()])[:, : self.size].float().view(*ids.shape, -1)


@torch.no_grad()
def token_information(head: HiddenDrafter, dtype: torch.dtype, few: bool) -> NativeInformation | Product | None:
    """A function of tokens [..] to T [.., S], on the head's device: a product in C, a table, or a product where that
    is too large. None for a head without it. `few`: see `product`."""
    config = head.config
    if config.kind != "lyanna" or not config.rank:
        return None
    every = torch.arange(config.vocab_size, device=head.hot.device)
    if few and has_tiles() and config.rank % BLOCK == 0:
        weight = functional.pad(head.answer.weight, (0, 0, 0, -config.hot_size % LANES))
        return NativeInformation(head.token_states(every).bfloat16(), tiles_of(weight), config.hot_size)
    if config.vocab_size * config.hot_size <= LARGEST_TABLE:
        return functools.partial(functional.embedding, weight=head.token_information(every).to(dtype))
    tokens = head.token_states(every).to(dtype)
    answer = product(head.answer.weight.to(dtype), one_row=True, few=few)
    return lambda ids: answer(tokens[ids].flatten(0, -2)).view(*ids.shape, -1)
