"""A KV cache with a row for each sequence, in buffers that outlive the sequences.

Hugging Face models take it in place of their own cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from forerun.model.buffers import Buffer, new_buffer
from forerun.sampling.threads import one_thread

BLOCK = 256  # buffers hold a multiple of this many positions
RESERVED_ROWS = 64  # rows for which addresses are reserved
RESERVED_POSITIONS = 2**15  # positions for which addresses are reserved, if no context is known
ADDRESSES = 2**40  # the most bytes of addresses that a cache reserves
PIECE = 4096  # positions that `are_numbers` sums at a time

# Keys and values [G, n, D] of n positions, by layer; None for layers without buffers.
Stored = list[tuple[Tensor, Tensor] | None]
# The buffers of a layer: one for keys and values together, or one for each.
Buffers = tuple[Buffer, ...]


def positions_within(budget: int, position_bytes: int) -> int:
    """Return how many positions a row alone may have within a budget of bytes."""
    return budget // position_bytes // BLOCK * BLOCK


class KVCache(Cache):
    """Keys and values of sequences, one a row, in buffers [rows capacity, G, capacity, D] by layer.

    A forward writes provisional entries after each row's committed positions. `commit` keeps a
    path of them, and the next forward overwrites the rest. A sliding window is a mask and drops
    nothing, so a rollback only lowers a length. Buffers are allocated when they are first needed,
    and live as long as the cache. A failed allocation raises, and leaves rows, lengths and entries
    as they were.

    On Linux a buffer is a mapping with addresses for `RESERVED_ROWS` rows of the model's whole
    context, and takes memory only as it is written. So it grows in place, and the memory of a
    dropped row goes back to the system. Elsewhere buffers that grow are copied, one layer after
    the other.

    Masks hide other rows' entries, but 0 times NaN is NaN. So a row that is dropped or moved is
    checked once, and zeroed unless all of its keys and values are finite.

    Attributes:
        ids: the sequence of each row in use.
        lengths: committed positions of each row in use.
        rows_capacity, capacity: rows and positions of the buffers, or of those that the first
            forward will allocate.
        budget: limit in bytes of buffers that grow ahead of need; None for no limit.
        keeps_dropped: whether the entries of a dropped row stay until the row is used again, so
            that a caller can look at them.
        changes: how often the keys and values of any layer got other addresses or sizes.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(
        self, layers: int, sliding: Sequence[bool] | None = None, context: int | None = None
    ) -> None:
        """Make a cache without rows or buffers.

        Args:
            layers: number of layers.
            sliding: whether each layer's attention has a window; None if none has.
            context: the most positions of a row; None if unknown.
        """
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.rows_capacity = 0
        self.capacity = 0
        self.changes = 0
        self.budget: int | None = None
        self.keeps_dropped = False
        # A block more than the context, because drafts may stand behind the last position.
        self._longest = _blocks(context or RESERVED_POSITIONS) + BLOCK
        self._rows: dict[int, int] = {}
        self._reserves: list[int] = []
        self._reaches: list[int] = []  # written positions of each row, provisional ones included
        # The present forward: its first `_size` rows. New entries go to `_slots` [B, N], or from
        # the slot `_start` on. Attention gets the first `_end` slots.
        self._size = 0
        self._start = 0
        self._end = 0
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
        """Add an empty row with memory for `reserve` positions.

        Raises ValueError for a sequence with a row.
        """
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
        row = self._rows[id]
        last = len(self.ids) - 1
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
        """Give a row's memory back to the system; if that is impossible, `mend` the row."""
        if not self.is_releasable:
            self.mend(self.ids[row])
            return
        for layer in self._ready():
            layer.release_row(row)

    def mend(self, id: int) -> bool:
        """Zero a row unless all of its entries are finite; return whether they are.

        Provisional entries count too.
        """
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
        """Append the provisional entries `paths[r]` of each sequence, in order, to its row."""
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
        """Copy entries from slot to slot. `moved` [3, n]: rows, sources and places."""
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
        views: Stored = []
        for layer in self.layers:
            if layer.is_initialized:
                views.append((layer.keys[row, :, :length], layer.values[row, :, :length]))
            else:
                views.append(None)
        return views

    def copy_in(self, id: int, stored: Stored, length: int) -> None:
        """Replace a sequence's entries by the first `length` positions of a `view`."""
        for _ in self.copy_in_pieces(id, stored, length):
            pass

    def copy_in_pieces(self, id: int, stored: Stored, length: int) -> Iterator[None]:
        """Do as `copy_in`, a layer at a time.

        The sequence has no positions until the last layer is copied. No other call may change it
        before.
        """
        self.reserve(0, length)
        self.crop_to([id], [0])
        for layer, entry in zip(self.layers, stored, strict=True):
            if entry is not None and length:
                layer.lazy_initialization(*entry)
                row = self._rows[id]
                layer.keys[row, :, :length] = entry[0][:, :length]
                layer.values[row, :, :length] = entry[1][:, :length]
                yield
        self.lengths[self._rows[id]] = length

    def take(self, id: int, source: KVCache, other: int, length: int) -> None:
        """Replace a sequence's entries by the first `length` positions of one in another cache.

        The other sequence loses all of its entries, so that next to nothing takes memory twice
        (`Buffer.take`). `source` must be releasable.
        """
        row = self._rows[id]
        source_row = source.row(other)
        self.reserve(0, length)
        pairs = [
            (layer, given)
            for layer, given in zip(self.layers, source.layers, strict=True)
            if given.is_initialized
        ]
        for layer, given in pairs:  # all allocations come before the first entry that is lost
            layer.lazy_initialization(given.keys, given.values)
        for layer, given in pairs:
            layer.take(row, given, source_row, length)
        self.lengths[row] = length
        # What the other sequence has behind these positions may have come along.
        reach = max(source.lengths[source_row], source._reaches[source_row])
        self._reaches[row] = max(self._reaches[row], reach)
        source._forget_entries(source_row)

    def detach(self, id: int, length: int) -> Stored:
        """Return a sequence's first `length` positions in memory of their own.

        The sequence loses all of its entries, which are moved rather than copied (`Buffer.take`).
        The cache must be releasable. Raises MemoryError.
        """
        row = self._rows[id]
        # All allocations come before the first entry that is lost.
        places = [layer.buffers_of_one_row() for layer in self.layers]
        detached: Stored = [
            layer.detached(place, row, length) if layer.is_initialized else None
            for layer, place in zip(self.layers, places, strict=True)
        ]
        self._forget_entries(row)
        return detached

    def _forget_entries(self, row: int) -> None:
        """Note that a row has lost its entries, and is zeros."""
        self.lengths[row] = 0
        self._reaches[row] = 0

    # Forwards.

    def begin(self, size: int, start: int, end: int, slots: Tensor | None = None) -> None:
        """Prepare a forward of the first `size` rows.

        Args:
            size: B, the number of rows.
            start: the longest length of these rows. Without `slots`, the new entries [B, G, N, D]
                of all rows go to the slots from `start` on.
            end: number of slots that attention gets.
            slots: [B, N] where the new entries go.
        """
        if end > self.capacity or size > self.rows_capacity:
            # The reservation was too small, or there was none.
            self.reserve(size, end)
        self._start = start
        self._end = end
        self._slots = slots
        # Padding may lie in other slots, but consists of its row's own tokens.
        for row, length in enumerate(self.lengths[:size]):
            self._reaches[row] = max(self._reaches[row], length + end - start)
        if size != self._size:
            self._size = size
            for layer in self.layers:
                layer.use()
        if size not in self._row_indexes:
            self._row_indexes[size] = torch.arange(size, device=self._device(slots))[:, None]

    def _device(self, slots: Tensor | None) -> torch.device | None:
        """Return the device of `slots`, or else of the buffers; None without either."""
        if slots is not None:
            return slots.device
        ready = self._ready()
        return ready[0].keys.device if ready else None

    # Memory.

    @property
    def position_bytes(self) -> int | None:
        """Return the bytes of one position of a row in all layers.

        None before the first forward.
        """
        ready = self._ready()
        if not ready:
            return None
        both = [each for layer in ready for each in (layer.keys, layer.values)]
        return sum(each.shape[1] * each.shape[3] * each.element_size() for each in both)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all rows and positions of the buffers.

        Reserved addresses beyond them do not count. On a CPU, memory that was never written is
        not taken from the system.
        """
        return self.rows_capacity * self.capacity * (self.position_bytes or 0)

    def fits(self, rows: int, reserve: int, budget: int, position_bytes: int) -> bool:
        """Return whether one more row of `reserve` positions keeps buffers within a budget.

        Args:
            rows: the first rows, which stay.
            reserve: positions of the new row.
            budget: bytes for all rows, each as long as the longest. It becomes `self.budget`.
            position_bytes: bytes of one position of a row in all layers.
        """
        self.budget = budget
        longest = _blocks(max([reserve, *self._reserves[:rows], *self.lengths[:rows]]))
        return (rows + 1) * longest * position_bytes <= budget

    def reserve(self, rows: int, positions: int) -> None:
        """Grow the buffers to at least so many rows and positions.

        Committed entries stay; provisional ones may be lost. Nothing is allocated before the first
        forward. Raises MemoryError or torch.OutOfMemoryError.
        """
        if rows <= self.rows_capacity and positions <= self.capacity:
            return
        capacities = self._capacities(
            max(rows, len(self.ids)), _blocks(max([positions, *self.lengths]))
        )
        try:
            for layer in self._ready():
                layer.grow(*capacities)
        except BaseException:
            # Layers that have grown may have fewer rows than before, if that made room for longer
            # ones.
            grown_rows = [layer.keys.shape[0] for layer in self._ready()]
            self.rows_capacity = min([self.rows_capacity, *grown_rows])
            raise
        self.rows_capacity, self.capacity = capacities
        for layer in self._ready():
            layer.use_buffers()

    def _capacities(self, rows: int, positions: int) -> tuple[int, int]:
        """Return the rows and positions to allocate, at least those given.

        Rows are rounded up to a power of two, and neither number shrinks, if the budget allows it.
        """
        rounded = 1 << (rows - 1).bit_length()
        ahead = max(rounded, self.rows_capacity), max(positions, self.capacity)
        position_bytes = self.position_bytes or 0
        for wanted in (ahead, (rounded, positions)):
            if self.budget is None or wanted[0] * wanted[1] * position_bytes <= self.budget:
                return wanted
        return rows, positions

    def reserved(self, rows: int, positions: int, position_bytes: int) -> tuple[int, int]:
        """Return for how many rows and positions a layer reserves addresses.

        They are the given numbers if so many rows of full length would take too many addresses.
        `position_bytes`: bytes of one position of a row in the layer.
        """
        longest = max(positions, self._longest)
        most_bytes = ADDRESSES // len(self.layers)
        fitting_rows = most_bytes // (longest * position_bytes)
        if fitting_rows < rows:
            return rows, positions
        return max(rows, min(RESERVED_ROWS, fitting_rows)), longest

    @property
    def is_releasable(self) -> bool:
        """Return whether all layers can give the memory of a single row back to the system."""
        return not self.keeps_dropped and all(layer.is_releasable for layer in self._ready())

    def release(self) -> None:
        """Free all buffers, unless some position is committed.

        The capacities become 0 too, because they may be too large to allocate.
        """
        if any(self.lengths):
            return
        self.rows_capacity = 0
        self.capacity = 0
        for layer in self._ready():
            layer.release()

    def _ready(self) -> list[KVLayer]:
        """Return the layers that have buffers."""
        return [layer for layer in self.layers if layer.is_initialized]


class KVLayer(CacheLayerMixin):
    """One layer's buffers; the cache has rows and lengths.

    A layer that uses another layer's entries has no buffers.

    Attributes:
        keys, values: [rows capacity, G, capacity, D].
        both: [rows capacity, 2 G, capacity, D] if one buffer holds both, else None.
    """

    is_croppable = False  # not by transformers, as each row has its own length
    is_initialized: bool  # whether it has buffers
    # Without buffers these and `_row_keys` and `_row_values` are not there, or None.
    keys: Tensor
    values: Tensor
    dtype: torch.dtype
    device: torch.device
    _row_keys: Tensor  # `keys` of the rows of the present forward
    _row_values: Tensor

    def __init__(self, cache: KVCache, is_sliding: bool) -> None:
        CacheLayerMixin.__init__(self)
        self.cache = cache
        self.is_sliding = is_sliding
        self.both: Tensor | None = None
        self._storage: Buffers = ()

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
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True
        self._storage = buffers
        self.use_buffers()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the used part of each buffer: `both`, or `keys` and `values`."""
        return (self.keys, self.values) if self.both is None else (self.both,)

    @property
    def is_releasable(self) -> bool:
        """Return whether the memory of a single row can be given back to the system."""
        return all(buffer.is_releasable for buffer in self._storage)

    def release_row(self, row: int) -> None:
        """Give a row's memory back to the system. Its entries are zeros afterwards."""
        for buffer in self._storage:
            buffer.release(row)

    def take(self, row: int, source: KVLayer, source_row: int, length: int) -> None:
        """Move the first `length` positions of a row of this or another layer to a row.

        `Buffer.take` says what happens to the source.
        """
        for buffer, given in zip(self._storage, source._storage, strict=True):
            buffer.take(row, given, source_row, length)

    def buffers_of_one_row(self) -> list[Buffer]:
        """Return empty buffers for one row, like the layer's own. Raises MemoryError."""
        return [buffer.of_one_row() for buffer in self._storage]

    def detached(self, places: Sequence[Buffer], row: int, length: int) -> tuple[Tensor, Tensor]:
        """Move a row's first positions to buffers of one row; return keys and values [G, n, D]."""
        for place, buffer in zip(places, self._storage, strict=True):
            place.take(0, buffer, row, length)
        parts = [place.whole[0, :, :length] for place in places]
        keys, values = parts if self.both is None else parts[0].chunk(2)
        return keys, values

    def _allocated(self, keys: Tensor, values: Tensor, rows: int, positions: int) -> Buffers:
        """Return buffers for keys and values like these: one for both if they are of one size."""
        groups = keys.shape[-3]
        if keys.shape[-1] == values.shape[-1] and groups == values.shape[-3]:
            parts = [(keys, 2 * groups)]
        else:
            parts = [(keys, groups), (values, values.shape[-3])]
        buffers = []
        for like, part_groups in parts:
            size = like.shape[-1]
            reserved_rows, reserved_positions = self.cache.reserved(
                rows, positions, part_groups * size * like.element_size()
            )
            shape = rows, part_groups, positions, size
            reserved = reserved_rows, part_groups, reserved_positions, size
            buffers.append(new_buffer(like, shape, reserved))
        return tuple(buffers)

    def grow(self, rows: int, positions: int) -> None:
        """Replace buffers that are too small for so many rows and positions.

        Committed entries are copied. `keys` and `values` keep their sizes until `use_buffers`.
        """
        if all(buffer.holds(rows, positions) for buffer in self._storage):
            return
        buffers = self._allocated(self.keys, self.values, rows, positions)
        for new, old in zip(buffers, self._storage, strict=True):
            for row, length in enumerate(self.cache.lengths):
                new.whole[row, :, :length] = old.whole[row, :, :length]
        self._storage = buffers
        self.use_buffers()

    def use_buffers(self) -> None:
        """Set `keys`, `values` and `both` to what the cache uses of the buffers."""
        rows = self.cache.rows_capacity
        positions = self.cache.capacity
        parts = [buffer.first(rows, positions) for buffer in self._storage]
        self.both = parts[0] if len(parts) == 1 else None
        self.keys, self.values = parts if self.both is None else self.both.chunk(2, 1)
        self.cache.changes += 1
        self.use()

    def release(self) -> None:
        """Free the buffers."""
        CacheLayerMixin.__init__(self)  # which removes `keys` and `values`
        self.both = None
        self._storage = ()
        del self._row_keys, self._row_values
        self.cache.changes += 1

    def use(self) -> None:
        """Set the views of the rows of the present forward."""
        if self.is_initialized:
            self._row_keys = self.keys[: self.cache._size]
            self._row_values = self.values[: self.cache._size]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, G, N, D] where `KVCache.begin` has set.

        Returns views [B, G, end, D] of all keys and values that attention gets.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        if cache._slots is None:
            new = key_states.shape[2]
            self._row_keys.narrow(2, cache._start, new).copy_(key_states)
            self._row_values.narrow(2, cache._start, new).copy_(value_states)
        else:
            slots = cache._slots
            rows = cache._row_indexes[cache._size]
            if slots.device != self.keys.device:  # a device map may spread layers
                rows = rows.to(self.keys.device)
                slots = slots.to(self.keys.device)
            self._row_keys[rows, :, slots] = key_states.transpose(1, 2)
            self._row_values[rows, :, slots] = value_states.transpose(1, 2)
        return self._row_keys.narrow(2, 0, cache._end), self._row_values.narrow(2, 0, cache._end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that attention gets, and the first one."""
        return self.cache._end, 0

    def get_seq_length(self) -> int:
        """Return the longest length of the rows of the present forward."""
        return self.cache._start

    def get_max_length(self) -> int:
        """Return -1, which stands for no bound."""
        return -1


def parts_of(stored: Stored) -> list[Tensor]:
    """Return the keys and the values of all layers in one list."""
    return [part for pair in stored if pair is not None for part in pair]


def are_numbers(parts: Iterable[Tensor]) -> bool:
    """Return whether tensors hold neither NaN nor infinities, with one wait for a GPU."""
    # NaN or infinity in a sum persists. Sums of float16 would overflow, so they are float32.
    # On a CPU torch makes a float32 copy of all that it sums, so it gets a piece at a time.
    pieces = [piece for part in parts for piece in part.split(PIECE, -2)]
    # One thread sums usual sizes, because torch's other threads would wait actively between the
    # sums, on cores that others need: beside other work they take as much time as decoding.
    with one_thread(max((piece.numel() for piece in pieces), default=0)):
        sums = [
            piece.sum(dtype=torch.float32 if piece.dtype == torch.float16 else None)
            for piece in pieces
        ]
    if not sums:
        return True
    # A device map may spread layers.
    device = sums[0].device
    return bool(torch.stack([total.to(device) for total in sums]).isfinite().all())


def _blocks(positions: int) -> int:
    """Round up to whole blocks."""
    return -(-positions // BLOCK) * BLOCK
