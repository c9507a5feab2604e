"""Which prompt is read next, of several that are read in turns."""

from __future__ import annotations

from collections import abc
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.engine.sequence import Sequence

MAX_READINGS = 8  # prompts at once, because each keeps its keys and values apart until it is read


class Chunk(NamedTuple):
    """What has been read of a prompt at once.

    Attributes:
        size: its number of tokens; 0 for other work, such as the copy of a layer.
        left: the number of tokens that are yet to be read, at most.
        is_copying: whether the next piece of work is such a copy.
        position: the number of tokens that have been read by the model that read them.
    """

    size: int
    left: int
    is_copying: bool = False
    position: int = 0


@dataclass(eq=False)
class Reading:
    """A prompt that the models read, in chunks.

    Attributes:
        seq: its sequence.
        chunks: reads a chunk whenever it is advanced.
        reserve: positions of keys and values that the sequence will need.
        left: the number of tokens that are yet to be read, at most: by the target, and then by the
            drafter.
        is_copying: whether its next piece of work is a copy of a layer, which takes little time.
        position: the number of tokens that have been read, by the target or by the drafter.
        has_begun: whether it has had a chunk.
        alike: earlier readings, and with how many tokens of theirs this prompt begins.
    """

    seq: Sequence
    chunks: Generator[Chunk, None, None]
    reserve: int
    left: int
    is_copying: bool = False
    position: int = 0
    has_begun: bool = False
    alike: list[tuple[Reading, int]] = field(default_factory=list)


class PrefillRates:
    """How many tokens of a prompt are read per second, by how many have been read before.

    The more have been read, the longer the next one takes, because it sees all before it. The last
    measurement is kept for each range of positions between two powers of two.
    """

    def __init__(self, first: float) -> None:
        """Begin with a rate, in tokens per second, for as long as none is measured."""
        self._first = first
        self._measured: dict[int, float] = {}  # by the number of bits of a position

    def measure(self, position: int, tokens: int, seconds: float) -> None:
        """Learn from a chunk that was read from a position on."""
        self._measured[position.bit_length()] = tokens / max(seconds, 1e-9)

    def at(self, position: int) -> float:
        """Return the rate from a position on, or the one that was measured nearest to it."""
        bits = position.bit_length()
        nearest = min(self._measured, key=lambda known: (abs(known - bits), known), default=None)
        return self._first if nearest is None else self._measured[nearest]


class Readings:
    """The prompts that are read, each a chunk at a time.

    The prompt with the fewest tokens left and the one that came first share the time for chunks:
    the former so that a short one need not wait for a long one, the latter so that each comes to
    its end. Several short ones may be read between two chunks of a long one, because they take
    less time than a chunk. Where one has been alone, others have the time of a chunk before it.

    A prompt that begins like an earlier one waits for it if that is no longer than twice what both
    have in common: what is read once need not be read again.

    An interrupt at any point must not lose a sequence, so each is in `Scheduler.admitted` too.
    """

    def __init__(self) -> None:
        self._readings: list[Reading] = []
        # How many turns others may have before the first prompt has the next one, at most 1.
        self._credit = 1.0

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def seqs(self) -> list[Sequence]:
        """Return the sequences, in the order in which they came."""
        return [reading.seq for reading in self._readings]

    @property
    def reserve(self) -> int:
        """Return the largest number of positions that one of them will need."""
        return max((reading.reserve for reading in self._readings), default=0)

    def add(self, reading: Reading) -> None:
        """Begin to give turns to a prompt."""
        for other in self._readings:
            if other.seq.request.cache_salt == reading.seq.request.cache_salt:
                shared = _common(other.seq.tokens, reading.seq.tokens)
                reading.alike.append((other, shared))
        self._readings.append(reading)

    def next(self) -> Reading:
        """Return the prompt whose turn it is. There is at least one."""
        able = [reading for reading in self._readings if not self._waits(reading)]
        if self._credit > 0:
            return min(able, key=lambda reading: reading.left)
        return able[0]

    def count(self, reading: Reading, chunk: Chunk, turns: float) -> None:
        """Count what `next` returned as read by a chunk.

        Args:
            reading: the prompt.
            chunk: what has been read.
            turns: the time that it took, as a part of the time for a whole chunk.
        """
        if len(self._readings) == 1:
            self._credit = 1.0
        else:
            self._give(turns if reading is self._readings[0] else -turns)
        reading.has_begun = True
        reading.left = chunk.left
        reading.is_copying = chunk.is_copying
        reading.position = chunk.position

    def count_early_step(self, turns: float) -> None:
        """Count the rest of a turn, which nobody had so that a newcomer gets its first step early.

        It counts for the newcomer. If not, many of them could keep the first prompt waiting.
        """
        self._give(-turns)

    def _give(self, turns: float) -> None:
        """Add to what others may have. It has bounds, so that nobody waits long for a slow turn."""
        credit = min(max(self._credit + turns, 0.0), 1.0)
        self._credit = round(credit, 6)  # so that parts of a turn add up to it

    def end(self, reading: Reading) -> None:
        """Give no more turns to a prompt, which has been read or failed."""
        self._readings = [other for other in self._readings if other is not reading]
        if not self._readings:
            self._credit = 1.0
        reading.alike.clear()  # which would keep all earlier readings alive
        reading.chunks.close()

    def end_of(self, ids: abc.Set[int]) -> None:
        """Give no more turns to the prompts of some sequences."""
        for reading in list(self._readings):
            if reading.seq.id in ids:
                self.end(reading)

    def clear(self) -> None:
        """Give no more turns to any of them."""
        for reading in self._readings:
            reading.chunks.close()
        self._readings = []
        self._credit = 1.0

    def _waits(self, reading: Reading) -> bool:
        """Return whether a prompt had better wait for an earlier one that begins like it."""
        return not reading.has_begun and any(
            other in self._readings and other.left <= 2 * shared for other, shared in reading.alike
        )


def _common(one: abc.Sequence[int], other: abc.Sequence[int]) -> int:
    """Return the length of the longest common prefix of two texts."""
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count
