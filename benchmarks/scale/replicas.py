"""Streams through a server with replicas while these, and a node, are killed at random.

    python benchmarks/scale/replicas.py OUT --requests 200 --replicas 3 --kills 6

A Ray cluster of two nodes on this machine; both have replicas. Half of the requests are greedy, half are sampled with a
seed; all are compared with what one engine says to them in the same process, before. The requests come in rounds, one
more than there are kills: a replica, or in the middle one the second node, dies while the round's streams run. A node
in its place comes when these have ended. The next round begins when all replicas are there.

The JSON has the kills, what was lost and resumed, seconds until a stream went on, and until there were as many replicas
as before. Exits with 1 where an answer is not complete, or another than that of one engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}  # its monitor kills as well

import httpx
import ray
import uvicorn
from ray import serve
from ray.cluster_utils import Cluster

from forerun import load
from forerun.bench.report import versions
from forerun.scale.fleet import Fleet
from forerun.scale.replicas import ServeReplicas, engines
from forerun.server.app import Settings, create_app
from forerun.server.listening import listen
from forerun.server.worker import Loader

STORE = 100 * 10**6  # bytes of each node's object store

STARTS = [
    "def quicksort(items):",
    "import os\n\n",
    "class Node:",
    "for i in range(",
    "The",
    "while True:",
    "try:\n",
    "#",
]


def bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng, found = random.Random(args.seed), []
    for i in range(args.requests):
        prompt = f"# {rng.randrange(10**6)}\n{rng.choice(STARTS)}"
        body = {"prompt": prompt, "max_tokens": args.max_tokens, "ignore_eos": True, "temperature": 0.0}
        found.append(body | ({"temperature": 1.0, "seed": i} if i % 2 else {}))
    return found


def alone(args: argparse.Namespace, asked: list[dict[str, Any]]) -> list[str]:
    """What one engine says."""
    decoder = load(args.target)
    greedy = decoder.generate([each["prompt"] for each in asked[::2]], max_new_tokens=args.max_tokens, ignore_eos=True)
    found = {2 * i: each.text for i, each in enumerate(greedy)}
    for i in range(1, len(asked), 2):
        options = {"max_new_tokens": args.max_tokens, "ignore_eos": True, "temperature": 1.0, "seed": i}
        found[i] = decoder.generate(asked[i]["prompt"], **options).text
    return [found[i] for i in range(len(asked))]


@dataclass(frozen=True)
class Answer:
    """Of a stream: its text, how it ended, and how often it was refused before it began."""

    text: str
    end: str | None
    refused: int


async def stream(http: httpx.AsyncClient, body: dict[str, Any], hear: Callable[[str], None]) -> Answer:
    refused = 0
    while True:
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            if response.status_code == 503:
                refused += 1
                await asyncio.sleep(1)
                continue
            text, end = "", f"status {response.status_code}"
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return Answer(text, event["error"]["code"], refused)
                for choice in event["choices"]:
                    hear(choice["text"])
                    text, end = text + choice["text"], choice["finish_reason"]
            return Answer(text, end, refused)


def kill(name: str) -> None:
    """Ends a replica's process."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if name in each["name"]:
            ray.kill(ray.get_actor(each["name"], namespace=each["namespace"]))


class Nodes:
    """A cluster of two nodes, which only together have room for all replicas."""

    def __init__(self, replicas: int) -> None:
        self._second = {"num_cpus": replicas // 2, "object_store_memory": STORE}
        first = {"num_cpus": replicas - replicas // 2, "object_store_memory": STORE, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=first)
        self._node = self.cluster.add_node(**self._second)

    def kill(self) -> None:
        """Ends the second node's processes."""
        self.cluster.remove_node(self._node, allow_graceful=False)

    def replace(self) -> None:
        """Only in the main thread, says Ray."""
        self._node = self.cluster.add_node(**self._second)


async def killed(args: argparse.Namespace, worker: Fleet, nodes: Nodes, rng: random.Random, node: bool) -> Any:
    """Kills a replica that has something to do, or the second node, and waits until that is noticed."""
    at, loads = perf_counter(), dict(worker.loads)
    name = rng.choice(sorted(loads or worker.available()))
    await asyncio.to_thread(nodes.kill if node else lambda: kill(name))
    while len(left := set(worker.available())) == args.replicas:
        await asyncio.sleep(0.02)
    noticed = perf_counter()
    return {
        "at": at,
        "what": "node" if node else "replica",
        "in_flight": sum(loads.values()),
        "lost": sum(load for each, load in loads.items() if each not in left),
        "noticed_seconds": noticed - at,
    }


async def whole(args: argparse.Namespace, worker: Fleet) -> float:
    """When all replicas are there."""
    while len(worker.available()) < args.replicas:
        await asyncio.sleep(0.1)
    return perf_counter()


async def rounds(
    args: argparse.Namespace,
    worker: Fleet,
    nodes: Nodes,
    http: httpx.AsyncClient,
    asked: list[dict[str, Any]],
    wanted: list[str],
) -> tuple[list[Answer], list[Any]]:
    """A kill comes when some random part of what is to come of its round has come, up to seven tenths."""
    rng, gate, count, kills = random.Random(args.seed), asyncio.Semaphore(args.clients), args.kills + 1, []
    answers: list[Answer] = []
    for number in range(count):
        share = range(number * len(asked) // count, (number + 1) * len(asked) // count)
        heard, at = 0, rng.uniform(0, 0.7) * sum(len(wanted[i]) for i in share)

        def hear(text: str) -> None:
            nonlocal heard
            heard += len(text)

        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await stream(http, body, hear)

        streams = asyncio.gather(*(one(asked[i]) for i in share))
        if number < args.kills:
            while heard <= at and not streams.done():
                await asyncio.sleep(0.01)
            resumed, node = worker.resumed, number == args.kills // 2
            kills.append(record := await killed(args, worker, nodes, rng, node))
            at, restoring = record.pop("at"), asyncio.create_task(whole(args, worker))
            answers += await streams
            record["resumed"] = worker.resumed - resumed
            if node:  # not before: meanwhile nothing else runs in this process
                record["replaced_seconds"] = perf_counter() - at
                nodes.replace()
            record["restored_seconds"] = await restoring - at
            print(json.dumps(record), file=sys.stderr, flush=True)
        else:
            answers += await streams
    return answers, kills


async def run(
    args: argparse.Namespace, worker: Fleet, nodes: Nodes, asked: list[dict[str, Any]], wanted: list[str]
) -> dict[str, Any]:
    sock = listen("127.0.0.1", 0)
    app = create_app(worker, Settings("replicas", max_seconds=3600))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not worker.ready.is_set() or len(worker.available()) < args.replicas:
        if worker.failed is not None:
            raise worker.failed
        await asyncio.sleep(0.1)
    print("all replicas are there", file=sys.stderr, flush=True)
    begun, url = perf_counter(), f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=httpx.Limits()) as http:
        answers, kills = await rounds(args, worker, nodes, http, asked, wanted)
    seconds = perf_counter() - begun
    server.should_exit = True
    await serving
    recovered = sorted(worker.recovered)
    return {
        "answers": answers,
        "seconds": seconds,
        "kills": kills,
        "resumed": worker.resumed,
        "recovered_seconds": {
            "count": len(recovered),
            "p50": statistics.median(recovered) if recovered else None,
            "max": recovered[-1] if recovered else None,
            "all": recovered,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new or empty folder, for replicas.json")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=24, help="requests that are open at once")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=6, help="the middle one is the second node")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.replicas < 2:
        parser.error("--replicas must be at least 2: one for each node")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    args.out.mkdir(parents=True, exist_ok=True)
    asked = bodies(args)
    wanted = alone(args, asked)
    print("one engine has answered", file=sys.stderr, flush=True)
    nodes = Nodes(args.replicas)
    try:
        ray.init(address=nodes.cluster.address, log_to_driver=False)
        loader = Loader(args.target, None, {"max_queue": 256}, 1)
        made = engines(loader, replicas=args.replicas, room=320, cpus=1)
        found = asyncio.run(run(args, Fleet(ServeReplicas(made, "replicas")), nodes, asked, wanted))
        serve.shutdown()
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
    answers = found.pop("answers")
    same = [answer.text == text for answer, text in zip(answers, wanted, strict=True)]
    result = {
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "versions": versions() | {"ray": version("ray")},
        "complete": sum(each.end == "length" for each in answers),
        "ends": sorted({str(each.end) for each in answers}),
        "greedy_equal": sum(same[::2]),
        "seeded_equal": sum(same[1::2]),
        "refused_before_they_began": sum(each.refused for each in answers),
        **found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    (args.out / "replicas.json").write_text(text + "\n")
    if result["complete"] < args.requests or not all(same):
        raise SystemExit("not all answers are complete and equal")


if __name__ == "__main__":
    main()
