"""llama.cpp's greedy tokens and their probabilities, from the wheel `xllamacpp` (AVX2).

`.ci/llama-cpp install` makes an environment with forerun and this wheel, because the wheel is
large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xllamacpp as llama

_SILENT = -1


@dataclass(frozen=True)
class Step:
    """A token, and log-probabilities {token: its own} of the most probable ones at its place."""

    token: int
    logs: dict[int, float]


class LlamaLogits:
    """A model of llama.cpp, with keys and values in float32.

    Args:
        path: its GGUF file.
        context: tokens of a text.
        threads: their number.

    Raises:
        RuntimeError: llama.cpp cannot open the file.
    """

    def __init__(self, path: Path, context: int, threads: int = 1) -> None:
        params = llama.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.verbosity = _SILENT
        for processors in (params.cpuparams, params.cpuparams_batch):
            processors.n_threads = threads
        params.cache_type_k = llama.ggml_type.GGML_TYPE_F32
        params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = llama.Server(params)

    def greedy(self, prompt: Sequence[int], count: int, top: int) -> list[Step]:
        """Return `count` greedy tokens after a prompt, each with the `top` most probable ones."""
        answer = self._server.handle_completions(
            {
                "prompt": list(prompt),
                "n_predict": count,
                "logprobs": top,
                "n_probs": top,
                "temperature": 0.0,
                "samplers": ["temperature"],
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        return [
            Step(step["id"], {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]})
            for step in answer["choices"][0]["logprobs"]["content"]
        ]
