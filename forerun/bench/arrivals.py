"""Recorded arrivals of requests: when they came and how long they were."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
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
    out, others' among them; a request for several answers is so many arrivals. `load`: so many times as many requests
    come in the same time.

    Raises ValueError for a file that is missing, a line that is no arrival where no line is of a log, and a trace of
    nothing.
    """
    if not 0 < load < inf:
        raise ValueError(f"load must be above 0, not {load}")
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the trace {path}: {error}") from None
    read = {number: _object(line) for number, line in enumerate(lines, 1) if line.strip()}
    is_log = any(isinstance(each, dict) and "level" in each for each in read.values())
    found: list[Arrival] = []
    for number, each in read.items():
        try:
            if isinstance(each, ValueError):
                if not is_log:
                    raise each
            elif is_log:
                found += _logged(each)
            else:
                found.append(_checked(each["seconds"], each["prompt_tokens"], each["output_tokens"], each.get("tau")))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} line {number} is no arrival: {reason}") from None
    if not found:
        raise ValueError(f"{path} holds no arrivals")
    begun = min(each.seconds for each in found)
    moved = [Arrival((each.seconds - begun) / load, each.prompt, each.output, each.tau) for each in found]
    return sorted(moved, key=lambda each: each.seconds)


def _object(line: str) -> dict[str, Any] | ValueError:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(str(error))
    return found if isinstance(found, dict) else ValueError("it is no JSON object")


def _logged(line: dict[str, Any]) -> list[Arrival]:
    """The sequences of a request in the server's log, which has the tokens of all; none for other lines."""
    if "level" not in line or "total_ms" not in line or not line.get("tokens"):
        return []
    begun = datetime.strptime(line["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp() - line["total_ms"] / 1000
    whole = _checked(begun, line["prompt"], line["tokens"], line.get("tau"))
    choices, n = line.get("choices", 1), line.get("n", 1)
    for name, value in (("choices", choices), ("n", n)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
    prompt, more = max(1, whole.prompt * n // choices), whole.output % choices
    outputs = [whole.output // choices + (at < more) for at in range(choices)]
    return [replace(whole, prompt=prompt, output=output) for output in outputs if output]


def _checked(seconds: Any, prompt: Any, output: Any, tau: Any) -> Arrival:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not -inf < seconds < inf:
        raise ValueError(f"seconds must be a number, not {seconds!r}")
    for name, value in (("the prompt", prompt), ("the answer", output)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"the tokens of {name} must be an integer of at least 1, not {value!r}")
    if tau is not None and (isinstance(tau, bool) or not isinstance(tau, int | float) or not 1 <= tau < inf):
        raise ValueError(f"tau must be a number of at least 1, not {tau!r}")
    return Arrival(float(seconds), prompt, output, tau)
