"""New entries of some rows of a cache: flat for every backend, and padded for backends that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.model.kv_cache import KVCache


@dataclass(frozen=True)
class Inputs:
    """n new entries of some rows of a cache, row after row. A forward returns [n, ..] in the same order."""

    rows: Sequence[int]  # rows of the cache, in any order
    depths: Sequence[
        Sequence[int]
    ]  # [R][N_r] positions of new nodes, counted from the row's first uncommitted one
    # [N_r, P + N_r] bool of each row: whether each node sees the last P committed positions and the new nodes. P is the
    # same in all rows. None: rows are chains.
    masks: Sequence[Tensor] | None = None
    tokens: Sequence[Sequence[int]] | None = None  # [R][N_r]
    given: Tensor | None = None  # in place of `tokens`: states [n, d] on the device

    @property
    def size(self) -> int:
        """Return B, the number of the cache's rows up to the last used one."""
        return max(self.rows) + 1

    @property
    def counts(self) -> list[int]:
        """Return the number of new nodes of each row."""
        return [len(depths) for depths in self.depths]

    @property
    def new(self) -> int:
        """Return N, the largest number of new nodes of a row."""
        return max(self.counts)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each row's [N_r, ..] of [n, ..]."""
        return [flat] if len(self.depths) == 1 else list(flat.split(self.counts))

    def last(self, flat: Tensor) -> Tensor:
        """Return each row's last entry, [R, ..] of [n, ..]."""
        counts = self.counts
        if min(counts) == max(
            counts
        ):  # a GPU waits for an index from the host, but not for a slice
            return flat.unflatten(0, (len(counts), counts[0]))[:, -1]
        return flat[[end - 1 for end in accumulate(counts)]]

    def unpad(self, padded: Tensor) -> Tensor:
        """Return [n, ..] of the padded [B, N, ..]."""
        rows, counts = self.rows, self.counts
        if min(counts) == padded.shape[1] and list(rows) == list(range(len(padded))):
            return padded.flatten(0, 1)
        parts = [padded[row, :count] for row, count in zip(rows, counts, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pad(self, flat: Tensor) -> Tensor:
        """Return the padded [B, N, ..] of [n, ..], with zeros elsewhere."""
        size, new, counts = self.size, self.new, self.counts
        if min(counts) == new and list(self.rows) == list(range(size)):
            return flat.unflatten(0, (size, new))
        padded = flat.new_zeros(size, new, *flat.shape[1:])
        for row, part in zip(self.rows, self.split(flat), strict=True):
            padded[row, : len(part)] = part
        return padded


@dataclass(frozen=True)
class PaddedBatch:
    """The first B rows of a cache with N new entries each, padding included. Rows without new entries keep their
    committed ones.
    """

    ids: Tensor | None  # [B, N] tokens, or
    states: Tensor | None  # [B, N, d] hidden states
    positions: Tensor  # [B, N]
    end: int  # number of slots that attention gets
    # Additive [B, 1, N, end], by layer type if they differ. None: `causal` of (N, end).
    mask: Tensor | dict[str, Tensor] | None = None


def pad(
    inputs: Inputs,
    cache: KVCache,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
    kinds: Sequence[str] | None = None,
) -> PaddedBatch:
    """Return the padded batch of entries, for a model on this device, and prepare the cache for it.

    `window`: positions that attention sees back; None for all. With layer types `kinds`, it holds in sliding layers
    only, and the mask is a dictionary by type.
    """
    rows, masks = inputs.rows, inputs.masks
    size, new, lengths = inputs.size, inputs.new, cache.lengths[: inputs.size]
    start = max(lengths)
    end = start + new
    # Rows of one length need no slots. Shorter rows of padding alone may be written to there too.
    even = all(lengths[row] == start for row in rows)
    given = inputs.pad(inputs.given) if inputs.given is not None else None
    slots: Tensor | None = None
    mask: Tensor | dict[str, Tensor] | None = None
    if even and masks is None and min(inputs.counts) == new:  # a cheap path for the common case
        positions = torch.arange(start, end, device=device).expand(size, new)
        if given is None:
            assert inputs.tokens is not None
            one = len(rows) == size == 1
            given = torch.tensor(
                inputs.tokens if one else [row[1 : 1 + new] for row in pack_rows(inputs, lengths)]
            )
            given = given.to(device)
    else:
        # One tensor, as each transfer to a GPU takes time.
        ends, ids, positions = torch.tensor(pack_rows(inputs, lengths), device=device).split(
            [1, new, new], -1
        )
        given = ids if given is None else given
        if masks is not None or not even:
            inner = None if masks is None else new_token_mask(inputs).to(device)
            slots, mask = _slots_and_mask(ends, positions, inner, end, dtype, window, kinds)
            slots = None if even else slots
        # Chains in rows of one length use the model's own causal mask, as padding comes after all that is read.
    cache.begin(size, start, end, slots)
    ids_, states = (None, given) if given.is_floating_point() else (given, None)
    return PaddedBatch(ids_, states, positions, end, mask)


def pack_rows(inputs: Inputs, lengths: Sequence[int]) -> list[list[int]]:
    """Return a list [1 + 2 N] for each of the first `len(lengths)` rows: its length, its tokens padded to N, and their
    positions.
    """
    new = inputs.new
    # Padding takes a used position, as the next one may lie beyond the model's last.
    packed = [[length, *[0] * new, *[max(length - 1, 0)] * new] for length in lengths]
    for place, (row, depths) in enumerate(zip(inputs.rows, inputs.depths, strict=True)):
        count, length = len(depths), lengths[row]
        if inputs.tokens is not None:
            # A row is padded with its own token: another that gives NaN would spoil the row, as masks do not hide NaN.
            own = inputs.tokens[place]
            packed[row][1 : 1 + new] = [*own, *[own[-1] if own else 0] * (new - count)]
        packed[row][1 + new : 1 + new + count] = [length + depth for depth in depths]
    return packed


def new_token_mask(inputs: Inputs) -> Tensor:
    """Return [B, N, P + N] bool: whether each new entry sees the last P committed positions and the new entries.
    Padding sees itself alone.
    """
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
    """Return slots [B, N] for new entries at `positions` [B, N] of rows of `lengths` [B, 1], and their additive mask
    over `end` slots. `inner` [B, N, P + N] is `new_token_mask`, or None for chains.
    """
    rows, new = positions.shape
    every = torch.arange(end, device=positions.device)
    slots = lengths + every[:new]
    seen = _visible(lengths, slots, inner, every)
    if window is None:
        return slots, additive(seen, dtype)
    # The position of each slot's entry.
    standing = every.repeat(rows, 1).scatter(1, slots, positions)
    near = seen & (positions[:, :, None] - standing[:, None] < window)
    if kinds is None:
        return slots, additive(near, dtype)
    return slots, {
        kind: additive(near if kind == "sliding_attention" else seen, dtype) for kind in kinds
    }


def _visible(lengths: Tensor, slots: Tensor, inner: Tensor | None, every: Tensor) -> Tensor:
    """Return [B, N, slots] bool: whether new entries see each slot."""
    if inner is None:
        return every <= slots[:, :, None]
    rows, new = slots.shape
    back = inner.shape[-1] - new
    seen = (every < lengths - back)[:, None].repeat(1, new, 1)
    # Rows of padding may be shorter than P.
    near = (
        slots
        if not back
        else (lengths + torch.arange(-back, new, device=slots.device)).clamp(min=0)
    )
    return seen.scatter(2, near[:, None].expand(rows, new, -1), inner)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, N, keys]: 0 where `seen` [B, N, keys], else the lowest number. Boolean masks are
    silently wrong with eager attention.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def causal(new: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [N, end] of chains after `end - N` positions."""
    return torch.full((new, end), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(
        end - new + 1
    )
