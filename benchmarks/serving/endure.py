"""Does a server that answers thousands of requests of all kinds keep its memory, files and threads?

    python -m benchmarks.serving.endure [--target embedded] [--requests 2000] [--clients 8]
        [--out JSON]

Of ten requests three are left: one at once, two in mid-stream. The others are chats, completions,
streams, schemas, tools, several choices, log probabilities, embeddings, and requests in the forms
of Anthropic's and Ollama's APIs. After each hundred the script waits until the server rests, and
then notes its resident and its own memory, its file descriptors and its threads.

The embedded pair gets a chat template, which it lacks.

`growth` compares the end with the state after SETTLED requests, as a share, and `holds` says
whether memory and files have grown by at most 5 %. `bytes_per_request` is the slope of the own
memory over the second half, by least squares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.serving.servers import System, end_on_signals, gauges, questions, report, started
from forerun.api.loading import load_model, load_tokenizer
from forerun.zoo.known import EMBEDDED

EVERY = 100  # requests between two samples
SETTLED = 200  # requests after which memory must not grow any more
MOST_GROWTH = 0.05
TIMEOUT = 600.0
REST_SECONDS = 60.0  # until a server without clients must rest
PAUSE = 0.05  # seconds between two looks at whether it rests
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOL = {"name": "weather", "description": "The weather of a place.", "parameters": SCHEMA}


@dataclass(frozen=True)
class Message:
    """What a client sends, and how it reads the answer.

    Attributes:
        kind: the name under which its outcome is counted.
        path: of the URL.
        body: of the request.
        leaves_after: lines of the answer after which the client leaves; None for never.
    """

    kind: str
    path: str
    body: dict[str, Any]
    leaves_after: int | None = None


def chat(text: str, length: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": length, **fields}


def _schema(name: str) -> dict[str, Any]:
    # The name makes each second form a new one, which no cache has.
    schema = SCHEMA | {"title": name}
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


def _tools(text: str, length: int) -> dict[str, Any]:
    tools = [{"type": "function", "function": TOOL}]
    return chat(text, length, tools=tools, tool_choice="required")


# What requests of each kind are: the path, and the body from a text and a number of tokens.
KINDS: dict[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", chat),
    "stream": ("/v1/chat/completions", lambda text, n: chat(text, n, stream=True)),
    "sampled": ("/v1/chat/completions", lambda text, n: chat(text, n, temperature=1.0, seed=n)),
    "choices": ("/v1/chat/completions", lambda text, n: chat(text, n, n=4, temperature=0.8)),
    "logprobs": (
        "/v1/chat/completions",
        lambda text, n: chat(text, n, logprobs=True, top_logprobs=5),
    ),
    "schema": (
        "/v1/chat/completions",
        lambda text, n: chat(text, n, response_format=_schema(text[: n % 2])),
    ),
    "new schema": (
        "/v1/chat/completions",
        lambda text, n: chat(text, n, response_format=_schema(text)),
    ),
    "tools": ("/v1/chat/completions", _tools),
    "completion": ("/v1/completions", lambda text, n: {"prompt": text, "max_tokens": n}),
    "echo": (
        "/v1/completions",
        lambda text, n: {"prompt": text, "max_tokens": n, "echo": True, "logprobs": 2},
    ),
    "responses": ("/v1/responses", lambda text, n: {"input": text, "max_output_tokens": n}),
    "anthropic": ("/v1/messages", chat),
    "ollama chat": (
        "/api/chat",
        lambda text, n: {
            "messages": [{"role": "user", "content": text}],
            "options": {"num_predict": n},
        },
    ),
    "ollama text": (
        "/api/generate",
        lambda text, n: {"prompt": text, "options": {"num_predict": n}},
    ),
    "embeddings": ("/v1/embeddings", lambda text, n: {"input": [text, text[:n]]}),
    "refused": ("/v1/chat/completions", lambda text, n: chat(text, n, temperature=-n)),
}


def message(number: int, texts: list[str]) -> Message:
    """Return the request of a number, which decides all about it."""
    chance = random.Random(number)
    text = f"{number}. {chance.choice(texts)}"
    if chance.random() < 0.2:
        text = " ".join([text, *chance.choices(texts, k=chance.randrange(1, 8))])
    length = chance.randrange(4, 40)
    place = number % 10
    if place == 0:
        return Message("leaves at once", "/v1/chat/completions", chat(text, 200), 0)
    if place in (3, 6):
        body = chat(text, 200, stream=True)
        return Message("leaves", "/v1/chat/completions", body, chance.randrange(2, 20))
    kind = chance.choice(list(KINDS))
    path, body_of = KINDS[kind]
    return Message(kind, path, body_of(text, length))


def chat_pair(folder: Path) -> tuple[str, ...]:
    """Save the embedded pair with a chat template, and return the options that name it."""
    tokenizer = load_tokenizer(EMBEDDED)
    tokenizer.chat_template = TEMPLATE
    options = []
    for part in ("target", "draft"):
        load_model(EMBEDDED, part, plain=True).save_pretrained(folder / part)
        tokenizer.save_pretrained(folder / part)
        options += [f"--{part}", str(folder / part)]
    return tuple(options)


async def send(client: httpx.AsyncClient, given: Message) -> str:
    """Send a request, and return what became of it."""
    if given.leaves_after == 0:
        asking = asyncio.create_task(client.post(given.path, json=given.body))
        await asyncio.sleep(PAUSE)
        if not asking.cancel():
            return "answered before it left"
        return "left"
    lines = 0
    async with client.stream("POST", given.path, json=given.body) as answer:
        async for _ in answer.aiter_lines():
            lines += 1
            if lines == given.leaves_after:
                return "left"
    return str(answer.status_code)


async def send_all(
    url: str, numbers: range, clients: int, texts: list[str], outcomes: Counter[str]
) -> None:
    """Send the requests of these numbers, from so many clients at a time, and count outcomes."""
    remaining = iter(numbers)

    async def ask(client: httpx.AsyncClient) -> None:
        for number in remaining:
            given = message(number, texts)
            outcomes[f"{given.kind}: {await send(client, given)}"] += 1

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(clients)))


async def until_rest(url: str) -> None:
    """Wait until a server has no requests. Raises TimeoutError."""
    async with asyncio.timeout(REST_SECONDS):
        while True:
            seen = await asyncio.to_thread(gauges, url)
            if seen and not seen["num_requests_running"] and not seen["num_requests_waiting"]:
                return
            await asyncio.sleep(PAUSE)


def sample(process: psutil.Process, number: int) -> dict[str, int]:
    """Return what a process holds after so many requests."""
    memory = process.memory_full_info()
    return {
        "requests": number,
        "rss": memory.rss,
        "uss": memory.uss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
    }


async def measured(
    process: psutil.Process, url: str, requests: int, clients: int
) -> dict[str, Any]:
    """Return the samples of a server while it answers so many requests."""
    texts = questions()
    outcomes: Counter[str] = Counter()
    samples = [sample(process, 0)]
    for begin in range(0, requests, EVERY):
        numbers = range(begin, min(begin + EVERY, requests))
        await send_all(url, numbers, clients, texts, outcomes)
        await until_rest(url)
        samples.append(sample(process, numbers.stop))
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    return {"samples": samples, "outcomes": dict(sorted(outcomes.items()))}


def summary(samples: list[dict[str, int]]) -> dict[str, Any]:
    """Return how much a server has grown since it had settled."""
    settled = next(reading for reading in samples if reading["requests"] >= SETTLED)
    last = samples[-1]
    growth = {name: last[name] / settled[name] - 1 for name in settled if name != "requests"}
    late = samples[len(samples) // 2 :]
    slope = linear_regression(
        [reading["requests"] for reading in late], [reading["uss"] for reading in late]
    ).slope
    return {
        "growth": {name: round(share, 4) for name, share in growth.items()},
        "bytes_per_request": round(slope, 1),
        "holds": all(growth[name] <= MOST_GROWTH for name in ("rss", "uss", "files")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.requests <= 2 * SETTLED:
        parser.error(f"--requests must be above {2 * SETTLED}")
    end_on_signals()

    with TemporaryDirectory(prefix="forerun-endure-") as folder:
        log = Path(folder) / "log"
        models = ("--target", args.target)
        if args.target == EMBEDDED:
            models = chat_pair(Path(folder))
        command = (sys.executable, "-m", "forerun", "serve", *models, "--log-level", "warning")
        server = System("forerun", command)
        with started(server, sorted(os.sched_getaffinity(0)), log) as (running, url):
            process = psutil.Process(running.pid)
            results = asyncio.run(measured(process, url, args.requests, args.clients))
        results["log"] = log.read_text(errors="replace").splitlines()[-20:]
    report(results | summary(results["samples"]), args)


if __name__ == "__main__":
    main()
