"""A batch job whose actor, driver and node are killed, and what two actors of one thread do beside one engine of two.

    python benchmarks/scale/batch.py OUT --target smollm2 --tokens 24

Of the kills: a Ray cluster of two nodes on this machine. An actor is killed at a fifth of the records, the command at
two fifths, a node at three fifths. The answers are compared with those of one engine that nothing happens to.

Of the speed: both take turns, in an order that changes, each on the same prompts in a new process. What is measured is
new tokens a second from a quarter of the records to 95 per cent: without loading and the end. A ratio is of one round.

OUT/batch.json has all of it. The exit status is 1 where a prompt has no answer, two, or another than from one engine.
The parts may be asked for singly: `--only speed`, `--only kills`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from uuid import uuid4

from forerun.bench.report import versions

MARK = uuid4().hex  # in the environment of all processes that this one starts, so that no other ones are killed
STORE = 100 * 10**6  # bytes of each node's object store

VERBS = "add sort find read write parse merge split count check load save open close send join walk scan hash wrap"
NOUNS = "items lines words files nodes edges rows keys names paths tokens bytes pages users dates jobs"
ENDS = ("(self", "(data", "(path, mode", "(*args", "(left, right", "(value=None", "(stream")


def write_input(path: Path, count: int, tokens: int) -> None:
    starts = [f"def {verb}_{noun}{end}" for end, verb, noun in product(ENDS, VERBS.split(), NOUNS.split())]
    if count > len(starts):
        raise SystemExit(f"--prompts may be {len(starts)} at most")
    bodies = [{"prompt": each, "max_tokens": tokens, "temperature": 0} for each in starts[:count]]
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def raw_records(out: Path) -> bytes:
    path = out / "records.jsonl"
    return path.read_bytes() if path.exists() else b""


def records(out: Path) -> list[dict[str, Any]]:
    raw = raw_records(out)
    return [json.loads(each) for each in raw.splitlines(keepends=True) if each.endswith(b"\n")]


def count(out: Path) -> int:
    return raw_records(out).count(b"\n")


def texts(out: Path) -> dict[str, str]:
    answered = [each for each in records(out) if each["response"] and each["response"]["status_code"] == 200]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answered}


def start(source: Path, out: Path, options: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "forerun", "batch", str(source), str(out), *options]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def wait_for(out: Path, wanted: int, process: subprocess.Popen[bytes]) -> None:
    while count(out) < wanted:
        if process.poll() is not None and count(out) < wanted:
            raise SystemExit(f"the job ended with status {process.returncode} before {wanted} records; see the log")
        sleep(0.05)


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise SystemExit("the job failed; see the log")


def speed(source: Path, out: Path, options: list[str], total: int, log: Path) -> float:
    """New tokens a second between a quarter of the records and 95 per cent. By then all actors are there."""
    process = start(source, out, options, log)
    wait_for(out, total // 4, process)
    begun, there = perf_counter(), count(out)
    wait_for(out, total - total // 20, process)
    seconds, now = perf_counter() - begun, count(out)
    finish(process)
    tokens = [each["response"]["body"]["usage"]["completion_tokens"] for each in records(out)]
    return sum(tokens[there:now]) / seconds


def speeds(given: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Rounds of both, in turns."""
    source, log, total = given.out / "speed.jsonl", given.out / "speed-log.txt", given.speed_prompts
    write_input(source, total, given.tokens)
    # As many rows in all: what is compared are two engines and one, not batches of two sizes.
    half = ["--max-rows", str(max(1, given.max_rows // 2)), "--ray", "local", "--actors", "2", "--threads", "1"]
    sides = {"one_engine": ["--max-rows", str(given.max_rows), "--threads", "2"], "two_actors": half}
    found: dict[str, list[float]] = {name: [] for name in sides}
    said = []
    for number in range(given.rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            out = given.out / f"{name}-{number}"
            found[name].append(speed(source, out, options + sides[name], total, log))
            said.append(texts(out))
            print(f"round {number}, {name}: {found[name][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    ratios = [two / one for one, two in zip(found["one_engine"], found["two_actors"], strict=True)]
    return {
        "tokens_per_s": {name: [round(each, 2) for each in rates] for name, rates in found.items()},
        "medians": {name: round(median(rates), 2) for name, rates in found.items()},
        "ratios": [round(each, 4) for each in ratios],
        "median_ratio": round(median(ratios), 4),
        "same_texts": min(same(each, said[0]) for each in said),
    }


def same(some: dict[str, str], others: dict[str, str]) -> int:
    """How many of the texts are equal."""
    return sum(others.get(name) == text for name, text in some.items())


def actors() -> list[int]:
    """Processes of this run's actors."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::Actor" in (each / "cmdline").read_bytes() and MARK.encode() in (each / "environ").read_bytes():
                found.append(int(each.name))
        except OSError:
            continue
    return found


def killed(given: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """A job on two nodes that loses an actor, its driver and a node, beside one that loses nothing."""
    from ray.cluster_utils import Cluster

    source, log, total = given.out / "in.jsonl", given.out / "log.txt", given.prompts
    write_input(source, total, given.tokens)
    options = [*options, "--max-rows", str(given.max_rows)]
    alone, out = given.out / "alone", given.out / "killed"
    finish(start(source, alone, [*options, "--threads", "2"], log))
    print("one engine has answered", file=sys.stderr, flush=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    options = [*options, "--ray", cluster.address, "--actors", "2", "--threads", "1"]
    begun, seen = perf_counter(), {}
    try:
        process = start(source, out, options, log)
        wait_for(out, total // 5, process)
        seen["actor"] = count(out)
        os.kill(actors()[0], signal.SIGKILL)
        wait_for(out, 2 * total // 5, process)
        seen["driver"] = count(out)
        process.kill()
        process.wait()
        process = start(source, out, options, log)
        wait_for(out, 3 * total // 5, process)
        seen["node"] = count(out)
        cluster.remove_node(node, allow_graceful=False)
        finish(process)
    finally:
        cluster.shutdown()
    lines = [each["line"] for each in records(out)]
    return {
        "killed_at_records": seen,
        "seconds": round(perf_counter() - begun, 1),
        "records": len(lines),
        "lines": len(set(lines)),
        "same_texts": same(texts(out), texts(alone)),
        "summary": json.loads((out / "summary.json").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="an empty folder")
    parser.add_argument("--prompts", type=int, default=2000, help="of the job that is killed")
    parser.add_argument("--speed-prompts", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=4, help="of the speed")
    parser.add_argument("--tokens", type=int, default=24, help="most new tokens of each")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--method", help="the target's default where none is named")
    parser.add_argument("--max-rows", type=int, default=32, help="of one engine; two have half of them each")
    parser.add_argument("--only", choices=("speed", "kills"))
    given = parser.parse_args()
    if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
        parser.error(f"{given.out} is not an empty folder")
    # Ray's actors would yield to all else, which one engine does not; and its monitor of memory kills as well.
    os.environ |= {"FORERUN_BENCH_MARK": MARK, "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {name: str(value) for name, value in vars(given).items()},
        "versions": versions() | {"ray": version("ray")},
        "load_before": os.getloadavg(),
    }
    options = ["--target", given.target] + (["--method", given.method] if given.method else [])
    right = True
    if given.only != "speed":
        kills = found["kills"] = killed(given, options)
        right = kills["records"] == kills["lines"] == kills["same_texts"] == given.prompts
    if given.only != "kills":
        found["speed"] = speeds(given, options)
        right = right and found["speed"]["same_texts"] == given.speed_prompts
    text = json.dumps(found, indent=1)
    print(text)
    (given.out / "batch.json").write_text(text + "\n")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
