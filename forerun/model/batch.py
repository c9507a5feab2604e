"""New entries of some rows of a cache: flat for every backend, padded for those that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.model.kv_cache import KVCache


@dataclass(frozen=True)
class Inputs:
    """n new entries of some rows of a cache, row after row.

    A forward returns [n, ..] in the same order.

    Attributes:
        rows: rows of the cache, in any order.
        depths: [R][N_r] positions of the new entries, counted from the row's first uncommitted
            position.
        masks: [N_r, P + N_r] bool of each row: whether each entry sees the last P committed
            positions and the new entries. P is the same in all rows. None if all rows are chains.
        tokens: [R][N_r], or None with `given`.
        given: hidden states [n, d] on the device, which replace the tokens.
    """

    rows: Sequence[int]
    depths: Sequence[Sequence[int]]
    masks: Sequence[Tensor] | None = None
    tokens: Sequence[Sequence[int]] | None = None
    given: Tensor | None = None

    @property
    def size(self) -> int:
        """Return B, the number of the cache's rows up to the last one in `rows`."""
        return max(self.rows) + 1

    @property
    def counts(self) -> list[int]:
        """Return the number of new entries of each row."""
        return [len(depths) for depths in self.depths]

    @property
    def new(self) -> int:
        """Return N, the largest number of new entries of a row."""
        return max(self.counts)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each row's [N_r, ..] of [n, ..]."""
        return [flat] if len(self.depths) == 1 else list(flat.split(self.counts))

    def last(self, flat: Tensor) -> Tensor:
        """Return each row's last entry, [R, ..] of [n, ..]."""
        counts = self.counts
        if min(counts) == max(counts):
            # Because a GPU waits for an index from the host, but not for a slice.
            rows: Tensor = flat.unflatten(0, (len(counts), counts[0]))
            return rows[:, -1]
        return flat[[end - 1 for end in accumulate(counts)]]

    def unpad(self, padded: Tensor) -> Tensor:
        """Return [n, ..] of the padded [B, N, ..]."""
        counts = self.counts
        if min(counts) == padded.shape[1] and self._are_first(len(padded)):
            return padded.flatten(0, 1)
        parts = [padded[row, :count] for row, count in zip(self.rows, counts, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pad(self, flat: Tensor) -> Tensor:
        """Return the padded [B, N, ..] of [n, ..], with zeros elsewhere."""
        size = self.size
        new = self.new
        if min(self.counts) == new and self._are_first(size):
            whole: Tensor = flat.unflatten(0, (size, new))
            return whole
        padded = flat.new_zeros(size, new, *flat.shape[1:])
        for row, part in zip(self.rows, self.split(flat), strict=True):
            padded[row, : len(part)] = part
        return padded

    def _are_first(self, count: int) -> bool:
        """Return whether `rows` are the cache's first `count` rows, in order."""
        return list(self.rows) == list(range(count))


@dataclass(frozen=True)
class PaddedBatch:
    """The first B rows of a cache with N new entries each, some of which are padding.

    Rows without new entries keep their committed ones.
    """

    ids: Tensor | None  # [B, N] tokens, unless there are states
    states: Tensor | None  # [B, N, d] hidden states, unless there are tokens
    positions: Tensor  # [B, N]
    end: int  # number of slots that attention gets
    # Additive [B, 1, N, end], by layer type if they differ. None stands for `causal` of (N, end).
    mask: Tensor | dict[str, Tensor] | None = None


def pad(
    inputs: Inputs,
    cache: KVCache,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
    kinds: Sequence[str] | None = None,
) -> PaddedBatch:
    """Return new entries as a padded batch, and prepare the cache for its forward.

    Args:
        inputs: the new entries.
        cache: the cache of their rows.
        device: the model's.
        dtype: of the mask.
        window: the positions that attention sees back; None for all.
        kinds: layer types. With these the window holds in sliding layers only, and the mask is a
            dictionary by type.
    """
    size = inputs.size
    new = inputs.new
    lengths = cache.lengths[:size]
    start = max(lengths)
    end = start + new
    # Rows of one length need no slots. A shorter row without new entries may be written to after
    # `start` too.
    is_even = all(lengths[row] == start for row in inputs.rows)
    given = inputs.pad(inputs.given) if inputs.given is not None else None
    slots: Tensor | None = None
    mask: Tensor | dict[str, Tensor] | None = None
    if is_even and inputs.masks is None and min(inputs.counts) == new:
        # A cheap path for the common case.
        positions = torch.arange(start, end, device=device).expand(size, new)
        if given is None:
            given = torch.tensor(_token_rows(inputs, lengths)).to(device)
    else:
        # One tensor, as each transfer to a GPU takes time.
        packed = torch.tensor(pack_rows(inputs, lengths), device=device)
        row_lengths, ids, positions = packed.split([1, new, new], -1)
        if given is None:
            given = ids
        if inputs.masks is not None or not is_even:
            inner = None if inputs.masks is None else new_token_mask(inputs).to(device)
            new_slots = row_lengths + torch.arange(new, device=device)
            seen = _visible(row_lengths, new_slots, inner, end)
            mask = _additive_masks(seen, new_slots, positions, dtype, window, kinds)
            slots = None if is_even else new_slots
        # Otherwise the rows are chains of one length, for which the model's own causal mask will
        # do, because padding comes after all that is read.
    cache.begin(size, start, end, slots)
    if given.is_floating_point():
        return PaddedBatch(None, given, positions, end, mask)
    return PaddedBatch(given, None, positions, end, mask)


def _token_rows(inputs: Inputs, lengths: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return the tokens [B][N] of inputs that have N new entries in each of their rows."""
    assert inputs.tokens is not None
    if len(inputs.rows) == inputs.size == 1:
        return inputs.tokens
    return [row[1 : 1 + inputs.new] for row in pack_rows(inputs, lengths)]


def pack_rows(inputs: Inputs, lengths: Sequence[int]) -> list[list[int]]:
    """Return a list [1 + 2 N] for each of the first `len(lengths)` rows.

    It holds the row's length, its tokens padded to N, and their positions.
    """
    new = inputs.new
    # Padding takes a used position, as the next one may lie beyond the model's last.
    packed = [[length, *[0] * new, *[max(length - 1, 0)] * new] for length in lengths]
    for place, (row, depths) in enumerate(zip(inputs.rows, inputs.depths, strict=True)):
        count = len(depths)
        length = lengths[row]
        if inputs.tokens is not None:
            # A row is padded with its own last token, because another one that gives NaN would
            # spoil the row: masks do not hide NaN.
            tokens = inputs.tokens[place]
            padding = tokens[-1] if tokens else 0
            packed[row][1 : 1 + new] = [*tokens, *[padding] * (new - count)]
        packed[row][1 + new : 1 + new + count] = [length + depth for depth in depths]
    return packed


def new_token_mask(inputs: Inputs) -> Tensor:
    """Return `Inputs.masks` for the first B rows, padded to [B, N, P + N] bool.

    Padding sees only itself.
    """
    masks = inputs.masks
    assert masks is not None
    new = inputs.new
    back = masks[0].shape[1] - masks[0].shape[0]
    inner = torch.zeros(inputs.size, new, back + new, dtype=torch.bool)
    inner[:, :, back:] = torch.eye(new, dtype=torch.bool)
    for row, mask in zip(inputs.rows, masks, strict=True):
        inner[row, : len(mask), : mask.shape[1]] = mask
    return inner


def _visible(lengths: Tensor, slots: Tensor, inner: Tensor | None, end: int) -> Tensor:
    """Return [B, N, end] bool: whether new entries at `slots` [B, N] see each slot.

    `lengths` [B, 1] are those of the rows. `inner` [B, N, P + N] is `new_token_mask`, or None for
    chains.
    """
    every = torch.arange(end, device=slots.device)
    if inner is None:
        return every <= slots[:, :, None]
    rows, new = slots.shape
    back = inner.shape[-1] - new
    seen = (every < lengths - back)[:, None].repeat(1, new, 1)
    near = slots
    if back:
        # Rows without new entries may be shorter than P.
        near = (lengths + torch.arange(-back, new, device=slots.device)).clamp(min=0)
    return seen.scatter(2, near[:, None].expand(rows, new, -1), inner)


def _additive_masks(
    seen: Tensor,
    slots: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    window: int | None,
    kinds: Sequence[str] | None,
) -> Tensor | dict[str, Tensor]:
    """Return the additive mask of `seen` [B, N, end], by layer type with `kinds` (see `pad`).

    `slots` and `positions` [B, N] are those of the new entries.
    """
    if window is None:
        return additive(seen, dtype)
    rows, _, end = seen.shape
    slot_positions = torch.arange(end, device=seen.device).repeat(rows, 1)
    slot_positions = slot_positions.scatter(1, slots, positions)
    near = seen & (positions[:, :, None] - slot_positions[:, None] < window)
    if kinds is None:
        return additive(near, dtype)
    return {kind: additive(near if kind == "sliding_attention" else seen, dtype) for kind in kinds}


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, N, keys]: 0 where `seen` [B, N, keys], else the minimum.

    Masks are not boolean, because eager attention would add those too, and be silently wrong.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def causal(new: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [N, end] of chains after `end - N` positions."""
    return torch.full((new, end), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(
        end - new + 1
    )
