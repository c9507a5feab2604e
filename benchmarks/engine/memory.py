"""Resident memory while many requests go through one engine, from several threads.

    python benchmarks/engine/memory.py [--requests 500] [--threads 4] [--method pacer-ouroboros] [--prefix-bytes N]

Every fourth request is a stream that is let go in the middle. The last line is one JSON object: resident MB after each
tenth of the requests, and after the decoder was deleted and garbage collected.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import threading
from pathlib import Path

import forerun
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
            options = {"max_new_tokens": chance.randrange(4, 48), "temperature": chance.choice([0.0, 1.0])}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--method", default="pacer-ouroboros")
    parser.add_argument("--prefix-bytes", type=int, default=2**28)
    asked = parser.parse_args()
    found = serve(asked.requests, asked.threads, asked.method, asked.prefix_bytes)
    gc.collect()
    print(json.dumps({"resident_mb": found, "after_del_mb": resident(), "arguments": vars(asked)}))


if __name__ == "__main__":
    main()
