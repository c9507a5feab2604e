"""An hour of clients of all kinds, a kill in the middle, and what the server did.

    python -m benchmarks.serving.soak --out FOLDER [--seconds 3600] [--clients 64]

Of ten requests one is left in mid-stream, one is read slowly and one is rubbish. Halfway the server is killed and
started again. Writes FOLDER/soak.json and FOLDER/soak.png. Ends with status 1 where a check fails. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx
import psutil

from benchmarks.serving.load import numbers
from benchmarks.serving.results_page import picture
from benchmarks.serving.servers import (
    System,
    end_on_signals,
    free_port,
    gauges,
    questions,
    start,
    stop,
    system,
    wait_ready,
)
from benchmarks.serving.soak_requests import CHAT, reference, send
from forerun.bench.report import provenance
from forerun.files import write_text

LOST = 700  # seconds without a byte until a request counts as lost: the server's own limit is 600
EVERY = 5  # seconds between samples
SHOWN = (
    "t",
    "rss_mb",
    "num_requests_running",
    "num_requests_waiting",
    "generation_tokens_total",
)  # of a sample
SETTLED = 600  # seconds of a server's life, or a third of it, that its memory may grow in
SMALL = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]  # so that slow readers fill their buffers


@dataclass
class Soak:
    """What goes on, and what was seen. Times are seconds from the start.

    Attributes:
        up: when the server was ready, and when it was not any more, by life.
        outcomes: what became of requests, by kind.
        trouble: a line for each that should not have been.
    """

    wanted: System
    folder: Path
    cores: list[int]
    expected: dict[str, list[str]]
    port: int = field(default_factory=free_port)
    begun: float = field(default_factory=monotonic)
    over: bool = False
    process: subprocess.Popen[bytes] | None = None
    up: list[list[float]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    next_request: int = 0
    compared: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def now(self) -> float:
        return monotonic() - self.begun

    async def launch(self) -> None:
        log = self.folder / "server.log"
        self.process = start(self.wanted, self.port, self.cores, log)
        await asyncio.to_thread(wait_ready, self.process, self.url, log)
        self.up.append([self.now, float("inf")])

    def is_up(self, begin: float, end: float) -> bool:
        """Whether the same server was there all this time."""
        return any(ready <= begin and end < gone for ready, gone in self.up)

    async def client(self, number: int) -> None:
        """Asks until it is over."""
        limits = httpx.Timeout(30, read=LOST)
        transport = httpx.AsyncHTTPTransport(socket_options=SMALL)
        async with httpx.AsyncClient(
            timeout=limits, trust_env=False, transport=transport
        ) as client:
            while not self.over:
                request, self.next_request = self.next_request, self.next_request + 1
                kind, begin = (
                    {0: "leaves", 1: "slow", 2: "rubbish"}.get(request % 10, "plain"),
                    self.now,
                )
                try:
                    outcome = await self.one(client, request, kind)
                except httpx.ReadTimeout:
                    outcome = "lost"
                except (httpx.TransportError, OSError):
                    outcome = "error"
                self.outcomes.setdefault(kind, Counter())[outcome] += 1
                if outcome == "error":
                    if self.is_up(begin, self.now):
                        self.trouble.append(
                            f"{self.now:.0f} s: request {request} ({kind}) failed with a server there"
                        )
                    await asyncio.sleep(1)
                elif outcome not in ("answer", "left", "refused"):
                    self.trouble.append(f"{self.now:.0f} s: request {request} ({kind}): {outcome}")

    async def one(self, client: httpx.AsyncClient, request: int, kind: str) -> str:
        """What became of a request: answer, left, refused, error, or what was wrong."""
        if kind == "rubbish":
            return await send(client, self.url, request // 10) or "refused"
        chance = random.Random(request)
        at, most = chance.randrange(len(questions())), int(chance.choice([*self.expected]))
        greedy = chance.random() < 0.8
        stream = kind != "plain" or chance.random() < 0.8
        body = {
            "messages": [{"role": "user", "content": questions()[at]}],
            "max_tokens": most,
            "temperature": 0 if greedy else 0.7,
            "stream": stream,
            "forerun": kind == "slow",  # more bytes
        }
        if not stream:
            answer = await client.post(self.url + CHAT, json=body)
            if answer.status_code != 200:
                return "error"
            return self.compare(answer.json()["choices"][0]["message"]["content"], at, most, greedy)
        parts: list[str] = []
        events = chance.randrange(1, 10)
        async with client.stream("POST", self.url + CHAT, json=body) as answer:
            if answer.status_code != 200:
                return "error"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return self.compare("".join(parts), at, most, greedy)
                if not line.startswith("data:"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return "error"
                parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
                if kind == "leaves" and len(parts) > events:
                    return "left"
                if kind == "slow":
                    await asyncio.sleep(0.5)
        return "cut off without an error"

    def compare(self, text: str, at: int, most: int, greedy: bool) -> str:
        self.compared += greedy
        return (
            "answer"
            if not greedy or text == self.expected[str(most)][at]
            else f"wrong answer to question {at}"
        )

    async def sample(self) -> None:
        while not self.over:
            begin = self.now
            assert self.process is not None
            found: dict[str, Any] = {"t": begin, "rss_mb": None}
            with suppress(psutil.Error):
                found["rss_mb"] = psutil.Process(self.process.pid).memory_info().rss / 1e6 or None
            self.samples.append(found | await asyncio.to_thread(gauges, self.url))
            await asyncio.sleep(max(0.0, EVERY - (self.now - begin)))

    async def run(self, seconds: float, clients: int) -> dict[str, Any]:
        """All of it; the last figures."""
        await self.launch()
        self.begun += self.now
        self.up[0][0] = 0.0
        tasks = [asyncio.create_task(self.client(number)) for number in range(clients)]
        tasks.append(asyncio.create_task(self.sample()))
        await asyncio.sleep(seconds / 2)
        assert self.process is not None
        if self.process.poll() is not None:
            self.trouble.append("the server ended by itself")
        self.up[-1][1] = self.now
        self.process.kill()
        self.process.wait()
        await self.launch()
        await asyncio.sleep(seconds / 2)
        self.over = True
        await asyncio.gather(*tasks)
        for _ in range(60):  # what was left in mid-stream ends with the next step
            last = await asyncio.to_thread(gauges, self.url)
            if last and not any(
                last[name] for name in ("num_requests_running", "num_requests_waiting")
            ):
                break
            await asyncio.sleep(0.5)
        self.up[-1][1] = self.now
        return last | {"status": await asyncio.to_thread(stop, self.process)}


def growth(samples: list[dict[str, Any]], ready: float, gone: float) -> float | None:
    """How much more memory a server had at the end of its life than when it had settled, as a share."""
    begin = ready + min(SETTLED, (gone - ready) / 3)
    found = [each["rss_mb"] for each in samples if begin <= each["t"] < gone and each["rss_mb"]]
    fifth = max(1, len(found) // 5)
    return median(found[-fifth:]) / median(found[:fifth]) - 1 if found else None


def checks(soak: Soak, last: dict[str, Any], most_growth: float) -> dict[str, bool]:
    """What has to be true."""
    grown = [growth(soak.samples, *life) for life in soak.up]
    log = (soak.folder / "server.log").read_text(errors="replace")
    return {
        "every request ended in an answer or an error": not any(
            each["lost"] for each in soak.outcomes.values()
        ),
        "no other trouble": not soak.trouble,
        "both servers answered": all(each is not None for each in grown)
        and len(grown) == 2
        and soak.compared > 0,
        "memory does not grow": all(each is None or each <= most_growth for each in grown),
        "rows, queue and KV are zero": all(
            last.get(name) == 0
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ),
        "the server ends with status 0": last["status"] == 0,
        "no error in its log": " ERROR " not in log and "Traceback" not in log,
    }


def main() -> None:
    end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--lengths", type=numbers, default=[32, 64, 128], help="of answers")
    parser.add_argument(
        "--growth", type=float, default=0.03, help="most of memory behind the first ten minutes"
    )
    parser.add_argument("--cores", type=numbers, default=[0, 1])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "server.log").unlink(missing_ok=True)
    expected = reference(asked.lengths)
    wanted = system("forerun", len(asked.cores), asked.clients, max(asked.lengths), 0.0)
    soak = Soak(wanted, asked.out, asked.cores, expected)
    try:
        last = asyncio.run(soak.run(asked.seconds, asked.clients))
    finally:
        if soak.process is not None:
            stop(soak.process)
    told = checks(soak, last, asked.growth)
    shown = [
        "FOLDER" if at and sys.argv[at] == "--out" else each for at, each in enumerate(sys.argv[1:])
    ]
    result = {
        "checks": told,
        "trouble": soak.trouble[:50],
        "outcomes": soak.outcomes,
        "compared": soak.compared,
        "growth": [growth(soak.samples, *life) for life in soak.up],
        "killed": soak.up[0][1],
        "up": soak.up,
        "last": last,
        "samples": [{name: each[name] for name in SHOWN if name in each} for each in soak.samples],
        "command": shlex.join(["python", "-m", "benchmarks.serving.soak", *shown]),
        **provenance({key: value for key, value in vars(asked).items() if key != "out"}),
    }
    write_text(asked.out / "soak.json", json.dumps(result, indent=1) + "\n")
    picture(result, asked.out / "soak.png")
    for name, is_true in told.items():
        print(f"{'ok  ' if is_true else 'FAIL'} {name}")
    print(*soak.trouble[:10], sep="\n")
    sys.exit(0 if all(told.values()) else 1)


if __name__ == "__main__":
    main()
