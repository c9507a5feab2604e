"""How many replicas a load needs: recorded arrivals, run through engines that are only reckoned.

A request goes to the replica with the fewest in flight. Prefixes that requests share are read anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from typing import Any

from forerun.bench.arrivals import Arrival
from forerun.bench.replica import Engines, Replica

ROWS = (1, 2, 4, 8, 16, 32, 64)
MOST = 4096  # replicas that are tried


@dataclass(frozen=True)
class Figures:
    """What a fleet did with a trace.

    Attributes:
        first_ms, token_ms: 50th and 99th percentiles, over requests, of the time to the first token, and of the time a
            token behind it.
        rows, kv: the most rows of a replica, and positions of keys and values that these reserved.
        busy: the share of the time in which replicas worked.
        per_second: tokens a second of all.
    """

    replicas: int
    first_ms: tuple[float, float]
    token_ms: tuple[float, float]
    rows: int
    kv: int
    busy: float
    per_second: float

    def meets(self, first_ms: float, token_ms: float) -> bool:
        """Whether the 99th percentiles stay within a target."""
        return self.first_ms[1] <= first_ms and self.token_ms[1] <= token_ms


def fleet(trace: Sequence[Arrival], engines: Engines, replicas: int) -> Figures:
    """Runs a trace, in the order of its arrivals, to the end. Raises ValueError for a request that fits no replica."""
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, not {replicas}")
    _check(trace, engines)
    all_ = [Replica(engines) for _ in range(replicas)]
    for arrival in trace:
        for replica in all_:
            replica.run(arrival.seconds)
        min(all_, key=lambda replica: replica.in_flight(arrival.seconds)).add(arrival)
    return _figures(trace, all_)


def alone(trace: Sequence[Arrival], engines: Engines) -> Figures:
    """What a replica for each request does, which no fewer do better. Raises ValueError as `fleet` does."""
    _check(trace, engines)
    all_ = [Replica(engines) for _ in trace]
    for replica, arrival in zip(all_, trace, strict=True):
        replica.add(arrival)
    return _figures(trace, all_)


def _check(trace: Sequence[Arrival], engines: Engines) -> None:
    most = max((arrival.tau or 1.0 for arrival in trace), default=1.0)
    if most > engines.gamma + 1:
        raise ValueError(
            f"the trace says {most:g} tokens a step, more than gamma + 1 = {engines.gamma + 1}: give gamma"
        )


def _figures(trace: Sequence[Arrival], all_: Sequence[Replica]) -> Figures:
    """Runs all requests to their ends."""
    for replica in all_:
        replica.run(inf)
    done = [seq for replica in all_ for seq in replica.done]
    assert len(done) == len(trace) and all(seq.first is not None for seq in done)
    first = [1000 * ((seq.first or 0.0) - seq.arrival.seconds) for seq in done]
    token = [
        1000 * (seq.last - (seq.first or 0.0)) / (seq.arrival.output - 1) for seq in done if seq.arrival.output > 1
    ]
    span = max(seq.last for seq in done) - trace[0].seconds
    return Figures(
        len(all_),
        (percentile(first, 50), percentile(first, 99)),
        (percentile(token or [0.0], 50), percentile(token or [0.0], 99)),
        max(replica.width for replica in all_),
        max(replica.kv for replica in all_),
        round(sum(replica.busy for replica in all_) / (span * len(all_)), 4),
        round(sum(seq.arrival.output for seq in done) / span, 2),
    )


def fewest(trace: Sequence[Arrival], engines: Engines, first_ms: float, token_ms: float) -> Figures | None:
    """The fewest replicas that keep a target, found by doubling and halving. None where no number does."""

    def tried(replicas: int) -> Figures:
        return fleet(trace, engines, replicas)

    if not alone(trace, engines).meets(first_ms, token_ms):
        return None
    most = min(MOST, len(trace))  # then each request is alone, or as good as
    low, high = 0, 1
    while not (best := tried(high)).meets(first_ms, token_ms):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        found = tried(middle)
        low, high, best = (low, middle, found) if found.meets(first_ms, token_ms) else (middle, high, best)
    return best


def plan(
    trace: Sequence[Arrival], engines: Sequence[Engines], first_ms: float, token_ms: float
) -> list[tuple[Engines, Figures | None]]:
    """`fewest` of each kind of engines."""
    for name, value in (("first_ms", first_ms), ("token_ms", token_ms)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
    return [(each, fewest(trace, each, first_ms, token_ms)) for each in engines]


def cheapest(found: Sequence[tuple[Engines, Figures | None]]) -> tuple[Engines, Figures] | None:
    """Of a plan the one with the fewest replicas, then with the least keys and values."""
    met = [(engines, figures) for engines, figures in found if figures is not None]
    return min(met, key=lambda each: (each[1].replicas, each[1].kv)) if met else None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share (in percent) of them does not exceed."""
    ordered = sorted(values)
    return round(ordered[max(0, ceil(share / 100 * len(ordered)) - 1)], 3)


def as_object(engines: Engines, figures: Figures | None) -> dict[str, Any]:
    own = {key: getattr(engines, key) for key in ("rows", "kv", "gamma", "tau", "step_ms")}
    return {"engine": own, "fleet": asdict(figures) if figures is not None else None}
