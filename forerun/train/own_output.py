"""Text of the target's own making: what a draft has to predict, so what it is best trained on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from forerun.api import Decoder
from forerun.methods import AR
from forerun.params import SamplingParams
from forerun.train.loop import claim

# They take turns: drafts are used greedily and not, right behind a prompt and far from it.
TEMPERATURES = (0.0, 0.8)
PROMPT_SHARES = (1 / 8, 1 / 4, 1 / 2)  # of a window


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of all weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def own_output(
    target: PreTrainedModel,
    stream: np.ndarray,
    work: Path,
    *,
    sequences: int,
    length: int,
    rows: int = 64,
    seed: int = 0,
    temperatures: Sequence[float] = TEMPERATURES,
    top_p: float = 1.0,
    prompt_shares: Sequence[float] = PROMPT_SHARES,
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """Windows [sequences, length + 1] that begin with tokens of `stream` [n] and go on as the target does, each `rows`
    of them at the next of `temperatures`.

    Every `rows` windows are one file in `work`, and those that are there are not made again. Raises ValueError where
    they are another target's.
    """
    mark = {"target": fingerprint(target), "length": length, "rows": rows, "seed": seed}
    if (tuple(temperatures), top_p) != (TEMPERATURES, 1.0):
        mark |= {"temperatures": list(temperatures), "top_p": top_p}
    if tuple(prompt_shares) != PROMPT_SHARES:
        mark |= {"prompt_shares": list(prompt_shares)}
    claim(work, json.dumps(mark))
    rows = min(rows, sequences)
    decoder = Decoder(target, method=AR())
    parts, begun, made = [], perf_counter(), 0
    for part in range(-(-sequences // rows)):
        path = work / f"{part:05d}.safetensors"
        if not path.exists():
            prompt = int(length * prompt_shares[part // len(temperatures) % len(prompt_shares)])
            rng = np.random.default_rng([seed, part])
            starts = rng.integers(len(stream) - prompt, size=rows)
            completions = decoder.generate(
                [stream[start : start + prompt].tolist() for start in starts],
                SamplingParams(
                    max_new_tokens=length + 1 - prompt,
                    temperature=temperatures[part % len(temperatures)],
                    top_p=top_p,
                    ignore_eos=True,
                    seed=seed + part * rows,
                ),
            )
            windows = [
                np.concatenate([stream[start : start + prompt], np.array(completion.tokens, dtype=stream.dtype)])
                for start, completion in zip(starts, completions, strict=True)
            ]
            temporary = path.with_suffix(".tmp")
            save_file({"tokens": np.stack(windows)}, temporary)
            os.replace(temporary, path)
            made += rows
            if part % 4 == 3:
                left = (perf_counter() - begun) / made * (sequences - (part + 1) * rows)
                say(f"own output {(part + 1) * rows}/{sequences} sequences, {max(0.0, left) / 60:.0f} min left")
        parts.append(load_file(path)["tokens"])
    return np.concatenate(parts)[:sequences]


def behind_prompts(
    target: PreTrainedModel,
    stream: np.ndarray,
    work: Path,
    *,
    sequences: int,
    prompt: int,
    output: int,
    seed: int,
    top_p: float = 1.0,
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """`own_output` for layers: windows [sequences, prompt + output], greedy and at temperature 1 in turns."""
    length = prompt + output
    return own_output(
        target,
        stream,
        work,
        sequences=sequences,
        length=length - 1,
        rows=min(64, max(1, sequences // 2)),
        seed=seed,
        temperatures=(0.0, 1.0),
        top_p=top_p,
        prompt_shares=((prompt + 0.5) / (length - 1),),
        say=say,
    )
