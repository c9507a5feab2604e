"""What the clients of soak.py send that a server should refuse, and the greedy answers that they should get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import httpx

from benchmarks.serving.servers import questions
from forerun.files import home, write_text

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}

BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"\x00\xff\xfe",
    b"[" * 100_000 + b"]" * 100_000,
    b"null",
    b'{"messages": "hello"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "nobody", "content": "x"}]}',
    *(
        json.dumps(ASK | wrong).encode()
        for wrong in (
            {"max_tokens": -1},
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
    ),
)
RAW: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",  # and away
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
)


async def send(client: httpx.AsyncClient, url: str, number: int) -> str:
    """Sends the piece of that number; what was wrong with the answer, empty where it was refused as it should be.

    Raises httpx.TransportError and OSError where nobody listens.
    """
    number %= len(BODIES) + len(RAW)
    if number < len(BODIES):
        answer = await client.post(
            url + CHAT, content=BODIES[number], headers={"content-type": "application/json"}
        )
        if answer.status_code == 503:  # it is starting
            raise httpx.ReadError("status 503")
        is_right = (
            400 <= answer.status_code < 500
            and "error" in answer.json()
            and len(answer.content) < 4096
        )
        return (
            ""
            if is_right
            else f"body {number}: status {answer.status_code}, {len(answer.content)} bytes"
        )
    at = httpx.URL(url)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(RAW[number - len(BODIES)])
    await writer.drain()
    try:
        first = await asyncio.wait_for(reader.read(100), 1)
    except TimeoutError:
        first = b""
    except OSError:
        first = b""
    writer.close()
    return "" if not first.startswith(b"HTTP/1.1 5") else f"raw bytes {number}: {first[:40]!r}"


def reference(lengths: Sequence[int]) -> dict[str, list[str]]:
    """Greedy answers to the questions by `decoder.chat`, one at a time, by length. Kept in a file."""
    name = sha256(json.dumps([questions(), list(lengths)]).encode()).hexdigest()[:12]
    path = home() / "runs" / f"soak-reference-{name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    from forerun.api.load import load

    decoder = load("smollm2", method="ar")
    talks = [[{"role": "user", "content": text}] for text in questions()]
    found = {
        str(most): [decoder.chat(talk, max_new_tokens=most).text for talk in talks]
        for most in lengths
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found))
    return found
