"""Requests of soak.py that a server should refuse, and the greedy answers that it should give."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import httpx

from benchmarks.serving.servers import questions
from forerun.files import home, write_text

CHAT_PATH = "/v1/chat/completions"
REQUEST: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
LONGEST_ERROR = 4096  # bytes of an answer that refuses a request
WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": -3},
    {"max_tokens": 1e300},
    {"temperature": "warm"},
    {"n": 10**9},
    {"top_p": -3},
    {"stop": ["x" * 5000]},
    {"logit_bias": {str(token): 1 for token in range(5000)}},
    {"logit_bias": {"a": 1}},
    {"model": "no-such-model"},
    {"tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x" * 2_000_000}]},
)
BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"\x00\xff\xfe",
    b"[" * 100_000 + b"]" * 100_000,
    b"null",
    b'{"messages": "hello"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "nobody", "content": "x"}]}',
    *(json.dumps(REQUEST | fields).encode() for fields in WRONG_FIELDS),
)
RAW: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    # The client leaves in the middle of the body.
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
)


async def send(client: httpx.AsyncClient, url: str, number: int) -> str:
    """Send the piece of rubbish of that number.

    Returns:
        What was wrong with the answer; empty if the piece was refused as it should be.

    Raises:
        httpx.TransportError, OSError: nobody listens.
    """
    number %= len(BODIES) + len(RAW)
    if number < len(BODIES):
        return await _send_body(client, url, number)
    return await _send_raw(url, number - len(BODIES))


async def _send_body(client: httpx.AsyncClient, url: str, number: int) -> str:
    headers = {"content-type": "application/json"}
    answer = await client.post(url + CHAT_PATH, content=BODIES[number], headers=headers)
    if answer.status_code == 503:  # the server is starting
        raise httpx.ReadError("status 503")
    is_short = len(answer.content) < LONGEST_ERROR
    if 400 <= answer.status_code < 500 and "error" in answer.json() and is_short:
        return ""
    return f"body {number}: status {answer.status_code}, {len(answer.content)} bytes"


async def _send_raw(url: str, number: int) -> str:
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(RAW[number])
    await writer.drain()
    first = b""
    with suppress(TimeoutError, OSError):
        first = await asyncio.wait_for(reader.read(100), 1)
    writer.close()
    return f"raw bytes {number}: {first[:40]!r}" if first.startswith(b"HTTP/1.1 5") else ""


def reference(lengths: Sequence[int]) -> dict[str, list[str]]:
    """Return greedy answers to the questions by `decoder.chat`, one at a time, by length.

    They are kept in a file.
    """
    name = sha256(json.dumps([questions(), list(lengths)]).encode()).hexdigest()[:12]
    path = home() / "runs" / f"soak-reference-{name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    from forerun.api.load import load

    decoder = load("smollm2", method="ar")
    answers: dict[str, list[str]] = {}
    for length in lengths:
        answers[str(length)] = [
            decoder.chat([{"role": "user", "content": text}], max_new_tokens=length).text
            for text in questions()
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(answers))
    return answers
