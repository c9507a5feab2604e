"""Text of the target's own making: what a draft has to predict, so what it is best trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors.torch import load_file

from forerun.api.load import Decoder
from forerun.methods import AR
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.train.loop import claim, save_tensors

ROWS = 64  # windows of a file, decoded together


def own_output(
    target: CausalLM,
    stream: np.ndarray,
    work: Path,
    *,
    sequences: int,
    prompts: Sequence[int],
    length: int,
    temperatures: Sequence[float],
    top_p: float = 1.0,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[np.ndarray]:
    """Make `sequences` windows [N, length] that begin with tokens of `stream` [n] and go on as the target does.

    Windows of a file have one of the `temperatures` in turn, and behind these in turn one of the lengths of `prompts`.
    Files that are there are not made again; more sequences begin with the same files. Raises ValueError where `work`
    holds another target's or other settings.
    """
    rows = min(ROWS, max(1, sequences // len(temperatures)))
    settings = {"prompts": list(prompts), "length": length, "temperatures": list(temperatures), "top_p": top_p}
    claim(work, settings | {"target": target.fingerprint, "rows": rows, "seed": seed})
    decoder = Decoder(target.model, method=AR())
    found, begun, made = [], perf_counter(), 0
    for part in range(-(-sequences // rows)):
        path = work / f"{part:05d}.safetensors"
        if not path.exists():
            prompt = prompts[part // len(temperatures) % len(prompts)]
            starts = np.random.default_rng([seed, part]).integers(len(stream) - prompt, size=rows)
            begins = [stream[start : start + prompt].tolist() for start in starts]
            params = SamplingParams(
                max_new_tokens=length - prompt,
                temperature=temperatures[part % len(temperatures)],
                top_p=top_p,
                ignore_eos=True,
                seed=seed + part * rows,
            )
            done = decoder.generate(begins, params)
            windows = [begin + each.tokens for begin, each in zip(begins, done, strict=True)]
            save_tensors(path, {"tokens": torch.tensor(windows, dtype=torch.int32)})
            made += rows
            if part % 4 == 3:
                left = (perf_counter() - begun) / made * (sequences - (part + 1) * rows)
                say(f"own output {(part + 1) * rows}/{sequences} sequences, {max(0.0, left) / 60:.0f} min left")
        found.append(load_file(path)["tokens"].numpy()[: sequences - part * rows])
    return found
