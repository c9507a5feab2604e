"""The recipe of the embedded pair, stage by stage; every stage resumes where it was stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun.train.data import Windows
from forerun.train.lm import mean_loss, new_llama, next_token_loss
from forerun.train.loop import TrainConfig, train
from forerun.zoo.corpus import Split, stdlib_files
from forerun.zoo.tokenizer import train_tokenizer


@dataclass(frozen=True)
class PairRecipe:
    """Sizes and lengths of the embedded pair. The defaults made the bundled weights."""

    vocabulary: int = 4096
    context: int = 1024
    # Five heads of 64 without grouping: fits into the shape of any bigger Llama with 8 or more KV heads.
    target_width: int = 320
    target_layers: int = 8
    target_heads: int = 5
    target_mlp: int = 864
    target_steps: int = 2500  # of 8192 tokens
    seed: int = 0


def tokenize(tokenizer: PreTrainedTokenizerBase, split: Split, seed: int = 0) -> np.ndarray:
    """The split's files in a shuffled order as one stream [n] of uint16, an end-of-text before each."""
    texts = [text for _, text in stdlib_files(split)]
    order = np.random.default_rng(seed).permutation(len(texts))
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array([tokenizer.bos_token_id, *rows[i]], dtype=np.uint16) for i in order])


def validation_batches(stream: np.ndarray, length: int = 512, rows: int = 64) -> list[Tensor]:
    """`rows` fixed windows in batches of 16."""
    windows = Windows(stream, length)
    return [windows.batch(step, 16) for step in range(rows // 16)]


def make_tokenizer(work: Path, recipe: PairRecipe) -> PreTrainedTokenizerFast:
    """The tokenizer learnt from the training files, kept in `work/tokenizer`."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        train_tokenizer((text for _, text in stdlib_files("train")), recipe.vocabulary).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def train_target(work: Path, recipe: PairRecipe, say: Callable[[str], None] = print):
    """The target; its last fifth of steps uses windows as long as its context."""
    tokenizer = make_tokenizer(work, recipe)
    model = new_llama(
        tokenizer,
        recipe.target_width,
        recipe.target_layers,
        recipe.target_heads,
        recipe.target_mlp,
        recipe.context,
        recipe.seed,
    )
    stream = tokenize(tokenizer, "train")
    held = validation_batches(tokenize(tokenizer, "validation"))
    config = TrainConfig(steps=recipe.target_steps, batch=16, length=recipe.context // 2, seed=recipe.seed)
    short, long = Windows(stream, config.length, recipe.seed), Windows(stream, 2 * config.length, recipe.seed + 1)

    def batch(step: int) -> Tensor:
        if step < config.steps * 4 // 5:
            return short.batch(step, config.batch)
        return long.batch(step, config.batch // 2)

    return train(model, next_token_loss(model), batch, lambda: mean_loss(model, held), config, work / "target", say)
