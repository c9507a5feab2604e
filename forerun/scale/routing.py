"""Which replica a prompt goes to: that which has read its beginning before, unless it has too much to do.

Rendezvous hashing: each replica has a weight for each beginning, and the heaviest one gets it. Nobody has to remember
or to tell the others anything, and a replica that goes away takes nobody else's prompts along. The bound on loads is
that of consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil

FIRST = 64  # tokens of a prompt that choose its replica
BLOCK = 16  # what stands behind the last whole block does not count
BOUND = 1.25  # times the mean of what is in flight is what a replica may have


def beginning(tokens: Sequence[int]) -> bytes:
    """What a prompt is routed by: its first whole blocks, up to `FIRST` tokens; all of it where it is shorter than a
    block."""
    whole = min(FIRST, len(tokens) // BLOCK * BLOCK) or len(tokens)
    return b"".join(token.to_bytes(4, "little") for token in tokens[:whole])


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """Replicas for a beginning, the best first. Without one of them, the others keep their order."""

    def weight(name: str) -> tuple[bytes, str]:
        return blake2b(key, digest_size=8, key=blake2b(name.encode(), digest_size=32).digest()).digest(), name

    return sorted(names, key=weight, reverse=True)


def choose(key: bytes, loads: Mapping[str, int], size: int = 1, most: int | None = None) -> str | None:
    """The replica for `size` requests of one beginning.

    The best one that does not come above `BOUND` times the mean with them; where none stays below, the one with least
    to do. None where there is no replica, or none of them can hold the requests.

    Args:
        loads: requests in flight, by the names of the replicas that there are.
        most: requests that a replica holds.
    """
    free = [name for name in ranked(key, loads) if most is None or loads[name] + size <= most]
    if not free:
        return None
    bound = ceil(BOUND * (sum(loads.values()) + size) / len(loads))
    within = (name for name in free if loads[name] + size <= bound)
    return next(within, min(free, key=lambda name: loads[name]))
