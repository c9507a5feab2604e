"""Tries of a client, one after the other, each told as a line of JSON.

The scripts beside this file run in environments that have their client and nothing of forerun's, as
`python SCRIPT URL MODEL`. URL is that of the server, without /v1.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

SERVER, MODEL = sys.argv[1:]
URL = f"{SERVER}/v1"
KEY = "none"
HELLO = "Say hello."
WEATHER = "What is the weather in Oslo? Use the tool."
PERSON = "Ada is 36 years old and an engineer."
# For modes that send no schema.
SPELLED = f"{PERSON} Answer with JSON alone: job, which is engineer or teacher, and age."
JOBS = ("engineer", "teacher")
SCHEMA: Any = {  # of PERSON
    "type": "object",
    "properties": {
        "job": {"enum": list(JOBS)},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["job", "age"],
    "additionalProperties": False,
}
TOKENS = 12  # of a plain answer


def run(packages: list[str], tries: Mapping[str, Callable[[], str | None]]) -> None:
    """Run tries, and tell the versions of packages.

    A try raises if it fails. The text that one may return is told too.
    """
    print(json.dumps({"versions": {name: version(name) for name in packages}}), flush=True)
    for name, work in tries.items():
        print(json.dumps({"tried": name} | _outcome(work)), flush=True)


def _outcome(work: Callable[[], str | None]) -> dict[str, object]:
    try:
        return {"passed": True, "text": work()}
    except Exception as error:  # whatever a client raises
        traceback.print_exc()
        return {"passed": False, "text": f"{type(error).__name__}: {error}"[:1000]}


def same(streamed: str, whole: str) -> str:
    """Return an answer that is the same streamed and whole, and not empty."""
    assert whole, "an empty answer"
    assert streamed == whole, f"streamed {streamed!r}, whole {whole!r}"
    return whole


def check_person(job: str, age: int) -> None:
    """Check that the schema of PERSON was kept."""
    assert job in JOBS, job
    assert type(age) is int and 0 <= age <= 150, age


def check_agent(calls: list[object], answer: str) -> None:
    """Check that an agent called the tool of WEATHER and said something after it."""
    assert calls, "no tool was called"
    assert all(call == "Oslo" for call in calls), calls
    assert answer, "no answer after the call"


def check_refusal(error: Exception, status: int | None, wanted: type[Exception]) -> None:
    """Check that a client shows a refusal of its limit as its own error, with our message."""
    assert isinstance(error, wanted), repr(error)
    assert status == 400, status
    assert re.search(r"max_\w*tokens", str(error)), str(error)
