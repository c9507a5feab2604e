"""Transformers' continuous batching (`model.generate_batch`), plain decoding, as a server under load."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from forerun.bench.load import Event, Job
from forerun.bench.peers import Peers

PAGE, CHUNK = 32, 512  # tokens of a page of its cache, and the most tokens of one forward
POLL = 1.0  # seconds


class BatchingServer:
    """Transformers' own manager, which decodes in a thread of its own and notes when each token was there.

    Its cache holds `rows` requests of `length` tokens; prefixes are not shared, as ours are not in a bench.
    What is sampled follows from the seed and from when requests come: all rows draw from one source.
    """

    def __init__(self, peers: Peers, rows: int, length: int) -> None:
        config = GenerationConfig(**peers.drawing(), eos_token_id=sorted(peers.ends) or -1, pad_token_id=peers.pad)
        sizes = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=rows * -(-(length + 1) // PAGE) + 1,
            max_batch_tokens=CHUNK,
            max_requests_per_batch=rows,
            allow_block_sharing=False,
        )
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it misses psutil; failures come back
        model: Any = peers.target
        self.manager = model.init_continuous_batching(config, sizes)
        if peers.params.seed is not None:
            torch.manual_seed(peers.params.seed)
        self.manager.start()

    def add(self, job: Job) -> int:
        name = self.manager.add_request(list(job.prompt), max_new_tokens=job.new_tokens, record_timestamps=True)
        return int(name.removeprefix("req_"))

    def step(self, timeout: float | None) -> list[Event]:
        found = self.manager.get_result(timeout=POLL if timeout is None else min(timeout, POLL))
        if found is None:
            if not self.manager.is_running():
                raise RuntimeError(
                    f"transformers' continuous batching stopped: {self.manager.background_thread_status}"
                )
            return []
        if found.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {found.error}")
        key, last = int(found.request_id.removeprefix("req_")), len(found.generated_tokens) - 1
        tokens = zip(found.generated_tokens, found.timestamps, strict=True)
        return [
            Event(key, found.lifespan[0]),
            *(Event(key, at, [token], index == last) for index, (token, at) in enumerate(tokens)),
        ]

    def close(self) -> None:
        """Ends the thread."""
        self.manager.stop(block=True)
