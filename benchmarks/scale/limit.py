"""What memory allows: GB/s that a copy gets, and from it the fastest that plain decoding of a shape can be."""

import json
import sys
from time import perf_counter

import torch

from forerun.bench.sizes import SHAPES


def copy_bandwidth(device: str, size: int) -> float:
    """GB/s, read and written bytes counted, of the best of ten copies of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into, best = torch.empty_like(source), 0.0
    for _ in range(10):
        begun = perf_counter()
        into.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        best = max(best, 2 * size / (perf_counter() - begun) / 1e9)
    return best


if __name__ == "__main__":
    device, width, *shapes = sys.argv[1:]
    bandwidth = copy_bandwidth(device, 2**30 if device == "cpu" else 2**33)
    limits = {name: round(bandwidth * 1e9 / (int(width) * SHAPES[name].weights), 2) for name in shapes}
    print(json.dumps({"copy_gb_per_s": round(bandwidth, 1), "tokens_per_s_at_most": limits}))
