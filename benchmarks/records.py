"""The lines of a run's records.jsonl, read again."""

from __future__ import annotations

import json
from typing import Any

from forerun.bench.records import Record, Times
from forerun.engine.stats import Stats


def parse(line: str) -> Record:
    """Return the record of a line."""
    entry = json.loads(line)
    stats: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry["stats"].items()
    }
    times = Times(**entry["times"]) if entry["times"] is not None else None
    return Record(**entry | {"stats": Stats(**stats), "times": times})
