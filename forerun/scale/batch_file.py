"""The input of a batch job: lines that are requests of OpenAI's batch format, or plain prompts.

This module does not need torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MAX_CUSTOM_ID = 512  # characters
# The keys of OpenAI's format. A line that has one of them must have all of them.
_ENVELOPE = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """A request.

    Attributes:
        number: the number of its line, from 1.
        custom_id: its name; None for a plain prompt without one.
        url: the path of the endpoint that answers it.
        body: the JSON that the server gets.
    """

    number: int
    custom_id: str | None
    url: str
    body: bytes


@dataclass(frozen=True)
class BadLine:
    """A line that is not a request, and the reason."""

    number: int
    custom_id: str | None
    code: str
    message: str


@dataclass(frozen=True)
class Input:
    """A file that was read once.

    Attributes:
        fingerprint: the SHA-256 digest of all of its bytes.
        numbers: the numbers of the lines that are not blank.
    """

    path: Path
    fingerprint: str
    numbers: frozenset[int]

    def lines(self, done: set[int], defaults: Mapping[str, Any]) -> Iterator[Line | BadLine]:
        """Yield the lines whose numbers are not in `done`, in order.

        `defaults` are those of `read_line`. Lines that are done are read all the same, because no
        later line may have the id of one of them.
        """
        ids: dict[str, int] = {}
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number in self.numbers:
                    line = read_line(number, raw, ids, defaults)
                    if number not in done:
                        yield line


def scan(path: Path) -> Input:
    """Read a file once. Raises ValueError if it cannot be read, or has no lines."""
    digest = sha256()
    numbers = set()
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
    """Return the request of a line. The server checks its body.

    Args:
        number: the number of the line, from 1.
        raw: the bytes of the line.
        ids: the ids of earlier lines and the numbers of these lines. The id of this line is added.
        defaults: max_tokens, temperature and seed for bodies without them. The number of the line
            is added to the seed, so that equal prompts get different samples.
    """
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        place = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        return BadLine(number, None, "invalid_json", f"the line is not JSON{place}")
    custom_id = None
    try:
        if not isinstance(record, dict):
            raise ValueError("the line must be an object")
        is_enveloped = any(key in record for key in _ENVELOPE)
        name = "custom_id" if is_enveloped else "id"
        custom_id = _id(record, name)
        if custom_id is not None and ids.setdefault(custom_id, number) != number:
            # The bad line gets no custom_id, because the id belongs to the earlier line's record.
            message = f"{name} {ascii(custom_id)[:80]} was used on line {ids[custom_id]} already"
            return BadLine(number, None, f"duplicate_{name}", message)
        url, body = _enveloped(record) if is_enveloped else _plain(record)
        if body.get("stream"):
            raise ValueError("stream is not supported in a batch")
    except ValueError as error:
        return BadLine(number, custom_id, "invalid_line", str(error))
    return Line(number, custom_id, url, json.dumps(_fill_in(body, number, defaults)).encode())


def _id(record: dict[str, Any], name: str) -> str | None:
    id = record.get(name)
    if id is None:
        return None
    if not isinstance(id, str) or not 0 < len(id) <= MAX_CUSTOM_ID:
        raise ValueError(f"{name} must be a string of 1 to {MAX_CUSTOM_ID} characters")
    return id


def _plain(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the url and the body of a plain prompt. Raises ValueError."""
    if ("prompt" in record) == ("messages" in record):
        raise ValueError(
            "the line must have prompt or messages, or custom_id, method, url and body"
        )
    body = {key: value for key, value in record.items() if key != "id"}
    return CHAT if "messages" in record else COMPLETION, body


def _enveloped(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the url and the body of a line in OpenAI's format. Raises ValueError."""
    for key in _ENVELOPE:
        if record.get(key) is None:
            raise ValueError(f"{key} is missing")
    for key, allowed in (("method", ("POST",)), ("url", (CHAT, COMPLETION))):
        if record[key] not in allowed:
            raise ValueError(f"{key} must be {' or '.join(allowed)}, not {ascii(record[key])[:80]}")
    if not isinstance(record["body"], dict):
        raise ValueError("body must be an object")
    return record["url"], record["body"]


def _fill_in(body: dict[str, Any], number: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with the defaults for what it lacks; null counts as absent."""
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    missing = {name: value for name, value in defaults.items() if name not in given}
    if "seed" in missing:
        missing["seed"] = (missing["seed"] + number) % 2**62
    return body | missing
