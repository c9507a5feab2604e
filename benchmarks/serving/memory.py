"""Resident memory of one engine while it serves many requests, or reads a long prompt.

    python benchmarks/serving/memory.py [--requests 500] [--threads 4] [--method pacer-ouroboros]
        [--prefix-bytes N]
    python benchmarks/serving/memory.py --context 32768 --model qwen-coder-draft
        [--method default] [--new 8]

Requests come from several threads, and every fourth one is a stream that is abandoned in the
middle. The last line is one JSON object: resident MB after each tenth of the requests, and after
the decoder was deleted and garbage collected.

With --context one request fills that many positions, after a short one. The line has the peak of
resident MB in it, less what was resident before the model was loaded, and what weights, keys and
values take by themselves. It runs on Linux alone.
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

PAGE_BYTES = 4096


def resident() -> float:
    """Return the MB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * PAGE_BYTES / 1e6, 1)


def peak() -> float:
    """Return the most MB that were in memory since the last `forget_peak`."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return round(int(kilobytes) * 1024 / 1e6, 1)


def forget_peak() -> None:
    """Let `peak` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


class Clients:
    """Threads that send requests to one decoder.

    Attributes:
        memory: resident MB at the start and after each tenth of the requests.
    """

    def __init__(self, decoder: forerun.Decoder, requests: int, threads: int) -> None:
        self.decoder = decoder
        self.requests = requests
        self.threads = threads
        self.prompts = held_out_prompts(decoder.tokenizer, "test", count=40)
        self.memory = [resident()]
        self._lock = threading.Lock()
        self._done = 0

    def run(self) -> None:
        """Send all requests."""
        threads = [
            threading.Thread(target=self._work, args=(number,)) for number in range(self.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        for turn in range(self.requests // self.threads):
            prompt = self.prompts[chance.randrange(len(self.prompts))][: chance.randrange(16, 128)]
            new_tokens = chance.randrange(4, 48)
            temperature = chance.choice([0.0, 1.0])
            options = {"max_new_tokens": new_tokens, "temperature": temperature}
            if turn % 4:
                self.decoder.generate(prompt, **options)
            else:
                next(self.decoder.stream(prompt, **options))
            with self._lock:
                self._done += 1
                if self._done % (self.requests // 10) == 0:
                    self.memory.append(resident())


def serve(requests: int, threads: int, method: str, prefix_bytes: int) -> list[float]:
    """Return resident MB at the start and after each tenth of the requests."""
    decoder = forerun.load(method=method, prefix_bytes=prefix_bytes)
    clients = Clients(decoder, requests, threads)
    clients.run()
    cache = decoder.engine.target.cache
    print(f"rows left: {len(cache.ids)}, KV buffers {cache.allocated_bytes / 1e6:.0f} MB")
    return clients.memory


def read(model: str, context: int, new: int, method: str, prefix_bytes: int) -> dict[str, float]:
    """Return the MB that a request takes which fills `context` positions."""
    # What the libraries take with any model does not count.
    forerun.load(method="ar").generate("a", max_new_tokens=2)
    gc.collect()
    before = resident()
    # A method that is named may bring the target's draft model along.
    named = None if method == "default" else method
    decoder = forerun.load(model, method=named, prefix_bytes=prefix_bytes)
    decoder.generate([1000, 1001, 1002], max_new_tokens=4)
    forget_peak()
    chance = random.Random(0)
    vocabulary = decoder.target.vocab_size // 2
    prompt = [chance.randrange(vocabulary) for _ in range(context - new)]
    decoder.generate(prompt, max_new_tokens=new)
    weights = round(file_facts(model)["weight_bytes"] / 1e6, 1)
    kv = round(context * decoder.target.position_bytes / 1e6, 1)
    taken = round(peak() - before, 1)
    return {
        "weights_mb": weights,
        "kv_mb": kv,
        "peak_mb": taken,
        "over": round(taken / (weights + kv), 3),
        "before_mb": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--method", default="pacer-ouroboros", help="of the target: default")
    parser.add_argument("--prefix-bytes", type=int, default=2**28)
    parser.add_argument("--context", type=int, help="positions that one request fills")
    parser.add_argument("--model", default="qwen-coder-draft", help="a GGUF model, for --context")
    parser.add_argument("--new", type=int, default=8, help="new tokens of --context")
    args = parser.parse_args()
    if args.context is not None:
        facts = read(args.model, args.context, args.new, args.method, args.prefix_bytes)
        print(json.dumps(facts | {"arguments": vars(args)}))
        return
    memory = serve(args.requests, args.threads, args.method, args.prefix_bytes)
    gc.collect()
    record = {"resident_mb": memory, "after_del_mb": resident(), "arguments": vars(args)}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
