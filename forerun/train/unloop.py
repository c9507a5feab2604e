"""A small model falls into loops when it decodes greedily, which flatters every speculative method. This trains it out.

The loss is that of Welleck et al. (arXiv 1908.04319): on the model's own greedy output, tokens that complete a repeated
n-gram are made less likely. Rounds of new output, the share of plain text and the n-gram length are our choices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.train.data import Windows
from forerun.train.lm import logits_of
from forerun.train.loop import TrainConfig, train
from forerun.train.own_output import own_output

NGRAM = 16  # long: people repeat short ones for good reasons
WEIGHT = 0.5  # of the unlikelihood against the cross-entropy
PROMPT_SHARE = 1 / 8  # of a window
IGNORE, LEARN, AVOID = 0, 1, 2  # what a token of a batch is for


def completes_repeat(windows: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """[B, T] bool: the n tokens up to here stood in the same window [B, T] before."""
    repeated = np.zeros(windows.shape, dtype=bool)
    for row, tokens in enumerate(windows.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(n, len(tokens) + 1):
            gram = tuple(tokens[end - n : end])
            repeated[row, end - 1] = gram in seen
            seen.add(gram)
    return repeated


def unlikelihood_loss(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Cross-entropy of tokens to LEARN plus WEIGHT times -log(1 - p) of tokens to AVOID, means in nats.

    Input [B, 2, T+1]: tokens, and what each is for.
    """

    def loss(batch: Tensor) -> Tensor:
        tokens, use = batch[:, 0], batch[:, 1, 1:]
        logp = logits_of(model, tokens[:, :-1]).float().log_softmax(-1)
        logp = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        learn, avoid = use == LEARN, use == AVOID
        wanted = -(logp * learn).sum() / learn.sum().clamp(min=1)
        # Deep in a loop p is nearly 1, and there the gradient is needed most: no coarse bound on 1 - p.
        unwanted = -((-torch.expm1(logp.clamp(max=-1e-6))).log() * avoid).sum() / avoid.sum().clamp(min=1)
        return wanted + WEIGHT * unwanted

    return loss


def unloop(
    model: PreTrainedModel,
    stream: np.ndarray,
    config: TrainConfig,
    work: Path,
    *,
    rounds: int,
    sequences: int,
    evaluate: Callable[[], float],
    say: Callable[[str], None] = print,
) -> None:
    """Trains `model` in place: each round makes greedy windows anew and takes `config.steps` steps on them.

    Half of a batch is plain text from `stream` [n]. Resumes from `work`.
    """
    text = Windows(stream, config.length, config.seed + 3)
    half = config.batch // 2
    for number in range(rounds):
        out = work / f"unloop-{number}"
        own = own_output(
            model,
            stream,
            out / "own-output",
            sequences=sequences,
            length=config.length,
            temperatures=(0.0,),
            prompt_shares=(PROMPT_SHARE,),
            seed=config.seed + 1000 * (number + 1),
            say=say,
        )
        use = np.where(completes_repeat(own), AVOID, IGNORE)
        use[:, : int(config.length * PROMPT_SHARE)] = IGNORE  # what people wrote may repeat itself
        say(f"{out.name} {(use == AVOID).mean():.3f} of the greedy output repeats {NGRAM} tokens")

        def batch(step: int, own: np.ndarray = own, use: np.ndarray = use, number: int = number) -> Tensor:
            rows = np.random.default_rng([config.seed, number, step]).integers(len(own), size=half)
            mine = torch.from_numpy(np.stack([own[rows], use[rows]], axis=1).astype(np.int64))
            plain = text.batch(number * config.steps + step, config.batch - half)
            return torch.cat([mine, torch.stack([plain, torch.full_like(plain, LEARN)], dim=1)])

        train(model, unlikelihood_loss(model), batch, evaluate, config, out, say)
