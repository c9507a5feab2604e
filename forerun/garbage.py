"""Python's search for garbage: objects that only refer to each other.

All threads wait for a search. Among the 400,000 objects of torch, transformers and a model it takes
a fifth of a second.
"""

from __future__ import annotations

import gc

# Python searches whenever this many objects more were made than freed since the last time. So a
# search among new objects takes a few milliseconds.
THRESHOLD = 10_000


def leave_out_of_searches() -> None:
    """Leave what is there now out of all later searches, because it stays for long."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)


def free_garbage() -> None:
    """Free all garbage, also of what was left out of searches. The next load leaves it out again.

    Not here, because a thread may still hold what is to go, and would then hold it for good.
    """
    gc.unfreeze()
    gc.collect()
