"""Prompts behind shared prefixes: what one replica's prefix cache finds, and what those of several find together.

    python benchmarks/scale/routing.py OUT

The server's app and its router as `forerun serve --ray` has them, and an engine for each replica, all in this process:
no Ray. Clients ask one question after the other, each behind one of the prefixes. The JSON has the share of the tokens
of prompts that was found, how many requests each replica got, and the most that one had in flight, over the mean. Exits
with 1 where several find less than 0.9 times what one does, or one of them has more than 1.3 times the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from forerun.bench.report import versions
from forerun.scale.fleet import Fleet
from forerun.scale.messages import ModelInfo, SentRequest, Steps, decode
from forerun.server.app import Settings, create_app
from forerun.server.backend import until_ready
from forerun.server.readers import Readers
from forerun.server.worker import Loader, Worker


class Here:
    """Replicas in this process."""

    def __init__(self, loader: Loader, count: int) -> None:
        self.workers = {f"r{i}": Worker(loader) for i in range(count)}
        self.readers, self.asked = Readers(), Counter[str]()

    async def model(self) -> ModelInfo:
        for worker in self.workers.values():
            worker.start()
        for worker in self.workers.values():
            await until_ready(worker)
        return ModelInfo.of(worker)

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        return {name: {} for name in self.workers}

    def decode(self, name: str, sent: Sequence[SentRequest]) -> AsyncGenerator[Steps, None]:
        self.asked[name] += len(sent)
        return decode(self.workers[name], self.readers, sent)

    def hits(self) -> int:
        stores = [worker.engine.target.prefixes for worker in self.workers.values()]
        return sum(store.hit_tokens for store in stores if store is not None)


def prompts(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    rng = random.Random(args.seed)
    prefixes = [[rng.randrange(vocabulary) for _ in range(rng.randrange(64, 257))] for _ in range(args.prefixes)]
    return [[*rng.choice(prefixes), *(rng.randrange(vocabulary) for _ in range(16))] for _ in range(args.requests)]


async def run(args: argparse.Namespace, count: int) -> dict[str, Any]:
    here = Here(Loader(args.target, None, {"max_queue": 256}, 1), count)
    fleet, highest = Fleet(here), 0.0
    app = create_app(fleet, Settings("routing", max_seconds=3600))
    async with app.router.lifespan_context(app):
        await fleet.ready.wait()
        asked, begun, known = prompts(args, fleet.model.vocab_size), perf_counter(), here.hits()
        left = iter(asked)

        async def client(http: httpx.AsyncClient) -> None:
            for prompt in left:
                body = {"prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True}
                (await http.post("/v1/completions", json=body)).raise_for_status()

        async def look() -> None:
            nonlocal highest
            while True:
                if fleet.loads.total() == args.clients:  # else the mean is of what is left
                    highest = max(highest, max(fleet.loads.values()) * count / args.clients)
                await asyncio.sleep(0.005)

        looking = asyncio.create_task(look())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=None) as http:
            await asyncio.gather(*(client(http) for _ in range(args.clients)))
        looking.cancel()
        seconds, found = perf_counter() - begun, here.hits() - known
    for worker in here.workers.values():
        await worker.stop()
    return {
        "hit_rate": found / sum(map(len, asked)),
        "requests": dict(sorted(here.asked.items())),
        "requests_most_over_mean": max(here.asked.values()) * count / here.asked.total(),
        "in_flight_most_over_mean": highest,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new or empty folder, for routing.json")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--prefixes", type=int, default=50)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32, help="requests that are open at once")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    args.out.mkdir(parents=True, exist_ok=True)
    one, several = (asyncio.run(run(args, count)) for count in (1, args.replicas))
    ratio = several["hit_rate"] / one["hit_rate"]
    result = {
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "versions": versions(),
        "hit_rate_over_that_of_one": ratio,
        "one": one,
        "several": several,
    }
    text = json.dumps(result, indent=1)
    print(text)
    (args.out / "routing.json").write_text(text + "\n")
    if ratio < 0.9 or max(several["requests_most_over_mean"], several["in_flight_most_over_mean"]) > 1.3:
        raise SystemExit("several replicas found too little, or one of them had too much to do")


if __name__ == "__main__":
    main()
