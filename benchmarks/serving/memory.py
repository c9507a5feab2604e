"""Resident memory while many requests go through one engine, from several threads, or while a long prompt is read.

    python benchmarks/serving/memory.py [--requests 500] [--threads 4] [--method pacer-ouroboros] [--prefix-bytes N]
    python benchmarks/serving/memory.py --context 32768 --model qwen-coder-draft [--method ar] [--new 8]

Every fourth request is a stream that is let go in the middle. The last line is one JSON object: resident MB after each
tenth of the requests, and after the decoder was deleted and garbage collected.

With --context one request fills that many positions, after a short one. The line has the peak of resident MB in it,
less what was resident before the model was loaded, and what weights, keys and values take by themselves. Linux alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import threading
from pathlib import Path

import forerun
from forerun.cli.info import file_facts
from forerun.train.corpus import held_out_prompts


def resident() -> float:
    """MB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


def serve(requests: int, threads: int, method: str, prefix_bytes: int) -> list[float]:
    """Resident MB at the start and after each tenth of the requests."""
    decoder = forerun.load(method=method, prefix_bytes=prefix_bytes)
    prompts = held_out_prompts(decoder.tokenizer, "test", count=40)
    found, lock, done = [resident()], threading.Lock(), 0

    def work(number: int) -> None:
        nonlocal done
        chance = random.Random(number)
        for turn in range(requests // threads):
            prompt = prompts[chance.randrange(len(prompts))][: chance.randrange(16, 128)]
            options = {
                "max_new_tokens": chance.randrange(4, 48),
                "temperature": chance.choice([0.0, 1.0]),
            }
            if turn % 4:
                decoder.generate(prompt, **options)
            else:
                next(decoder.stream(prompt, **options))
            with lock:
                done += 1
                if done % (requests // 10) == 0:
                    found.append(resident())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    cache = decoder.engine.target.cache
    print(f"rows left: {len(cache.ids)}, KV buffers {cache.allocated_bytes / 1e6:.0f} MB")
    return found


def peak() -> float:
    """The most MB of this process that were in memory since the last `forget_peak`."""
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return round(int(found) * 1024 / 1e6, 1)


def forget_peak() -> None:
    """Let `peak` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def read(model: str, context: int, new: int, method: str, prefix_bytes: int) -> dict[str, float]:
    """MB that a request which fills `context` positions takes."""
    forerun.load(method="ar").generate(
        "a", max_new_tokens=2
    )  # what the libraries take with any model
    gc.collect()
    before = resident()
    decoder = forerun.load(model, method=method, prefix_bytes=prefix_bytes)
    decoder.generate([1000, 1001, 1002], max_new_tokens=4)
    forget_peak()
    chance, most = random.Random(0), decoder.target.vocab_size // 2
    prompt = [chance.randrange(most) for _ in range(context - new)]
    decoder.generate(prompt, max_new_tokens=new)
    parts = {
        "weights_mb": round(file_facts(model)["weight_bytes"] / 1e6, 1),
        "kv_mb": round(context * decoder.target.position_bytes / 1e6, 1),
    }
    taken = round(peak() - before, 1)
    return {
        **parts,
        "peak_mb": taken,
        "over": round(taken / sum(parts.values()), 3),
        "before_mb": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--method", default="pacer-ouroboros")
    parser.add_argument("--prefix-bytes", type=int, default=2**28)
    parser.add_argument("--context", type=int, help="positions that one request fills")
    parser.add_argument("--model", default="qwen-coder-draft", help="a GGUF model, for --context")
    parser.add_argument("--new", type=int, default=8, help="new tokens of --context")
    asked = parser.parse_args()
    if asked.context is not None:
        facts = read(asked.model, asked.context, asked.new, asked.method, asked.prefix_bytes)
        print(json.dumps(facts | {"arguments": vars(asked)}))
        return
    found = serve(asked.requests, asked.threads, asked.method, asked.prefix_bytes)
    gc.collect()
    print(json.dumps({"resident_mb": found, "after_del_mb": resident(), "arguments": vars(asked)}))


if __name__ == "__main__":
    main()
