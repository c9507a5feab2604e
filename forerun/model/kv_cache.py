"""A KV cache with a row for each sequence and lasting buffers. Hugging Face models take it in place of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from forerun.model.buffers import Buffer, new_buffer
from forerun.sampling.threads import one_thread

BLOCK = 256  # buffers hold a multiple of this many positions
ROWS, POSITIONS = 64, 2**15  # for which addresses are reserved, if no context is known
ADDRESSES = 2**40  # the most bytes of addresses that a cache reserves
PIECE = 4096  # positions that are looked at together

# Keys and values [G, n, D] of n positions, by layer; None for layers without buffers.
Stored = list[tuple[Tensor, Tensor] | None]
# Of a layer: one for keys and values together, or one for each.
Buffers = tuple[Buffer, ...]


class KVCache(Cache):
    """Keys and values of sequences, one a row, in buffers [rows capacity, G, capacity, D] for each layer.

    A forward writes provisional entries after each row's committed positions. `commit` keeps a path of them, and the
    next forward overwrites the rest. A sliding window is a mask and drops nothing, so a rollback only lowers a length.
    Buffers are allocated when first needed, and live as long as the cache. A failed allocation raises and leaves rows,
    lengths and entries as they were.

    On Linux a buffer is a mapping with addresses for `ROWS` rows of the model's whole context, and takes memory as it
    is written: it grows in its place, and the memory of a dropped row goes back to the system. Elsewhere buffers that
    grow are copied, one layer after the other.

    Masks hide other rows' entries, but 0 times NaN is NaN. So a row that is dropped or moved is checked once, and
    zeroed unless all of its keys and values are finite.

    Attributes:
        ids: the sequence of each row in use.
        lengths: committed positions of each row in use.
        rows_capacity, capacity: rows and positions of the buffers, or of those yet to be allocated.
        budget: limit in bytes of buffers that grow ahead of need; None for no limit.
        keeps_dropped: whether what a dropped row held stays until the row is used again, for whoever looks at it.
        changes: how often any layer's keys and values got other addresses or sizes.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(
        self, layers: int, sliding: Sequence[bool] | None = None, context: int | None = None
    ) -> None:
        """`sliding`: whether each layer's attention has a window. `context`: the most positions of a row, if known."""
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.rows_capacity = self.capacity = self.changes = 0
        self.budget: int | None = None
        self.keeps_dropped = False
        self._longest = (
            _blocks(context or POSITIONS) + BLOCK
        )  # drafts may stand behind the last position
        self._rows: dict[int, int] = {}
        self._reserves: list[int] = []
        self._reaches: list[int] = []  # written positions of each row, provisional ones included
        # Of the present forward: its rows; new entries' first slot, or slots [B, N]; the slots of attention.
        self._size, self._start, self._end = 0, 0, 0
        self._slots: Tensor | None = None
        self._row_indexes: dict[int, Tensor] = {}  # [B, 1] by B
        super().__init__(
            layers=[KVLayer(self, is_sliding) for is_sliding in sliding or [False] * layers]
        )

    # Rows.

    def row(self, id: int) -> int:
        """Return the row of a sequence. Raises KeyError if it has none."""
        return self._rows[id]

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def length(self, id: int) -> int:
        """Return the number of a sequence's committed positions; 0 without a row."""
        row = self._rows.get(id)
        return 0 if row is None else self.lengths[row]

    def add(self, id: int, reserve: int = 0) -> None:
        """Add an empty row for up to `reserve` positions. Raises ValueError for a sequence with a row."""
        if id in self._rows:
            raise ValueError(f"sequence {id} has a row already")
        self.reserve(len(self.ids) + 1, max([reserve, *self._reserves]))
        self._rows[id] = len(self.ids)
        self.ids.append(id)
        self.lengths.append(0)
        self._reserves.append(reserve)
        self._reaches.append(0)

    def drop(self, id: int) -> None:
        """Drop a sequence's row, if it has one. The last row takes its place."""
        if id not in self._rows:
            return
        row, last = self._rows[id], len(self.ids) - 1
        self._vacate(row)
        if row < last:
            self._move_row(last, row)
            self._rows[self.ids[last]] = row
        del self._rows[id]
        for each in (self.ids, self.lengths, self._reserves, self._reaches):
            each[row] = each[last]
            each.pop()

    def _move_row(self, source: int, row: int) -> None:
        """Copy a row's committed entries to another row, and vacate it."""
        for layer in self._ready():
            layer.take(row, layer, source, self.lengths[source])
        if not self.is_releasable:
            self.mend(self.ids[source])

    def _vacate(self, row: int) -> None:
        """Give a row's memory back to the system. Where that cannot be done, zero the row unless it is finite."""
        if not self.is_releasable:
            self.mend(self.ids[row])
            return
        for layer in self._ready():
            layer.release_row(row)

    def mend(self, id: int) -> bool:
        """Zero a row unless all of its entries, provisional ones included, are finite. Return whether they are."""
        row = self._rows[id]
        end = max(self._reaches[row], self.lengths[row])
        parts = [part[row] for layer in self._ready() for part in layer.buffers]
        if end and not are_numbers(part[:, :end] for part in parts):
            for part in parts:
                part.zero_()
            return False
        self._reaches[row] = 0  # entries after its length have been checked
        return True

    def reset(self) -> None:
        """Drop all rows. The buffers stay."""
        for row in range(len(self.ids)):
            self._vacate(row)
        for each in (self.ids, self.lengths, self._reserves, self._reaches):
            each.clear()
        self._rows.clear()

    def commit(self, ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the provisional entries `paths[r]` of each sequence, in that order, after its committed ones."""
        moves = []
        for id, path in zip(ids, paths, strict=True):
            row = self._rows[id]
            start = self.lengths[row]
            moves += [
                (row, start + node, start + place)
                for place, node in enumerate(path)
                if node != place
            ]
            self.lengths[row] = start + len(path)
        if moves:
            self._move(torch.tensor(moves).T)

    @torch.inference_mode()
    def _move(self, moved: Tensor) -> None:
        for layer in self._ready():
            if moved.device != layer.keys.device:  # a device map may spread layers
                moved = moved.to(layer.keys.device)
            row, source, place = moved
            layer.keys[row, :, place] = layer.keys[row, :, source]
            layer.values[row, :, place] = layer.values[row, :, source]

    def crop_to(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget each sequence's positions from `lengths[r]` on."""
        for id, length in zip(ids, lengths, strict=True):
            assert 0 <= length <= self.length(id)
            row = self._rows[id]
            self._reaches[row] = max(self._reaches[row], self.lengths[row])
            self.lengths[row] = length

    def view(self, id: int, length: int) -> Stored:
        """Return views of a sequence's first `length` positions."""
        row = self._rows[id]
        return [
            (layer.keys[row, :, :length], layer.values[row, :, :length])
            if layer.is_initialized
            else None
            for layer in self.layers
        ]

    def copy_in(self, id: int, stored: Stored, length: int) -> None:
        """Replace a sequence's entries by the first `length` positions of a `view`."""
        row = self._rows[id]
        self.reserve(0, length)
        for layer, entry in zip(self.layers, stored, strict=True):
            if entry is not None and length:
                layer.lazy_initialization(*entry)
                layer.keys[row, :, :length] = entry[0][:, :length]
                layer.values[row, :, :length] = entry[1][:, :length]
        self.lengths[row] = length

    def take(self, id: int, source: KVCache, other: int, length: int) -> None:
        """Replace a sequence's entries by the first `length` positions of a sequence in another cache, which loses all
        of its entries. Next to nothing takes memory twice (`Buffer.take`). `source` must be releasable."""
        row, old = self._rows[id], source.row(other)
        self.reserve(0, length)
        pairs = [
            (layer, given)
            for layer, given in zip(self.layers, source.layers, strict=True)
            if given.is_initialized
        ]
        for layer, given in pairs:  # all allocations come before the first entry that is lost
            layer.lazy_initialization(given.keys, given.values)
        for layer, given in pairs:
            layer.take(row, given, old, length)
        self.lengths[row] = length
        source.lengths[old] = source._reaches[old] = 0

    # Forwards.

    def begin(self, size: int, start: int, end: int, slots: Tensor | None = None) -> None:
        """Prepare a forward of the first `size` rows. New entries [B, G, N, D] go to `slots` [B, N], or in all rows to
        the slots from `start`, the longest length, on. Attention gets the first `end` slots."""
        if (
            end > self.capacity or size > self.rows_capacity
        ):  # the reservation was too small, or there was none
            self.reserve(size, end)
        self._start, self._end, self._slots = start, end, slots
        # Padding may lie in other slots, but consists of its row's own tokens.
        for row, length in enumerate(self.lengths[:size]):
            self._reaches[row] = max(self._reaches[row], length + end - start)
        if size != self._size:
            self._size = size
            for layer in self.layers:
                layer.use()
        if size not in self._row_indexes:
            ready = self._ready()
            device = slots.device if slots is not None else ready[0].keys.device if ready else None
            self._row_indexes[size] = torch.arange(size, device=device)[:, None]

    # Memory.

    @property
    def position_bytes(self) -> int | None:
        """Return the bytes of one position of a row in all layers, or None before the first forward."""
        ready = self._ready()
        if not ready:
            return None
        both = [each for layer in ready for each in (layer.keys, layer.values)]
        return sum(each.shape[1] * each.shape[3] * each.element_size() for each in both)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all rows and positions of the buffers, without further reserved addresses. On a CPU,
        memory that was never written is not taken from the system."""
        return self.rows_capacity * self.capacity * (self.position_bytes or 0)

    def fits(self, rows: int, reserve: int, budget: int, position_bytes: int) -> bool:
        """Return whether buffers for the first `rows` rows and one more of `reserve` positions, of that many bytes
        each, stay within `budget` bytes."""
        self.budget = budget
        longest = _blocks(max([reserve, *self._reserves[:rows], *self.lengths[:rows]]))
        return (rows + 1) * longest * position_bytes <= budget

    def reserve(self, rows: int, positions: int) -> None:
        """Grow the buffers to at least N rows and positions. Committed entries stay, provisional ones may be lost.
        Nothing is allocated before the first forward. Raises MemoryError or torch.OutOfMemoryError."""
        if rows <= self.rows_capacity and positions <= self.capacity:
            return
        rows, positions = max(rows, len(self.ids)), max([positions, *self.lengths])
        needed, each = (rows, _blocks(positions)), self.position_bytes or 0

        def within(rows: int, positions: int) -> bool:
            return self.budget is None or rows * positions * each <= self.budget

        rounded = 1 << (rows - 1).bit_length()
        wanted = [
            (max(rounded, self.rows_capacity), max(needed[1], self.capacity)),
            (rounded, needed[1]),
            needed,
        ]
        sizes = next((sizes for sizes in wanted if within(*sizes)), needed)
        try:
            for layer in self._ready():
                layer.grow(*sizes)
        except BaseException:
            # Layers that have grown may have fewer rows than before, if these made room for longer ones.
            self.rows_capacity = min(
                [self.rows_capacity, *(layer.keys.shape[0] for layer in self._ready())]
            )
            raise
        self.rows_capacity, self.capacity = sizes
        for layer in self._ready():
            layer.use_buffers()

    def reserved(self, rows: int, positions: int, position_bytes: int) -> tuple[int, int]:
        """Return for how many rows and positions, of so many bytes in a layer, a layer reserves addresses."""
        longest, most = max(positions, self._longest), ADDRESSES // len(self.layers)
        fitting = most // (longest * position_bytes)
        return (max(rows, min(ROWS, fitting)), longest) if fitting >= rows else (rows, positions)

    @property
    def is_releasable(self) -> bool:
        """Return whether the memory of a single row can be given back to the system, in all layers."""
        return not self.keeps_dropped and all(layer.is_releasable for layer in self._ready())

    def release(self) -> None:
        """If nothing is committed, free all buffers and reset their sizes, which may be too large to allocate."""
        if any(self.lengths):
            return
        self.rows_capacity = self.capacity = 0
        for layer in self._ready():
            layer.release()

    def _ready(self) -> list[KVLayer]:
        return [layer for layer in self.layers if layer.is_initialized]


class KVLayer(CacheLayerMixin):
    """One layer's buffers; the cache has rows and lengths. A layer that uses another layer's entries has no buffers."""

    is_croppable = False  # not by transformers, as each row has its own length
    keys: Tensor  # [rows capacity, G, capacity, D]
    values: Tensor
    both: Tensor | None  # [rows capacity, 2 G, capacity, D] if one buffer holds both
    _wholes: Buffers

    def __init__(self, cache: KVCache, is_sliding: bool) -> None:
        super().__init__()
        self.cache = cache
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values [.., G, N, D] like these."""
        if self.is_initialized:
            return
        try:
            buffers = self._allocated(
                key_states, value_states, self.cache.rows_capacity, self.cache.capacity
            )
        except BaseException:
            self.cache.release()  # earlier layers have buffers
            raise
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self._wholes = buffers
        self.use_buffers()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values) if self.both is None else (self.both,)

    @property
    def is_releasable(self) -> bool:
        """Return whether the memory of a single row can be given back to the system."""
        return all(whole.is_releasable for whole in self._wholes)

    def release_row(self, row: int) -> None:
        """Give a row's memory back to the system. Its entries are zeros afterwards."""
        for whole in self._wholes:
            whole.release(row)

    def take(self, row: int, source: KVLayer, other: int, length: int) -> None:
        """Move the first `length` positions of a row of this or another layer to a row (`Buffer.take`)."""
        for whole, given in zip(self._wholes, source._wholes, strict=True):
            whole.take(row, given, other, length)

    def _allocated(self, keys: Tensor, values: Tensor, rows: int, positions: int) -> Buffers:
        """Return buffers for keys and values like these: one for both if they are of one size."""
        is_one = keys.shape[-1] == values.shape[-1] and keys.shape[-3] == values.shape[-3]
        parts = (
            [(keys, 2 * keys.shape[-3])]
            if is_one
            else [(keys, keys.shape[-3]), (values, values.shape[-3])]
        )
        found = []
        for like, groups in parts:
            size = like.shape[-1]
            more = self.cache.reserved(rows, positions, groups * size * like.element_size())
            found.append(
                new_buffer(like, (rows, groups, positions, size), (more[0], groups, more[1], size))
            )
        return tuple(found)

    def grow(self, rows: int, positions: int) -> None:
        """Make sure of buffers for so many rows and positions, with the committed entries. What is used of them stays
        as it is."""
        if all(whole.holds(rows, positions) for whole in self._wholes):
            return
        wholes = self._allocated(self.keys, self.values, rows, positions)
        for new, old in zip(wholes, self._wholes, strict=True):
            for row, length in enumerate(self.cache.lengths):
                new.whole[row, :, :length] = old.whole[row, :, :length]
        self._wholes = wholes
        self.use_buffers()

    def use_buffers(self) -> None:
        """Set `keys`, `values` and `both` to what the cache uses of the buffers."""
        parts = [
            whole.first(self.cache.rows_capacity, self.cache.capacity) for whole in self._wholes
        ]
        self.both = parts[0] if len(parts) == 1 else None
        self.keys, self.values = parts[0].chunk(2, 1) if len(parts) == 1 else parts
        self.cache.changes += 1
        self.use()

    def release(self) -> None:
        """Free the buffers."""
        super().__init__()
        del self.both, self._keys, self._values, self._wholes
        self.cache.changes += 1

    def use(self) -> None:
        """Set the views of the rows of the present forward."""
        if self.is_initialized:
            self._keys, self._values = (
                self.keys[: self.cache._size],
                self.values[: self.cache._size],
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, G, N, D] where `KVCache.begin` has set; return views [B, G, end, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        if cache._slots is None:
            start, new = cache._start, key_states.shape[2]
            self._keys.narrow(2, start, new).copy_(key_states)
            self._values.narrow(2, start, new).copy_(value_states)
        else:
            slots, rows = cache._slots, cache._row_indexes[cache._size]
            if slots.device != self.keys.device:  # a device map may spread layers
                rows, slots = rows.to(self.keys.device), slots.to(self.keys.device)
            self._keys[rows, :, slots] = key_states.transpose(1, 2)
            self._values[rows, :, slots] = value_states.transpose(1, 2)
        return self._keys.narrow(2, 0, cache._end), self._values.narrow(2, 0, cache._end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache._end, 0

    def get_seq_length(self) -> int:
        return self.cache._start

    def get_max_length(self) -> int:
        return -1


def are_numbers(parts: Iterable[Tensor]) -> bool:
    """Return whether tensors hold neither NaN nor infinities, with one wait for a GPU."""
    # NaN or infinity in a sum persists. Sums of float16 leave its range, so sums are at least float32.
    # On a CPU they make a float32 copy of all that they sum, so they get a piece at a time.
    pieces = [piece for part in parts for piece in part.split(PIECE, -2)]
    # One thread sums usual sizes, because torch's other threads would wait actively between the sums,
    # on cores that others need: beside other work they take as much time as decoding.
    with one_thread(max((piece.numel() for piece in pieces), default=0)):
        sums = [
            piece.sum(dtype=torch.float32 if piece.dtype == torch.float16 else None)
            for piece in pieces
        ]
    # A device map may spread layers.
    return not sums or bool(
        torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all()
    )


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK) * BLOCK
