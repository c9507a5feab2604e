"""A batch job whose actor, driver and node are killed, and what two actors of one thread do beside one engine of two.

    python benchmarks/scale/batch.py OUT --prompts 2000

Prints a JSON object; exits with 1 where a prompt has no answer, two, or another than without Ray and kills. The parts
may be asked for singly: `--only speed`, `--only kills`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from uuid import uuid4

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


def records(out: Path) -> list[dict[str, Any]]:
    raw = b"".join(part.read_bytes() for part in sorted(out.glob("part-*.jsonl")))
    return [json.loads(each) for each in raw.splitlines(keepends=True) if each.endswith(b"\n")]


def count(out: Path) -> int:
    return sum(part.read_bytes().count(b"\n") for part in out.glob("part-*.jsonl"))


def texts(out: Path) -> dict[str, str]:
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in records(out)}


def start(source: Path, out: Path, options: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "forerun", "batch", str(source), str(out), *options]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def wait_for(out: Path, wanted: int, process: subprocess.Popen[bytes]) -> None:
    while count(out) < wanted:
        if process.poll() is not None and count(out) < wanted:
            raise SystemExit(f"the job ended with status {process.returncode} before {wanted} records; see the log")
        sleep(0.05)


def speed(source: Path, out: Path, options: list[str], total: int, log: Path) -> float:
    """New tokens a second between the first twentieth of the records and the last: without loading and the end."""
    process = start(source, out, options, log)
    first, last = max(1, total // 20), total - total // 20
    wait_for(out, first, process)
    begun, there = perf_counter(), count(out)
    wait_for(out, last, process)
    seconds, now = perf_counter() - begun, count(out)
    assert process.wait() == 0, "the job failed; see the log"
    tokens = [each["response"]["body"]["usage"]["completion_tokens"] for each in records(out)]
    return sum(tokens[there:now]) / seconds


def actors() -> list[int]:
    """Processes of this run's actors."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"ray::MapWorker" in (each / "cmdline").read_bytes()
                and MARK.encode() in (each / "environ").read_bytes()
            ):
                found.append(int(each.name))
        except OSError:
            continue
    return found


def kills(source: Path, out: Path, options: list[str], total: int, log: Path) -> dict[str, Any]:
    """A job on two nodes that loses an actor, its driver and a node, each at its share of the records."""
    from ray.cluster_utils import Cluster

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
        assert process.wait() == 0, "the job failed; see the log"
    finally:
        cluster.shutdown()
    return {"killed_at_records": seen, "seconds": round(perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="an empty folder")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens of each")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--method", help="the target's default where none is named")
    parser.add_argument("--max-rows", type=int, default=16, help="of each engine")
    parser.add_argument("--only", choices=("speed", "kills"))
    given = parser.parse_args()
    os.environ["FORERUN_BENCH_MARK"] = MARK
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's actors would yield to all else, one engine does not
    out, total = given.out, given.prompts
    out.mkdir(parents=True, exist_ok=True)
    source, log = out / "in.jsonl", out / "log.txt"
    write_input(source, total, given.tokens)
    options = ["--target", given.target] + (["--method", given.method] if given.method else [])
    found: dict[str, Any] = {"prompts": total, "tokens": given.tokens, "target": given.target, "method": given.method}
    rows = ["--max-rows", str(given.max_rows)]
    alone = out / "one-engine"
    one = speed(source, alone, [*options, *rows, "--threads", "2"], total, log)
    found["one_engine_tokens_per_s"] = round(one, 1)
    if given.only != "kills":
        # As many rows in all: what is compared are two engines and one, not batches of two sizes.
        half = ["--max-rows", str(max(1, given.max_rows // 2)), "--ray", "local", "--actors", "2", "--threads", "1"]
        two = speed(source, out / "two-actors", [*options, *half], total, log)
        found |= {"two_actors_tokens_per_s": round(two, 1), "ratio": round(two / one, 3)}
        found["same_texts"] = texts(out / "two-actors") == texts(alone)
    if given.only != "speed":
        found |= kills(source, out / "killed", [*options, *rows], total, log)
        lines = [each["line"] for each in records(out / "killed")]
        found["records"], found["lines"] = len(lines), len(set(lines))
        found["same_texts_after_kills"] = texts(out / "killed") == texts(alone)
    print(json.dumps(found, indent=1))
    right = found.get("same_texts", True) and found.get("same_texts_after_kills", True)
    sys.exit(0 if right and found.get("records", total) == found.get("lines", total) == total else 1)


if __name__ == "__main__":
    main()
