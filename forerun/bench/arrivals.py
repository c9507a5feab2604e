"""Recorded arrivals of requests: when they came and how long they were."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from forerun.files import read_text


@dataclass(frozen=True)
class Arrival:
    """A request: when it came, tokens of its prompt and of its answer, and tokens a step where that is known."""

    seconds: float
    prompt: int
    output: int
    tau: float | None = None


def read_trace(path: Path, load: float = 1.0) -> list[Arrival]:
    """Arrivals, in their order, from a file of JSON lines: {"seconds", "prompt_tokens", "output_tokens"} and perhaps
    "tau", or what `forerun serve --log-json` writes. Of a log, lines about anything but answered requests are left
    out. `load`: so many times as many requests come in the same time.

    Raises ValueError for a file that is missing, a line that is neither, and a trace of nothing.
    """
    if not 0 < load < inf:
        raise ValueError(f"load must be above 0, not {load}")
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the trace {path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = _arrival(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} line {number} is no arrival: {reason}") from None
        if arrival is not None:
            found.append(arrival)
    if not found:
        raise ValueError(f"{path} holds no arrivals")
    begun = min(each.seconds for each in found)
    moved = [Arrival((each.seconds - begun) / load, each.prompt, each.output, each.tau) for each in found]
    return sorted(moved, key=lambda each: each.seconds)


def _arrival(line: dict[str, Any]) -> Arrival | None:
    if "level" in line:  # of the server's log
        if "total_ms" not in line or not line["tokens"]:
            return None
        ended = datetime.strptime(line["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        return _checked(ended - line["total_ms"] / 1000, line["prompt"], line["tokens"], line.get("tau"))
    return _checked(line["seconds"], line["prompt_tokens"], line["output_tokens"], line.get("tau"))


def _checked(seconds: Any, prompt: Any, output: Any, tau: Any) -> Arrival:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not -inf < seconds < inf:
        raise ValueError(f"seconds must be a number, not {seconds!r}")
    for name, value in (("the prompt", prompt), ("the answer", output)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"the tokens of {name} must be an integer of at least 1, not {value!r}")
    if tau is not None and (isinstance(tau, bool) or not isinstance(tau, int | float) or not 1 <= tau < inf):
        raise ValueError(f"tau must be a number of at least 1, not {tau!r}")
    return Arrival(float(seconds), prompt, output, tau)
