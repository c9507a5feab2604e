"""What does a client feel of a form that freezes, a long prompt and one that is abandoned?

    python -m benchmarks.serving.neighbours [--target smollm2] [--prompt 6000] [--seconds 30]
        [--out JSON]

A plain answer streams all the time. First it is alone, and short newcomers ask one after the other.
Then each kind of neighbour comes by itself, and at last all of them together, with a newcomer at
the same time:

- `form`: a grammar that can read each text in very many ways;
- `schema`: a JSON schema and a regular expression that are laborious;
- `long`: a prompt of some thousand tokens;
- `abandoned`: the same, whose client leaves after half a second.

The result has the longest gap of the stream for each, in seconds, and the newcomer's time to its
first token, alone and beside. `chunk_seconds` is the time that the server reads prompts between two
steps. The newcomer's bound is three times its time alone and one chunk.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any

import httpx

from benchmarks.serving.servers import System, end_on_signals, report, started

AMBIGUOUS = 'start: start start start start | start start | "a" | ""'
LABORIOUS = r"b(\w{1,30} ){1,200}(.*x){40}"
STRICT = {
    "type": "object",
    "properties": {
        f"p{i}": {"type": "string", "pattern": f"^(a|b)*c{{1,{i + 1}}}$"} for i in range(60)
    },
}
ALONE = 5  # newcomers before any neighbour comes
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
        """Return the longest time without a piece between two times."""
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


def read(url: str, body: dict[str, Any], seconds: float) -> None:
    """Read an answer for some seconds, then leave."""
    begin = perf_counter()
    try:
        with httpx.stream("POST", url, json=body, timeout=seconds, trust_env=False) as reply:
            for _ in reply.iter_lines():
                if perf_counter() - begin > seconds:
                    return
    except httpx.TimeoutException:
        pass


def neighbours(tokens: int, seconds: float) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return bodies, and how long their clients read, by their kind."""
    words = " ".join(f"word{number % 97}" for number in range(tokens // 3))
    form = chat("Hi", max_tokens=400, response_format={"type": "grammar", "grammar": AMBIGUOUS})
    schema = {"type": "json_schema", "json_schema": {"schema": STRICT}}
    strict = chat("Hi", max_tokens=400, response_format=schema)
    regex = chat("Hi", max_tokens=400, response_format={"type": "regex", "regex": LABORIOUS})
    long = chat(f"One. {words}", max_tokens=4)
    gone = chat(f"Two. {words}", max_tokens=4)
    kinds = {
        "form": [(form, seconds)],
        "schema": [(strict, seconds), (regex, seconds)],
        "long": [(long, TIMEOUT)],
        "abandoned": [(gone, LEAVE_SECONDS)],
    }
    everything = [
        (form, seconds),
        (chat(f"Three. {words}", max_tokens=4), TIMEOUT),
        (chat(f"Four. {words}", max_tokens=4), LEAVE_SECONDS),
    ]
    return kinds | {"all": everything}


def beside(
    url: str,
    stream: Stream,
    bodies: list[tuple[dict[str, Any], float]],
    newcomer: int,
    seconds: float,
) -> dict[str, float]:
    """Return the stream's longest gap beside some neighbours, and a newcomer's first token."""
    begin = perf_counter()
    threads = [Thread(target=read, args=(url, *each), daemon=True) for each in bodies]
    for thread in threads:
        thread.start()
    sleep(SETTLE_SECONDS)
    first = first_seconds(url, chat(f"Hi, number {newcomer}.", max_tokens=4))
    for thread in threads:
        thread.join(max(0.0, seconds - (perf_counter() - begin)))
    end = perf_counter()
    return {"gap": round(stream.gap(begin, end), 3), "newcomer": round(first, 3)}


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the results of a server."""
    command = (sys.executable, "-m", "forerun", "serve", "--target", args.target)
    server = System("forerun", (*command, "--log-level", "warning"))
    with started(server, sorted(os.sched_getaffinity(0)), folder / "log") as (_, address):
        url = f"{address}/v1/chat/completions"
        stream = Stream(url)
        begin = perf_counter()
        firsts = [first_seconds(url, chat(f"Hi, {i} alone.", max_tokens=4)) for i in range(ALONE)]
        alone = round(median(firsts), 3)
        results: dict[str, Any] = {
            "alone": {"gap": round(stream.gap(begin, perf_counter()), 3), "newcomer": alone}
        }
        kinds = neighbours(args.prompt, args.seconds)
        stream.end()
        for number, (kind, bodies) in enumerate(kinds.items()):
            stream = Stream(url)
            results[kind] = beside(url, stream, bodies, number, args.seconds)
            stream.end()
            print(kind, results[kind], file=sys.stderr, flush=True)
    bound = 3 * alone + CHUNK_SECONDS
    together = results["all"]
    results["newcomer_over_bound"] = round(together["newcomer"] / bound, 3)
    results["holds"] = together["gap"] <= 0.5 and together["newcomer"] <= bound
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompts")
    parser.add_argument("--seconds", type=float, default=30.0, help="that neighbours are read")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end_on_signals()

    with TemporaryDirectory(prefix="forerun-neighbours-") as folder:
        results = measured(args, Path(folder))
    report(results, args)


if __name__ == "__main__":
    main()
