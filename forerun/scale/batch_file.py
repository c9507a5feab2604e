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
_ENVELOPE = ("custom_id", "method", "url", "body")  # keys of OpenAI's format, any of which makes a line one of it


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


def read_line(number: int, raw: bytes, ids: dict[str, int], defaults: Mapping[str, Any]) -> Line | BadLine:
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
    if not isinstance(found, dict):
        return BadLine(number, None, "invalid_line", "the line must be an object")
    is_plain = not any(key in found for key in _ENVELOPE)
    name = "id" if is_plain else "custom_id"
    custom_id = found.get(name)
    if custom_id is not None:
        if not (isinstance(custom_id, str) and 0 < len(custom_id) <= LONGEST_ID):
            return BadLine(number, None, f"invalid_{name}", f"{name} must be a string of 1 to {LONGEST_ID} characters")
        first = ids.setdefault(custom_id, number)
        if first != number:
            message = f"{name} {ascii(custom_id)[:80]} stands on line {first} already"
            return BadLine(number, None, f"duplicate_{name}", message)
    if is_plain:
        url = CHAT if "messages" in found else COMPLETION
        found = {"url": url, "body": {key: value for key, value in found.items() if key != "id"}}
    if (wrong := _wrong(found, is_plain)) is not None:
        return BadLine(number, custom_id, *wrong)
    return Line(number, custom_id, found["url"], json.dumps(_fill_in(found["body"], number, defaults)).encode())


def _wrong(found: dict[str, Any], is_plain: bool) -> tuple[str, str] | None:
    """Return the code and message of what is wrong with a request, or None."""
    if is_plain:
        if ("prompt" in found["body"]) == ("messages" in found["body"]):
            return "invalid_line", "the line must have prompt or messages, or custom_id, method, url and body"
    else:
        for key in _ENVELOPE:
            if found.get(key) is None:
                return f"missing_{key}", f"{key} is missing"
        for key, allowed in (("method", ("POST",)), ("url", (CHAT, COMPLETION))):
            if found[key] not in allowed:
                return f"invalid_{key}", f"{key} must be {' or '.join(allowed)}, not {ascii(found[key])[:80]}"
        if not isinstance(found["body"], dict):
            return "invalid_body", "body must be an object"
    return ("unsupported_parameter", "stream is not supported in a batch") if found["body"].get("stream") else None


def _fill_in(body: dict[str, Any], number: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with the defaults that it needs."""
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    missing = {name: value for name, value in defaults.items() if name not in given}
    if "seed" in missing:
        missing["seed"] = (missing["seed"] + number) % 2**62
    return body | missing
