"""A head's token information (`HiddenDrafter.token_information`), as decoding needs it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.packed import Product, product
from forerun.heads.heads import HiddenDrafter

LARGEST_TABLE = 2**26  # numbers of a table


@torch.no_grad()
def token_information(head: HiddenDrafter, dtype: torch.dtype, few: bool) -> Product | None:
    """A function of tokens [..] to T [.., S], on the head's device: a table, or a product where that is too large. None
    for a head without it. `few`: see `product`."""
    config = head.config
    if config.kind != "lyanna" or not config.rank:
        return None
    every = torch.arange(config.vocab_size, device=head.hot.device)
    if config.vocab_size * config.hot_size <= LARGEST_TABLE:
        return functools.partial(functional.embedding, weight=head.token_information(every).to(dtype))
    tokens = head.token_states(every).to(dtype)
    answer = product(head.answer.weight.to(dtype), one_row=True, few=few)

    def information(ids: Tensor) -> Tensor:
        return answer(tokens[ids].flatten(0, -2)).view(*ids.shape, -1)

    return information
