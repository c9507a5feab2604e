"""What does a client feel of a form that freezes, a long prompt and one that is abandoned?

    python -m benchmarks.serving.neighbours [--target smollm2] [--prompt 6000] [--seconds 30]
        [--out JSON]

A plain answer streams all the time, and short newcomers ask one after the other. First they are
alone. Then each kind of neighbour comes by itself, and at last all of them together:

- `form`: a grammar that can read each text in very many ways, which is asked for again whenever the
  server has ended it;
- `schema`: a JSON schema and a regular expression that are laborious, likewise;
- `long`: a prompt of some thousand tokens;
- `abandoned`: the same, whose client leaves after half a second.

The result has for each the longest gap of the stream, in seconds, the time to the first token of
half of the newcomers and of the slowest one, and how many requests the neighbours made. A
newcomer's bound is three times the time of half of them alone and one chunk, which is the time that
the server reads prompts between two steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any, NamedTuple

import httpx

from benchmarks.serving.servers import System, measure, started

AMBIGUOUS = 'start: start start start start | start start | "a" | ""'
LABORIOUS = r"b(\w{1,30} ){1,200}(.*x){40}"
STRICT = {
    "type": "object",
    "properties": {
        f"p{i}": {"type": "string", "pattern": f"^(a|b)*c{{1,{i + 1}}}$"} for i in range(60)
    },
}
ALONE = 10  # newcomers at least
MAX_GAP = 0.5  # seconds
SETTLE_SECONDS = 1.0
LEAVE_SECONDS = 0.5
CHUNK_SECONDS = 0.1  # as `Engine` has it
TIMEOUT = 600.0


class Stream(Thread):
    """A plain answer that streams until it is told to stop. It has begun.

    Attributes:
        arrivals: when its pieces came, by `perf_counter`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[float] = []
        self._url = url
        self._ending = Event()
        self.start()
        sleep(SETTLE_SECONDS)

    def run(self) -> None:
        """Read the answer."""
        body = chat("Write a long story about the sea.", max_tokens=7000, ignore_eos=True)
        with httpx.stream("POST", self._url, json=body, timeout=TIMEOUT, trust_env=False) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.arrivals.append(perf_counter())
                if self._ending.is_set():
                    return

    def end(self) -> None:
        """Stop reading."""
        self._ending.set()
        self.join()

    def gap(self, begin: float, end: float) -> float:
        """Return the longest time without a piece between two times, while the answer lasts."""
        if not self.is_alive():
            end = min(end, max(self.arrivals, default=begin))
        if end <= begin:
            raise RuntimeError("the stream ended too early")
        times = [begin, *(at for at in self.arrivals if begin < at < end), end]
        return max(late - early for early, late in pairwise(times))


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a streamed, greedy chat."""
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "stream": True,
        **fields,
    }


def first_seconds(url: str, body: dict[str, Any]) -> float:
    """Return the seconds until the first token of an answer."""
    begin = perf_counter()
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT, trust_env=False) as reply:
        for line in reply.iter_lines():
            is_token = line.startswith("data: {") and '"content":"' in line
            if is_token and '"content":""' not in line:
                return perf_counter() - begin
    raise RuntimeError(f"no token came for {str(body)[:100]}")


class Neighbour(NamedTuple):
    """A client that is a trouble.

    Attributes:
        body: what it asks for.
        seconds: how long it reads, then it leaves.
        repeats: whether it asks again in this time when its answer has ended.
    """

    body: dict[str, Any]
    seconds: float
    repeats: bool = False

    def read(self, url: str) -> int:
        """Do what it does, and return the number of its requests."""
        end = perf_counter() + self.seconds
        requests = 0
        while not requests or (self.repeats and perf_counter() < end):
            requests += 1
            try:
                self._read_once(url, end)
            except httpx.TimeoutException:
                break
        return requests

    def _read_once(self, url: str, end: float) -> None:
        left = max(end - perf_counter(), 0.1)
        with httpx.stream("POST", url, json=self.body, timeout=left, trust_env=False) as reply:
            for _ in reply.iter_lines():
                if perf_counter() > end:
                    return


def neighbours(tokens: int, seconds: float) -> dict[str, list[Neighbour]]:
    """Return the neighbours by their kind."""
    words = " ".join(f"word{number % 97}" for number in range(tokens // 3))
    form = chat("Hi", max_tokens=400, response_format={"type": "grammar", "grammar": AMBIGUOUS})
    schema = {"type": "json_schema", "json_schema": {"schema": STRICT}}
    strict = chat("Hi", max_tokens=400, response_format=schema)
    regex = chat("Hi", max_tokens=400, response_format={"type": "regex", "regex": LABORIOUS})
    long = chat(f"One. {words}", max_tokens=4)
    gone = chat(f"Two. {words}", max_tokens=4)
    kinds = {
        "form": [Neighbour(form, seconds, repeats=True)],
        "schema": [Neighbour(body, seconds, repeats=True) for body in (strict, regex)],
        "long": [Neighbour(long, TIMEOUT)],
        "abandoned": [Neighbour(gone, LEAVE_SECONDS)],
    }
    everything = [
        Neighbour(form, seconds, repeats=True),
        Neighbour(chat(f"Three. {words}", max_tokens=4), TIMEOUT),
        Neighbour(chat(f"Four. {words}", max_tokens=4), LEAVE_SECONDS),
    ]
    return kinds | {"all": everything}


def beside(url: str, stream: Stream, clients: list[Neighbour], kind: str) -> dict[str, float]:
    """Return what the stream and newcomers feel while there are some neighbours."""
    begin = perf_counter()
    firsts: list[float] = []
    with ThreadPoolExecutor(max(1, len(clients))) as pool:
        readers = [pool.submit(client.read, url) for client in clients]
        while len(firsts) < ALONE or not all(reader.done() for reader in readers):
            body = chat(f"Hi, number {len(firsts)} beside {kind}.", max_tokens=4)
            firsts.append(first_seconds(url, body))
    return {
        "gap": round(stream.gap(begin, perf_counter()), 3),
        "newcomer": round(median(firsts), 3),
        "slowest": round(max(firsts), 3),
        "requests": sum(reader.result() for reader in readers),
    }


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the results of a server."""
    command = (sys.executable, "-m", "forerun", "serve", "--target", args.target)
    server = System("forerun", (*command, "--log-level", "warning"))
    with started(server, sorted(os.sched_getaffinity(0)), folder / "log") as (_, address):
        url = f"{address}/v1/chat/completions"
        results: dict[str, Any] = {}
        kinds = {"alone": []} | neighbours(args.prompt, args.seconds)
        for kind, clients in kinds.items():
            stream = Stream(url)
            results[kind] = beside(url, stream, clients, kind)
            stream.end()
            print(kind, results[kind], file=sys.stderr, flush=True)
    bound = 3 * results["alone"]["newcomer"] + CHUNK_SECONDS
    together = results["all"]
    for name in ("newcomer", "slowest"):
        results[f"{name}_over_bound"] = round(together[name] / bound, 3)
    results["holds"] = together["gap"] <= MAX_GAP and together["slowest"] <= bound
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompts")
    parser.add_argument("--seconds", type=float, default=30.0, help="that neighbours are read")
    parser.add_argument("--out", type=Path)
    measure(parser, measured)


if __name__ == "__main__":
    main()
