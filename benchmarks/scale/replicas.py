"""Streams through a server with replicas while these, and a node, are killed at random.

    python benchmarks/scale/replicas.py OUT --requests 200 --replicas 3 --kills 6

A Ray cluster of two nodes on this machine. Half of the requests are greedy, half are sampled with a seed; all are
compared with what one engine says to them in the same process, before. The JSON has the kills, what was lost and
resumed, seconds until a stream went on, and until there were as many replicas as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
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
from forerun.scale.engines import Loader, engines
from forerun.scale.fleet import Fleet
from forerun.scale.replicas import fleet
from forerun.server.app import create_app
from forerun.server.listening import listen
from forerun.server.service import Settings

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


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str | None, int]:
    """The text, how it ended, and how often it was refused before it began."""
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
                    return text, event["error"]["code"], refused
                for choice in event["choices"]:
                    text, end = text + choice["text"], choice["finish_reason"]
            return text, end, refused


def kill(name: str) -> bool:
    """Ends a replica's process. False where it has ended before."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if name in each["name"]:
            try:
                ray.kill(ray.get_actor(each["name"], namespace=each["namespace"]))
            except ValueError:
                return False
            return True
    return False


async def killing(args: argparse.Namespace, worker: Fleet, cluster: Cluster, node: Any, done: asyncio.Event) -> Any:
    """Kills replicas that have something to do, one after the other, and the second node in the middle."""
    rng, found, begun = random.Random(args.seed), [], perf_counter()
    for number in range(args.kills):
        await asyncio.sleep(args.every * rng.uniform(0.5, 1.5))
        while len(worker.loads) < 1 and not done.is_set():
            await asyncio.sleep(0.05)
        if done.is_set():
            break
        at, lost = perf_counter(), sum(worker.loads.values())
        if number == args.kills // 2:
            await asyncio.to_thread(cluster.remove_node, node, False)
            what = "node"
        else:
            name = rng.choice(sorted(worker.loads))
            what = "replica"
            lost = worker.loads[name]
            if not await asyncio.to_thread(kill, name):
                continue
        before = worker.resumed
        while len(worker._there()) == args.replicas and not done.is_set():
            await asyncio.sleep(0.05)
        noticed = perf_counter() - at
        while len(worker._there()) < args.replicas and not done.is_set():
            await asyncio.sleep(0.1)
        restored = None if done.is_set() else perf_counter() - at
        record = {"what": what, "at": at - begun, "in_flight": lost, "noticed": noticed, "restored": restored}
        found.append(record | {"resumed": worker.resumed - before})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


async def run(args: argparse.Namespace, worker: Fleet, cluster: Cluster, node: Any) -> dict[str, Any]:
    asked, sock = bodies(args), listen("127.0.0.1", 0)
    app = create_app(worker, Settings("replicas", max_seconds=3600))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not worker.ready.is_set():
        if worker.failed is not None:
            raise worker.failed
        await asyncio.sleep(0.1)
    while len(worker._there()) < args.replicas:
        await asyncio.sleep(0.1)
    print("all replicas are there", file=sys.stderr, flush=True)
    gate, done, begun = asyncio.Semaphore(args.clients), asyncio.Event(), perf_counter()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=httpx.Limits()) as http:

        async def one(body: dict[str, Any]) -> tuple[str, str | None, int]:
            async with gate:
                return await stream(http, body)

        kills = asyncio.create_task(killing(args, worker, cluster, node, done))
        answers = await asyncio.gather(*(one(body) for body in asked))
        seconds = perf_counter() - begun
        done.set()
        kills_made = await kills
    server.should_exit = True
    await serving
    recovered = sorted(worker.recovered)
    return {
        "answers": answers,
        "seconds": seconds,
        "kills": kills_made,
        "resumed": worker.resumed,
        "recovered_seconds": {
            "count": len(recovered),
            "median": statistics.median(recovered) if recovered else None,
            "most": recovered[-1] if recovered else None,
            "all": recovered,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for replicas.json")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=24, help="requests that are open at once")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=6, help="the middle one is the second node")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between kills, about")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = alone(args, bodies(args))
    print("one engine has answered", file=sys.stderr, flush=True)
    small = {"object_store_memory": 100 * 10**6, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": args.replicas, **small})
    node = cluster.add_node(num_cpus=max(1, args.replicas // 2), object_store_memory=100 * 10**6)
    ray.init(address=cluster.address, log_to_driver=False)
    loader = Loader(args.target, None, {"max_queue": 256}, 1)
    made = engines(loader, least=args.replicas, most=args.replicas, rows=64, room=320, cpus=1)
    found = asyncio.run(run(args, fleet(made), cluster, node))
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
    answers = found.pop("answers")
    same = [text == other for (text, _, _), other in zip(answers, wanted, strict=True)]
    result = {
        "settings": {name: str(value) for name, value in vars(args).items()},
        "complete": sum(end == "length" for _, end, _ in answers),
        "ends": sorted({str(end) for _, end, _ in answers}),
        "greedy_equal": sum(same[::2]),
        "seeded_equal": sum(same[1::2]),
        "refused_before_they_began": sum(refused for _, _, refused in answers),
        **found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "replicas.json").write_text(text + "\n")
    if result["complete"] < args.requests or not all(same):
        raise SystemExit("not all answers are complete and equal")


if __name__ == "__main__":
    main()
