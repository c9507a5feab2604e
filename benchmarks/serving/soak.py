"""An hour of clients of all kinds, a kill in the middle, and what the server did.

    python -m benchmarks.serving.soak --out FOLDER [--seconds 3600] [--clients 64]

Of ten requests one is left in mid-stream, one is read slowly and one is rubbish. Halfway the server
is killed and started again. It writes FOLDER/soak.json and FOLDER/soak.png, and ends with status 1
if a check fails. It needs psutil.
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

from benchmarks.serving.results_page import picture
from benchmarks.serving.servers import (
    Service,
    System,
    end_on_signals,
    free_port,
    gauges,
    numbers,
    questions,
    shown,
    start,
    stop,
    system,
    wait_ready,
)
from benchmarks.serving.soak_requests import CHAT_PATH, reference, send
from forerun.bench.report import provenance
from forerun.files import write_text
from forerun.zoo import SMOLLM2

LOST_SECONDS = 700  # without a byte until a request counts as lost: the server's own limit is 600
SAMPLE_SECONDS = 5  # between samples
SAMPLE_FIELDS = (
    "t",
    "rss_mb",
    "num_requests_running",
    "num_requests_waiting",
    "generation_tokens_total",
)
SETTLED_SECONDS = 600  # of a server's life, or a third of it, in which its memory may grow
# Small buffers, which slow readers fill.
SMALL_BUFFERS = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
KINDS = {0: "leaves", 1: "slow", 2: "rubbish"}  # by the last digit of a request's number
GOOD_OUTCOMES = ("answer", "left", "refused")


@dataclass(frozen=True)
class Question:
    """A request for an answer.

    Attributes:
        number: of the question.
        length: the most tokens of the answer.
        greedy: whether the answer is known.
        stream: whether it is streamed.
        leaves_after: events after which a client that leaves has left.
    """

    number: int
    length: int
    greedy: bool
    stream: bool
    leaves_after: int


@dataclass
class Soak:
    """What runs, and what was seen. Times are seconds from the start.

    Attributes:
        up: when the server was ready, and when it was gone, by life.
        outcomes: what became of requests, by kind.
        trouble: a line for each event that should not have been.
        compared: answers that were compared with the expected ones.
    """

    wanted: System
    folder: Path
    cores: list[int]
    expected: dict[str, list[str]]
    port: int = field(default_factory=free_port)
    started_at: float = field(default_factory=monotonic)
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
        return monotonic() - self.started_at

    async def launch(self) -> None:
        """Start the server, and wait until it is ready."""
        log = self.folder / "server.log"
        self.process = start(self.wanted, self.port, self.cores, log)
        await asyncio.to_thread(wait_ready, self.process, self.url, log)
        self.up.append([self.now, float("inf")])

    def is_up(self, begin: float, end: float) -> bool:
        """Return whether the same server was there all this time."""
        return any(ready <= begin and end < gone for ready, gone in self.up)

    async def client(self) -> None:
        """Ask until it is over."""
        limits = httpx.Timeout(30, read=LOST_SECONDS)
        transport = httpx.AsyncHTTPTransport(socket_options=SMALL_BUFFERS)
        async with httpx.AsyncClient(
            timeout=limits, trust_env=False, transport=transport
        ) as client:
            while not self.over:
                request = self.next_request
                self.next_request += 1
                await self.send_request(client, request)

    async def send_request(self, client: httpx.AsyncClient, request: int) -> None:
        """Send a request and count its outcome."""
        kind = KINDS.get(request % 10, "plain")
        begin = self.now
        try:
            outcome = await self.outcome_of(client, request, kind)
        except httpx.ReadTimeout:
            outcome = "lost"
        except (httpx.TransportError, OSError):
            outcome = "error"
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        if outcome == "error":
            if self.is_up(begin, self.now):
                self.note(f"request {request} ({kind}) failed with a server there")
            await asyncio.sleep(1)
        elif outcome not in GOOD_OUTCOMES:
            self.note(f"request {request} ({kind}): {outcome}")

    def note(self, trouble: str) -> None:
        self.trouble.append(f"{self.now:.0f} s: {trouble}")

    async def outcome_of(self, client: httpx.AsyncClient, request: int, kind: str) -> str:
        """Return what became of a request: a good outcome, "error", or what was wrong."""
        if kind == "rubbish":
            return await send(client, self.url, request // 10) or "refused"
        question = self.question_of(request, kind)
        body = {
            "messages": [{"role": "user", "content": questions()[question.number]}],
            "max_tokens": question.length,
            "temperature": 0 if question.greedy else 0.7,
            "stream": question.stream,
            "forerun": kind == "slow",  # for more bytes
        }
        if question.stream:
            return await self.read_stream(client, body, question, kind)
        answer = await client.post(self.url + CHAT_PATH, json=body)
        if answer.status_code != 200:
            return "error"
        return self.compare(answer.json()["choices"][0]["message"]["content"], question)

    def question_of(self, request: int, kind: str) -> Question:
        """Return the question of a request, which its number decides."""
        chance = random.Random(request)
        number = chance.randrange(len(questions()))
        length = int(chance.choice([*self.expected]))
        greedy = chance.random() < 0.8
        stream = kind != "plain" or chance.random() < 0.8
        leaves_after = chance.randrange(1, 10) if stream else 0
        return Question(number, length, greedy, stream, leaves_after)

    async def read_stream(
        self, client: httpx.AsyncClient, body: dict[str, Any], question: Question, kind: str
    ) -> str:
        """Read a streamed answer, slowly or in part, and return its outcome."""
        parts: list[str] = []
        async with client.stream("POST", self.url + CHAT_PATH, json=body) as answer:
            if answer.status_code != 200:
                return "error"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return self.compare("".join(parts), question)
                if not line.startswith("data:"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return "error"
                parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
                if kind == "leaves" and len(parts) > question.leaves_after:
                    return "left"
                if kind == "slow":
                    await asyncio.sleep(0.5)
        return "cut off without an error"

    def compare(self, text: str, question: Question) -> str:
        """Return the outcome of an answer; a greedy one must be the expected one."""
        self.compared += question.greedy
        if not question.greedy or text == self.expected[str(question.length)][question.number]:
            return "answer"
        return f"wrong answer to question {question.number}"

    async def sample(self) -> None:
        """Keep the server's memory and figures now and then."""
        while not self.over:
            begin = self.now
            assert self.process is not None
            memory: float | None = None
            with suppress(psutil.Error):
                memory = psutil.Process(self.process.pid).memory_info().rss / 1e6 or None
            figures = await asyncio.to_thread(gauges, self.url)
            self.samples.append({"t": begin, "rss_mb": memory, **figures})
            await asyncio.sleep(max(0.0, SAMPLE_SECONDS - (self.now - begin)))

    async def run(self, seconds: float, clients: int) -> dict[str, Any]:
        """Run all of it, and return the last figures of the server and its status."""
        await self.launch()
        self.started_at += self.now
        self.up[0][0] = 0.0
        tasks = [asyncio.create_task(self.client()) for _ in range(clients)]
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
        last = await self.last_figures()
        self.up[-1][1] = self.now
        return last | {"status": await asyncio.to_thread(stop, self.process)}

    async def last_figures(self) -> dict[str, Any]:
        """Return the server's figures when it is idle, or after half a minute.

        Requests that were left in mid-stream end with the next step.
        """
        last: dict[str, Any] = {}
        for _ in range(60):
            last = await asyncio.to_thread(gauges, self.url)
            if last and not last["num_requests_running"] and not last["num_requests_waiting"]:
                break
            await asyncio.sleep(0.5)
        return last


def growth(samples: list[dict[str, Any]], ready: float, gone: float) -> float | None:
    """Return how much more memory a server had at its end than when it had settled, as a share."""
    begin = ready + min(SETTLED_SECONDS, (gone - ready) / 3)
    in_life = [sample for sample in samples if begin <= sample["t"] < gone]
    memory = [sample["rss_mb"] for sample in in_life if sample["rss_mb"]]
    fifth = max(1, len(memory) // 5)
    return median(memory[-fifth:]) / median(memory[:fifth]) - 1 if memory else None


def checks(soak: Soak, last: dict[str, Any], most_growth: float) -> dict[str, bool]:
    """Return what has to be true, and whether it is."""
    grown = [growth(soak.samples, *life) for life in soak.up]
    log = (soak.folder / "server.log").read_text(errors="replace")
    lost = sum(counts["lost"] for counts in soak.outcomes.values())
    idle = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    both_lived = len(grown) == 2 and all(share is not None for share in grown)
    return {
        "every request ended in an answer or an error": not lost,
        "no other trouble": not soak.trouble,
        "both servers answered": both_lived and soak.compared > 0,
        "memory does not grow": all(share is None or share <= most_growth for share in grown),
        "rows, queue and KV are zero": all(last.get(name) == 0 for name in idle),
        "the server ends with status 0": last["status"] == 0,
        "no error in its log": " ERROR " not in log and "Traceback" not in log,
    }


def kept_fields(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in SAMPLE_FIELDS if name in sample}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--lengths", type=numbers, default=[32, 64, 128], help="of answers")
    parser.add_argument(
        "--growth", type=float, default=0.03, help="most of memory behind the first ten minutes"
    )
    parser.add_argument("--cores", type=numbers, default=[0, 1])
    return parser.parse_args()


def main() -> None:
    end_on_signals()
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "server.log").unlink(missing_ok=True)
    expected = reference(options.lengths)
    service = Service(SMOLLM2, len(options.cores), options.clients, max(options.lengths))
    wanted = system("forerun", service)
    soak = Soak(wanted, options.out, options.cores, expected)
    try:
        last = asyncio.run(soak.run(options.seconds, options.clients))
    finally:
        if soak.process is not None:
            stop(soak.process)
    found_true = checks(soak, last, options.growth)
    command = ["python", "-m", "benchmarks.serving.soak", *shown(sys.argv[1:], "FOLDER")]
    record = {
        "checks": found_true,
        "trouble": soak.trouble[:50],
        "outcomes": soak.outcomes,
        "compared": soak.compared,
        "growth": [growth(soak.samples, *life) for life in soak.up],
        "killed": soak.up[0][1],
        "up": soak.up,
        "last": last,
        "samples": [kept_fields(sample) for sample in soak.samples],
        "command": shlex.join(command),
        **provenance({key: value for key, value in vars(options).items() if key != "out"}),
    }
    write_text(options.out / "soak.json", json.dumps(record, indent=1) + "\n")
    picture(record, options.out / "soak.png")
    for name, is_true in found_true.items():
        print(f"{'ok  ' if is_true else 'FAIL'} {name}")
    print(*soak.trouble[:10], sep="\n")
    sys.exit(0 if all(found_true.values()) else 1)


if __name__ == "__main__":
    main()
