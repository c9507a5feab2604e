"""Which replica a prompt goes to: the one that has read its beginning before, unless it has too much to do.

Rendezvous hashing: each replica has a weight for each beginning, and the heaviest one gets it. So no state is shared,
and when a replica goes away, only its own prompts move. The bound on loads is that of consistent hashing with bounded
loads (Mirrokni et al., arXiv 1608.01350).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil

FIRST = 64  # tokens of a prompt that choose its replica
BLOCK = 16  # tokens after the last whole block do not count
BOUND = 1.25  # most requests in flight on a replica, over the mean


def beginning(tokens: Sequence[int]) -> bytes:
    """Return what a prompt is routed by: its first whole blocks, up to `FIRST` tokens; all of a prompt that is shorter
    than a block."""
    whole = min(FIRST, len(tokens) // BLOCK * BLOCK) or len(tokens)
    return b"".join(token.to_bytes(4, "little") for token in tokens[:whole])


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """Return replicas for a beginning, the best first. If one goes, the rest keep their order."""

    def weight(name: str) -> tuple[bytes, str]:
        return blake2b(key, digest_size=8, key=blake2b(name.encode(), digest_size=32).digest()).digest(), name

    return sorted(names, key=weight, reverse=True)


def choose(key: bytes, loads: Mapping[str, int], size: int = 1, most: int | None = None) -> str | None:
    """Return the replica for `size` requests of one beginning: the best one that stays within `BOUND` times the mean,
    or else the one with the fewest requests. None if no replica can hold the requests.

    Args:
        loads: requests in flight, by replica.
        most: requests that a replica holds.
    """
    free = [name for name in ranked(key, loads) if most is None or loads[name] + size <= most]
    if not free:
        return None
    bound = ceil(BOUND * (sum(loads.values()) + size) / len(loads))
    within = (name for name in free if loads[name] + size <= bound)
    return next(within, min(free, key=lambda name: loads[name]))
