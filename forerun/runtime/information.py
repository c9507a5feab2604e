"""A head's token information (`HiddenDrafter.token_information`), as decoding needs it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.nn.heads import HiddenDrafter
from forerun.runtime.native import LANES, library
from forerun.runtime.native_heads import LARGEST_TABLE, tiles_of
from forerun.runtime.packed import Product, product
from forerun.runtime.tiles import BLOCK, Room, Tiles, has_tiles, room


@dataclass(frozen=True)
class NativeInformation:
    """The product of tokens' states [V, r], in bfloat16, with a weight [S, r], in C. The weight is filled up to a
    multiple of 16 rows."""

    states: Tensor
    answer: Tiles
    size: int
    library: Any

    def __call__(self, ids: Tensor) -> Tensor:
        """[.., S] of tokens [..]."""
        return self.answer(self.states[ids.flatten()])[:, : self.size].float().view(*ids.shape, -1)

    def chains(self, logits: Tensor, roots: Sequence[int], hot: Tensor) -> Tensor:
        """Chains of tokens [B, n] behind `roots`, from logits [n, B, S]: each is the argmax of its place's logits with
        the information of the token before it. `hot` [S]: the tokens."""
        steps, count, size = logits.shape
        assert logits.dtype == torch.float32 and size == self.size == len(hot)
        out, threads = self.answer.out, torch.get_num_threads()
        logits = functional.pad(logits, (0, out - size), value=-torch.inf).contiguous()
        if max(roots) >= len(self.states):  # C would read on
            raise IndexError(f"token {max(roots)} is outside the head's vocabulary of {len(self.states)}")
        tokens = torch.tensor(roots)
        found, own = room(count, steps, dtype=torch.long), room(count, out, dtype=torch.bfloat16)
        space = Room(count, self.answer.inputs)
        pointers = (part.data_ptr() for part in (self.states, hot, logits, tokens))
        self.library.choose_chains(
            *(ctypes.byref(self.answer.argument), *pointers, len(self.states), steps, count),
            *(ctypes.byref(space.argument), own.data_ptr(), found.data_ptr(), threads),
        )
        return found


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
        return NativeInformation(head.token_states(every).bfloat16(), tiles_of(weight), config.hot_size, library())
    if config.vocab_size * config.hot_size <= LARGEST_TABLE:
        return functools.partial(functional.embedding, weight=head.token_information(every).to(dtype))
    tokens = head.token_states(every).to(dtype)
    answer = product(head.answer.weight.to(dtype), one_row=True, few=few)
    return lambda ids: answer(tokens[ids].flatten(0, -2)).view(*ids.shape, -1)
