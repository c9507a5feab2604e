"""New entries of some rows of a cache: flat for every backend, and padded for those that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.model.kv_cache import KVCache


@dataclass(frozen=True)
class Inputs:
    """n new entries of some rows of a cache, row after row. What a forward returns is [n, ..], in the same order."""

    rows: Sequence[int]  # of the cache, in any order
    depths: Sequence[Sequence[int]]  # positions of each row's new nodes, counted from its first uncommitted one
    # [N_r, P + N_r] bool of each row: which of the P positions committed last, and of the new nodes, each node sees. P
    # is the same in all rows. None: rows are chains.
    masks: Sequence[Tensor] | None = None
    tokens: Sequence[Sequence[int]] | None = None  # of each row's nodes
    given: Tensor | None = None  # instead of `tokens`, ids [n] or states [n, d] on the device

    @property
    def size(self) -> int:
        """Rows of the cache up to the highest, B."""
        return max(self.rows) + 1

    @property
    def counts(self) -> list[int]:
        """New nodes of each row."""
        return [len(depths) for depths in self.depths]

    @property
    def new(self) -> int:
        """Most new nodes of a row, N."""
        return max(self.counts)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each row's own [N_r, ..] of [n, ..]."""
        return list(flat.split(self.counts))

    def last(self, flat: Tensor) -> Tensor:
        """Return the last of each row [R, ..] of [n, ..]."""
        counts = self.counts
        if min(counts) == max(counts):  # a GPU waits for numbers of rows to come from the host, but not for a slice
            return flat.unflatten(0, (len(counts), counts[0]))[:, -1]
        return flat[[end - 1 for end in accumulate(counts)]]

    def unpad(self, padded: Tensor) -> Tensor:
        """Return [n, ..] of [B, N, ..] by the rows of the cache."""
        rows, counts = self.rows, self.counts
        if min(counts) == padded.shape[1] and list(rows) == list(range(len(padded))):
            return padded.flatten(0, 1)
        parts = [padded[row, :count] for row, count in zip(rows, counts, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pad(self, flat: Tensor) -> Tensor:
        """Return [B, N, ..] by the rows of the cache, of [n, ..]; zeros elsewhere."""
        size, new, counts = self.size, self.new, self.counts
        if min(counts) == new and list(self.rows) == list(range(size)):
            return flat.unflatten(0, (size, new))
        padded = flat.new_zeros(size, new, *flat.shape[1:])
        for row, part in zip(self.rows, self.split(flat), strict=True):
            padded[row, : len(part)] = part
        return padded


@dataclass(frozen=True)
class PaddedBatch:
    """The first B rows of a cache with N new entries each, padding among them. What is committed in rows that are not
    named stays as it is."""

    ids: Tensor | None  # [B, N] tokens, or
    states: Tensor | None  # [B, N, d] hidden states
    positions: Tensor  # [B, N]
    end: int  # slots of the cache that attention gets
    # Additive [B, 1, N, end], one a layer type if they differ. None: `causal` of (N, end).
    mask: Tensor | dict[str, Tensor] | None = None


def pad(
    inputs: Inputs,
    cache: KVCache,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
    kinds: Sequence[str] | None = None,
) -> PaddedBatch:
    """Lay out entries with padding, for a model of this device and dtype, and prepare the cache for them.

    `window`: how far attention sees back, None for everything; with `kinds`, layer types, only in sliding ones, and the
    mask is a dictionary by type.
    """
    rows, masks = inputs.rows, inputs.masks
    size, new, lengths = inputs.size, inputs.new, cache.lengths[: inputs.size]
    start = max(lengths)
    end = start + new
    # Rows of one length need no slots. Shorter ones that are padding alone may be written to there as well.
    even = all(lengths[row] == start for row in rows)
    given = inputs.pad(inputs.given) if inputs.given is not None else None
    slots: Tensor | None = None
    mask: Tensor | dict[str, Tensor] | None = None
    if even and masks is None and min(inputs.counts) == new:  # the common case, made cheap
        positions = torch.arange(start, end, device=device).expand(size, new)
        if given is None:
            assert inputs.tokens is not None
            one = len(rows) == size == 1
            given = torch.tensor(inputs.tokens if one else [row[1 : 1 + new] for row in pack_rows(inputs, lengths)])
            given = given.to(device)
    else:
        # One tensor, as each that goes to a GPU takes time.
        ends, ids, positions = torch.tensor(pack_rows(inputs, lengths), device=device).split([1, new, new], -1)
        given = ids if given is None else given
        if masks is not None and size == 1 and window is None:
            mask = _one_tree(masks[0].to(device), end, dtype)
        elif masks is not None or not even:
            inner = None if masks is None else new_token_mask(inputs).to(device)
            slots, mask = _slots_and_mask(ends, positions, inner, end, dtype, window, kinds)
            slots = None if even else slots
        # Rows of one length with chains use the model's own causal mask: padding stands after all that is read.
    cache.begin(size, start, end, slots)
    ids_, states = (None, given) if given.is_floating_point() else (given, None)
    return PaddedBatch(ids_, states, positions, end, mask)


def pack_rows(inputs: Inputs, lengths: Sequence[int]) -> list[list[int]]:
    """Return of each of the first `len(lengths)` rows [1 + 2 N]: its length, its tokens padded to N, their
    positions."""
    new = inputs.new
    # Padding takes a position that has been there: the next one may lie beyond the model's last.
    packed = [[length, *[0] * new, *[max(length - 1, 0)] * new] for length in lengths]
    for place, (row, depths) in enumerate(zip(inputs.rows, inputs.depths, strict=True)):
        count, length = len(depths), lengths[row]
        if inputs.tokens is not None:
            # A row is padded with a token of its own: one that gives NaN would spoil others, as masks do not hide NaN.
            own = inputs.tokens[place]
            packed[row][1 : 1 + new] = [*own, *[own[-1] if own else 0] * (new - count)]
        packed[row][1 + new : 1 + new + count] = [length + depth for depth in depths]
    return packed


def new_token_mask(inputs: Inputs) -> Tensor:
    """Return [B, N, P + N] bool: which of the P positions committed last, and of the new entries, each new entry sees.
    Padding sees itself alone."""
    masks, new = inputs.masks, inputs.new
    assert masks is not None
    back = masks[0].shape[1] - masks[0].shape[0]
    inner = torch.zeros(inputs.size, new, back + new, dtype=torch.bool)
    inner[:, :, back:] = torch.eye(new, dtype=torch.bool)
    for row, mask in zip(inputs.rows, masks, strict=True):
        inner[row, : len(mask), : mask.shape[1]] = mask
    return inner


def _slots_and_mask(
    lengths: Tensor,
    positions: Tensor,
    inner: Tensor | None,
    end: int,
    dtype: torch.dtype,
    window: int | None,
    kinds: Sequence[str] | None,
) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Return slots [B, N] of new entries at `positions` [B, N] of rows of `lengths` [B, 1], and their additive mask
    over `end` slots. `inner` [B, N, P + N] is of `new_token_mask`; None for chains."""
    rows, new = positions.shape
    every = torch.arange(end, device=positions.device)
    slots = lengths + every[:new]
    seen = _visible(lengths, slots, inner, every)
    if window is None:
        return slots, additive(seen, dtype)
    # Of each slot the position of its entry.
    standing = every.repeat(rows, 1).scatter(1, slots, positions)
    near = seen & (positions[:, :, None] - standing[:, None] < window)
    if kinds is None:
        return slots, additive(near, dtype)
    return slots, {kind: additive(near if kind == "sliding_attention" else seen, dtype) for kind in kinds}


def _visible(lengths: Tensor, slots: Tensor, inner: Tensor | None, every: Tensor) -> Tensor:
    """Return [B, N, slots] bool: which slots new entries see."""
    if inner is None:
        return every <= slots[:, :, None]
    rows, new = slots.shape
    back = inner.shape[-1] - new
    seen = (every < lengths - back)[:, None].repeat(1, new, 1)
    # Rows that are padding may be shorter than what other rows look back at.
    near = slots if not back else (lengths + torch.arange(-back, new, device=slots.device)).clamp(min=0)
    return seen.scatter(2, near[:, None].expand(rows, new, -1), inner)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, N, keys] of what is seen [B, N, keys]: 0, and the lowest number elsewhere. Boolean masks
    are silently wrong under eager attention."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def causal(new: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [N, end] of chains after `end - N` positions."""
    return torch.full((new, end), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(end - new + 1)


def _one_tree(inner: Tensor, end: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of `_slots_and_mask` for a single row without a window: all before `inner` is seen."""
    mask = torch.zeros(len(inner), end, dtype=dtype, device=inner.device)
    mask[:, end - inner.shape[1] :].masked_fill_(~inner, torch.finfo(dtype).min)
    return mask[None, None]
