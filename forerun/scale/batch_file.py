"""The input of a batch job: lines that are requests of OpenAI's batch format, or plain prompts. Needs no torch."""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONGEST_ID = 512
_ENVELOPE = ("custom_id", "method", "url", "body")  # keys of OpenAI's format, any of which makes a line one of it


@dataclass(frozen=True)
class Line:
    """A request.

    Attributes:
        number: of its line, from 1.
        custom_id: its name; None where a plain prompt has none.
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
    """A file whose lines were looked at once.

    Attributes:
        fingerprint: of all of its bytes.
        stamp: its size and when it was written.
        numbers, starts: of the lines that are not blank, from 1, and where each begins in the file.
        copies: the line that had a line's custom_id first, for those whose custom_id is not new.
    """

    path: Path
    fingerprint: str
    stamp: tuple[int, int]
    numbers: array[int]
    starts: array[int]
    copies: Mapping[int, int]

    def __len__(self) -> int:
        return len(self.numbers)

    def lines(self, done: set[int], defaults: Mapping[str, Any]) -> Iterator[Line | BadLine]:
        """Those that are not `done`, in their order. `defaults`: see `read_line`.

        Raises ValueError where the file is no longer the one that was looked at.
        """
        with _opened(self.path) as file:
            for number, start in zip(self.numbers, self.starts, strict=True):
                if number in done:
                    continue
                if file.tell() != start:
                    file.seek(start)
                raw = file.readline()
                if _stamp(file) != self.stamp:
                    raise ValueError(f"{self.path} was changed while the job ran; what is answered is kept")
                yield read_line(number, raw, self.copies.get(number), defaults)


def scan(path: Path) -> Input:
    """Looks at every line of a file. Raises ValueError for one that cannot be read, or has no lines."""
    digest, known, copies = sha256(), dict[bytes, int](), dict[int, int]()
    numbers, starts, at = array("Q"), array("Q"), 0
    with _opened(path) as file:
        stamp = _stamp(file)
        for number, raw in enumerate(file, 1):
            digest.update(raw)
            if raw.strip():
                numbers.append(number)
                starts.append(at)
                custom_id = _custom_id(raw)
                if custom_id is not None:
                    key = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                    first = known.setdefault(key, number)
                    if first != number:
                        copies[number] = first
            at += len(raw)
    if not numbers:
        raise ValueError(f"{path} has no lines")
    return Input(path, digest.hexdigest(), stamp, numbers, starts, copies)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path} is no plain file; it is read more than once")
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _stamp(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def read_line(number: int, raw: bytes, copy_of: int | None, defaults: Mapping[str, Any]) -> Line | BadLine:
    """What a line asks for, as far as that can be said without a model: the server looks at the body.

    `copy_of`: the line that has its custom_id already. `defaults`: max_tokens, temperature and seed for bodies that do
    not say; the number of the line is added to the seed, so that equal prompts get texts of their own.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        where = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        return BadLine(number, None, "invalid_json", f"the line is not JSON{where}")
    if not isinstance(found, dict):
        return BadLine(number, None, "invalid_line", f"the line must be an object, not {_kind(found)}")
    is_plain = not any(key in found for key in _ENVELOPE)
    name = "id" if is_plain else "custom_id"
    custom_id = found.get(name)
    if custom_id is not None and not (isinstance(custom_id, str) and 0 < len(custom_id) <= LONGEST_ID):
        return BadLine(number, None, f"invalid_{name}", f"{name} must be a string of 1 to {LONGEST_ID} characters")
    if copy_of is not None:
        message = f"{name} {ascii(custom_id)[:80]} stands on line {copy_of} already"
        return BadLine(number, None, f"duplicate_{name}", message)
    wrong = _wrong_plain(found) if is_plain else _wrong_envelope(found)
    if wrong is not None:
        return BadLine(number, custom_id, *wrong)
    if is_plain:
        url = CHAT if "messages" in found else COMPLETION
        body = {key: value for key, value in found.items() if key != "id"}
    else:
        url, body = found["url"], found["body"]
    if body.get("stream"):
        return BadLine(number, custom_id, "unsupported_parameter", "stream is not supported in a batch")
    return Line(number, custom_id, url, json.dumps(_filled(body, number, defaults)).encode())


def _wrong_plain(found: dict[str, Any]) -> tuple[str, str] | None:
    if ("prompt" in found) == ("messages" in found):
        return "invalid_line", "the line must have prompt or messages, or custom_id, method, url and body"
    return None


def _wrong_envelope(found: dict[str, Any]) -> tuple[str, str] | None:
    for key in _ENVELOPE:
        if found.get(key) is None:
            return f"missing_{key}", f"{key} is missing"
    if found["method"] != "POST":
        return "invalid_method", f"method must be POST, not {ascii(found['method'])[:80]}"
    if found["url"] not in (CHAT, COMPLETION):
        return "invalid_url", f"url must be {CHAT} or {COMPLETION}, not {ascii(found['url'])[:80]}"
    if not isinstance(found["body"], dict):
        return "invalid_body", f"body must be an object, not {_kind(found['body'])}"
    return None


def _filled(body: dict[str, Any], number: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A body with what it does not say."""
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    more = {name: value for name, value in defaults.items() if name not in given}
    if "seed" in more:
        more["seed"] = (more["seed"] + number) % 2**62
    return body | more


def _custom_id(raw: bytes) -> str | None:
    """The name that a line gives itself."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    name = found.get("custom_id" if any(key in found for key in _ENVELOPE) else "id")
    return name if isinstance(name, str) else None


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
