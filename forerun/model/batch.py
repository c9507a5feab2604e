"""What every forward is given: new entries of some rows of a cache, laid out. Positions, slots and masks are made here
and nowhere else, by tensor operations that may stand in a recorded graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.model.kv_cache import KVCache


@dataclass(frozen=True)
class Inputs:
    """New entries of some rows of a cache, before they are laid out. Rows below the highest that are not named are
    padding: what is committed there stays as it is.

    Attributes:
        rows: of the cache, in any order.
        depths: where each row's new nodes stand behind its committed positions.
        masks: [N_r, P + N_r] bool of each row: which of the P positions that were committed last, and of the new
            nodes, each node sees. P is the same in all rows. None: rows are chains.
        tokens: of each row's nodes.
        given: instead of `tokens`, ids [B, N] or states [B, N, d] on the device, by the rows of the cache.
    """

    rows: Sequence[int]
    depths: Sequence[Sequence[int]]
    masks: Sequence[Tensor] | None = None
    tokens: Sequence[Sequence[int]] | None = None
    given: Tensor | None = None

    @property
    def size(self) -> int:
        """Rows of the cache that go along, B."""
        return max(self.rows) + 1

    @property
    def new(self) -> int:
        """Most new nodes of a row, N."""
        return max(map(len, self.depths))

    # What a forward gives is [B, N, V] with padding, or [n, V] without: of the named rows, in their order.

    def split(self, found: Tensor) -> list[Tensor]:
        """Of what a forward gave, each named row's own [N_r, V]."""
        if found.dim() == 2:
            return list(found.split([len(depths) for depths in self.depths]))
        return [found[row, : len(depths)] for row, depths in zip(self.rows, self.depths, strict=True)]

    def last(self, found: Tensor) -> Tensor:
        """Likewise the last of each named row, [R, V]."""
        counts = [len(depths) for depths in self.depths]
        if found.dim() == 2:
            return found if len(found) == len(counts) else found[[end - 1 for end in accumulate(counts)]]
        if len(set(counts)) == 1:  # a GPU waits for numbers of rows to come from the host, but not for a slice
            return of_rows(found[:, counts[0] - 1], self.rows)
        return found[list(self.rows), [count - 1 for count in counts]]


@dataclass(frozen=True)
class ForwardBatch:
    """The first B rows of a cache with N new entries each, padding among them.

    Attributes:
        ids: [B, N] tokens, or
        states: [B, N, d] hidden states.
        positions: [B, N].
        start: the longest row's committed length. Without `slots` new entries go there in all rows.
        end: how many slots of the cache attention is given.
        slots: [B, N] where new entries go.
        mask: additive [B, 1, N, end], one a layer type where they differ. None: `causal` of (N, end).
    """

    ids: Tensor | None
    states: Tensor | None
    positions: Tensor
    start: int
    end: int
    slots: Tensor | None = None
    mask: Tensor | dict[str, Tensor] | None = None


def lay_out(
    inputs: Inputs,
    cache: KVCache,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
    kinds: Sequence[str] | None = None,
) -> ForwardBatch:
    """A batch of these entries, for a model of this device and dtype. Tells the cache where they will go.

    `window`: how far attention sees back, None for everything; with `kinds`, layer types, only in sliding ones, and the
    mask is a dictionary by type.
    """
    rows, depths, masks, given = inputs.rows, inputs.depths, inputs.masks, inputs.given
    size, counts = inputs.size, [len(row) for row in depths]
    new, lengths = max(counts), cache.lengths[:size]
    start = max(lengths)
    # Rows of one length need no slots. Shorter ones that are mere padding may be written to there as well.
    even = all(lengths[row] == start for row in rows)
    full = even and masks is None and min(counts) == new
    slots: Tensor | None = None
    mask: Tensor | dict[str, Tensor] | None = None
    if full:  # the common case, made cheap
        positions = torch.arange(start, start + new, device=device).expand(size, new)
        if given is None:
            assert inputs.tokens is not None
            tokens = inputs.tokens if len(rows) == size == 1 else facts(inputs, lengths, new, "tokens")
            given = torch.tensor(tokens, device=device)
    else:
        # One tensor, as each that goes to a GPU takes time.
        whole = torch.tensor(facts(inputs, lengths, new, "all"), device=device)
        ends, ids, positions = whole.split([1, new, new], -1)
        given = ids if given is None else given
        if masks is not None and size == 1 and window is None:
            mask = _one_tree(masks[0].to(device), start + new, dtype)
        elif masks is not None or not even:
            inner = None if masks is None else insides(inputs, size, new).to(device)
            slots, mask = places_and_mask(ends, positions, inner, start + new, dtype, window, kinds)
            slots = None if even else slots
        # Rows of one length with chains are what the model's own causal mask is for: padding stands behind everything
        # that is read.
    cache.begin(size, start, start + new, slots)
    ids, states = (None, given) if given.is_floating_point() else (given, None)
    return ForwardBatch(ids, states, positions, start, start + new, slots, mask)


def facts(inputs: Inputs, lengths: Sequence[int], new: int, which: str = "all") -> list[list[int]]:
    """Of each of the first `len(lengths)` rows its tokens, padded to `new`; or with "all" its length, its tokens, and
    the positions of these [1 + 2 N]."""
    # Padding takes a position that has been there: the next one may lie behind the model's last.
    found = [[length, *[0] * new, *[max(length - 1, 0)] * new] for length in lengths]
    for place, (row, depths) in enumerate(zip(inputs.rows, inputs.depths, strict=True)):
        count, length = len(depths), lengths[row]
        if inputs.tokens is not None:
            # A row is padded with a token of its own: one that gives NaN would spoil others, as masks do not hide NaN.
            own = inputs.tokens[place]
            found[row][1 : 1 + new] = [*own, *[own[-1] if own else 0] * (new - count)]
        found[row][1 + new : 1 + new + count] = [length + depth for depth in depths]
    return [row[1 : 1 + new] for row in found] if which == "tokens" else found


def insides(inputs: Inputs, size: int, new: int) -> Tensor:
    """[B, N, P + N] bool: which of the P positions committed last, and of the new entries, each new entry sees. Padding
    sees itself alone."""
    masks = inputs.masks
    if masks is None:
        return torch.ones(new, new, dtype=torch.bool).tril().expand(size, -1, -1)
    back = masks[0].shape[1] - masks[0].shape[0]
    inner = torch.zeros(size, new, back + new, dtype=torch.bool)
    inner[:, :, back:] = torch.eye(new, dtype=torch.bool)
    for row, mask in zip(inputs.rows, masks, strict=True):
        inner[row, : len(mask), : mask.shape[1]] = mask
    return inner


def places_and_mask(
    lengths: Tensor,
    positions: Tensor,
    inner: Tensor | None,
    end: int,
    dtype: torch.dtype,
    window: int | None = None,
    kinds: Sequence[str] | None = None,
) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Slots [B, N] of new entries, and their additive mask over `end` slots, of rows of `lengths` [B, 1] with new
    entries at `positions` [B, N]. `inner` [B, N, P + N] as `insides` has it; None for chains."""
    rows, new = positions.shape
    every = torch.arange(end, device=positions.device)
    slots = lengths + every[:new]
    seen = visible(lengths, slots, inner, every)
    if window is None:
        return slots, additive(seen, dtype)
    # Of each slot the position of what is there.
    standing = every.repeat(rows, 1).scatter(1, slots, positions)
    near = seen & (positions[:, :, None] - standing[:, None] < window)
    if kinds is None:
        return slots, additive(near, dtype)
    return slots, {kind: additive(near if kind == "sliding_attention" else seen, dtype) for kind in kinds}


def visible(lengths: Tensor, slots: Tensor, inner: Tensor | None, every: Tensor) -> Tensor:
    """[B, N, slots] bool: which slots new entries see."""
    if inner is None:
        return every <= slots[:, :, None]
    rows, new = slots.shape
    back = inner.shape[-1] - new
    seen = (every < lengths - back)[:, None].repeat(1, new, 1)
    # Rows that are padding may be shorter than what others look back at.
    near = slots if not back else (lengths + torch.arange(-back, new, device=slots.device)).clamp(min=0)
    return seen.scatter(2, near[:, None].expand(rows, new, -1), inner)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask [B, 1, N, keys] from what is seen [B, N, keys]: 0, and the lowest number elsewhere. Boolean masks are
    silently wrong under eager attention."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def causal(new: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [N, end] of chains behind `end - N` positions."""
    return torch.full((new, end), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(end - new + 1)


def _one_tree(inner: Tensor, end: int, dtype: torch.dtype) -> Tensor:
    """The same as `places_and_mask` has it for a single row without a window: everything before `inner` is seen."""
    mask = torch.zeros(len(inner), end, dtype=dtype, device=inner.device)
    mask[:, end - inner.shape[1] :].masked_fill_(~inner, torch.finfo(dtype).min)
    return mask[None, None]


def by_row(found: Tensor, rows: Sequence[int]) -> Tensor:
    """[B, ..] by the rows of a cache, from [len(rows), ..] in their order; zeros in rows that are not named."""
    size = max(rows) + 1
    if list(rows) == list(range(size)):
        return found
    whole = found.new_zeros(size, *found.shape[1:])
    whole[torch.tensor(rows, device=found.device)] = found
    return whole


def of_rows(found: Tensor, rows: Sequence[int]) -> Tensor:
    """[len(rows), ..] in their order, from [B, ..] by the rows of a cache."""
    if list(rows) == list(range(len(found))):
        return found
    return found[torch.tensor(rows, device=found.device)]
