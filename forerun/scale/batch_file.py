"""The input of a batch job: lines that are requests of OpenAI's batch format, or plain prompts. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONGEST_ID = 512
_ENVELOPE = (
    "custom_id",
    "method",
    "url",
    "body",
)  # keys of OpenAI's format, any of which makes a line one of it


@dataclass(frozen=True)
class Line:
    """A request.

    Attributes:
        number: of its line, from 1.
        custom_id: its name; None for a plain prompt without one.
        body: JSON for the server.
    """

    number: int
    custom_id: str | None
    url: str
    body: bytes


@dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    code: str
    message: str


@dataclass(frozen=True)
class Input:
    """A file that was read once.

    Attributes:
        fingerprint: of all of its bytes.
        numbers: of the lines that are not blank.
    """

    path: Path
    fingerprint: str
    numbers: frozenset[int]

    def lines(self, done: set[int], defaults: Mapping[str, Any]) -> Iterator[Line | BadLine]:
        """Yield the lines that are not `done`, in their order. `defaults`: see `read_line`."""
        ids: dict[str, int] = {}
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number in self.numbers:
                    line = read_line(number, raw, ids, defaults)
                    if number not in done:
                        yield line


def scan(path: Path) -> Input:
    """Read a file once. Raises ValueError if it cannot be read, or has no lines."""
    digest, numbers = sha256(), set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                digest.update(raw)
                if raw.strip():
                    numbers.add(number)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not numbers:
        raise ValueError(f"{path} has no lines")
    return Input(path, digest.hexdigest(), frozenset(numbers))


def read_line(
    number: int, raw: bytes, ids: dict[str, int], defaults: Mapping[str, Any]
) -> Line | BadLine:
    """Return what a line asks for. The server checks the body.

    Args:
        ids: lines by their custom_id, of earlier lines; this line's is added.
        defaults: max_tokens, temperature and seed for bodies without them. The number of the line is added to the
            seed, so that equal prompts get texts of their own.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        where = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        return BadLine(number, None, "invalid_json", f"the line is not JSON{where}")
    custom_id = None
    try:
        if not isinstance(found, dict):
            raise ValueError("the line must be an object")
        name = "custom_id" if any(key in found for key in _ENVELOPE) else "id"
        if (custom_id := _id(found, name)) is not None and (
            first := ids.setdefault(custom_id, number)
        ) != number:
            message = f"{name} {ascii(custom_id)[:80]} stands on line {first} already"
            return BadLine(number, None, f"duplicate_{name}", message)
        url, body = _plain(found) if name == "id" else _enveloped(found)
        if body.get("stream"):
            raise ValueError("stream is not supported in a batch")
    except ValueError as error:
        return BadLine(number, custom_id, "invalid_line", str(error))
    return Line(number, custom_id, url, json.dumps(_fill_in(body, number, defaults)).encode())


def _id(found: dict[str, Any], name: str) -> str | None:
    id = found.get(name)
    if id is not None and not (isinstance(id, str) and 0 < len(id) <= LONGEST_ID):
        raise ValueError(f"{name} must be a string of 1 to {LONGEST_ID} characters")
    return id


def _plain(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if ("prompt" in found) == ("messages" in found):
        raise ValueError(
            "the line must have prompt or messages, or custom_id, method, url and body"
        )
    return CHAT if "messages" in found else COMPLETION, {
        key: each for key, each in found.items() if key != "id"
    }


def _enveloped(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    for key in _ENVELOPE:
        if found.get(key) is None:
            raise ValueError(f"{key} is missing")
    for key, allowed in (("method", ("POST",)), ("url", (CHAT, COMPLETION))):
        if found[key] not in allowed:
            raise ValueError(f"{key} must be {' or '.join(allowed)}, not {ascii(found[key])[:80]}")
    if not isinstance(found["body"], dict):
        raise ValueError("body must be an object")
    return found["url"], found["body"]


def _fill_in(body: dict[str, Any], number: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    missing = {name: value for name, value in defaults.items() if name not in given}
    if "seed" in missing:
        missing["seed"] = (missing["seed"] + number) % 2**62
    return body | missing
