"""The recipe of the embedded pair, stage by stage; every stage resumes where it was stopped."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun.api import Decoder
from forerun.files import write_text
from forerun.methods import AR, SD
from forerun.metrics import summarise
from forerun.params import SamplingParams
from forerun.train.curves import plot_curves
from forerun.train.data import Windows, tokenize
from forerun.train.distill import distill
from forerun.train.lm import deepen, mean_loss, new_llama, next_token_loss
from forerun.train.loop import TrainConfig, claim, train
from forerun.train.own_output import own_output
from forerun.train.recipe import PairRecipe
from forerun.zoo.corpus import Split, held_out_prompts, source_files
from forerun.zoo.quantise import WEIGHTS, load_quantised, save_quantised
from forerun.zoo.tokenizer import train_tokenizer

Say = Callable[[str], None]


class Corpus:
    """The splits of a source tree as token streams, made once and kept in the working folder."""

    def __init__(self, work: Path, recipe: PairRecipe, root: Path | None) -> None:
        self.work, self.root = work, root
        folder = work / "tokenizer"
        if not folder.exists():
            texts = (text for _, text in source_files("train", root))
            half = work / "tokenizer.tmp"
            train_tokenizer(texts, recipe.vocabulary).save_pretrained(half)
            half.rename(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def stream(self, split: Split) -> np.ndarray:
        """A split as one token stream [n]."""
        path = self.work / "tokens" / f"{split}.safetensors"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            tokens = tokenize(self.tokenizer, [text for _, text in source_files(split, self.root)])
            temporary = path.with_suffix(".tmp")
            save_file({"tokens": tokens}, temporary)
            os.replace(temporary, path)
        return load_file(path)["tokens"]


def held_batches(stream: np.ndarray, length: int, rows: int = 64) -> list[Tensor]:
    """`rows` fixed windows in batches of 16."""
    windows = Windows(stream, length)
    return [windows.batch(step, 16) for step in range(rows // 16)]


def train_target(work: Path, recipe: PairRecipe, corpus: Corpus, compiled: bool, say: Say) -> PreTrainedModel:
    """The target: a shallow one, then one of twice the depth that goes on from it. The last fifth of the steps of
    each uses windows of twice the length."""
    model = new_llama(
        corpus.tokenizer,
        recipe.target_width,
        recipe.target_layers,
        recipe.target_heads,
        recipe.target_mlp,
        recipe.context,
        recipe.seed,
    )
    stream = corpus.stream("train")
    held = held_batches(corpus.stream("validation"), recipe.window)

    def run(model: PreTrainedModel, config: TrainConfig, folder: str) -> None:
        short, long = Windows(stream, config.length, config.seed), Windows(stream, 2 * config.length, config.seed + 1)

        def batch(step: int) -> Tensor:
            if step < config.steps * 4 // 5:
                return short.batch(step, config.batch)
            return long.batch(step, config.batch // 2)

        train(model, next_token_loss(model), batch, lambda: mean_loss(model, held), config, work / folder, say)

    shared = TrainConfig(
        steps=recipe.target_steps, batch=recipe.batch, length=recipe.window, seed=recipe.seed, compile=compiled
    )
    run(model, shared, "target")
    if not recipe.grown_steps:
        return model
    model = deepen(model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    # It starts trained: a lower rate that falls for most of the way.
    run(
        model,
        replace(shared, steps=recipe.grown_steps, seed=recipe.seed + 10, lr=3e-3, warmup=50, cooldown=0.8),
        "target-grown",
    )
    losses = best_between(start, model, lambda: mean_loss(model, held))
    say("validation loss by share of the way from the start: " + ", ".join(f"{s}: {v:.3f}" for s, v in losses.items()))
    return model


@torch.no_grad()
def best_between(start: dict[str, Tensor], model: PreTrainedModel, loss: Callable[[], float]) -> dict[float, float]:
    """Puts the model where its loss is least on the line from weights `start` to its own, by fifths; returns the loss
    at each. On a small corpus both ends have overfitted, each to its own order of it (arXiv 2109.01903)."""
    end = {name: value.clone() for name, value in model.state_dict().items()}

    def go(share: float) -> None:
        model.load_state_dict({name: start[name].lerp(end[name], share) for name in end})

    losses = {}
    for fifths in range(6):
        go(fifths / 5)
        losses[fifths / 5] = loss()
    go(min(losses, key=losses.__getitem__))
    return losses


def new_draft(tokenizer: PreTrainedTokenizerBase, recipe: PairRecipe) -> PreTrainedModel:
    """The draft before training; heads of 64 like the target's."""
    return new_llama(
        tokenizer,
        recipe.draft_width,
        recipe.draft_layers,
        recipe.draft_heads,
        recipe.draft_mlp,
        recipe.context,
        recipe.seed + 1,
        head_size=64,
    )


def train_draft_on_corpus(work: Path, recipe: PairRecipe, corpus: Corpus, compiled: bool, say: Say) -> PreTrainedModel:
    """The draft trained on text alone: what distillation starts from, and what it is compared with."""
    model = new_draft(corpus.tokenizer, recipe)
    windows = Windows(corpus.stream("train"), recipe.window, recipe.seed + 2)
    held = held_batches(corpus.stream("validation"), recipe.window)
    config = TrainConfig(
        steps=recipe.draft_steps, batch=recipe.batch, length=recipe.window, seed=recipe.seed, compile=compiled
    )
    train(
        model,
        next_token_loss(model),
        lambda step: windows.batch(step, config.batch),
        lambda: mean_loss(model, held),
        config,
        work / "draft-corpus",
        say,
    )
    return model


def train_pair(
    work: Path, recipe: PairRecipe, root: Path | None = None, compiled: bool = True, say: Say = print
) -> dict[str, Any]:
    """Makes the whole pair under `work`, the finished models in `work/pair`; returns and stores the results.

    `root` is the source tree to learn from, by default this interpreter's standard library. Raises ValueError
    where `work` holds another recipe or the tree is too small.
    """
    if not any(True for _ in source_files("train", root)):
        raise ValueError(f"{root or 'the standard library'} holds no Python sources to learn from")
    note = {"recipe": json.dumps(asdict(recipe))}
    claim(work, json.dumps(asdict(recipe) | {"corpus": str(root.resolve()) if root else None}))
    corpus = Corpus(work, recipe, root)
    tokenizer = corpus.tokenizer
    pair = work / "pair"
    if not (pair / "target" / WEIGHTS).exists():
        tokenizer.save_pretrained(pair / "target")
        save_quantised(train_target(work, recipe, corpus, compiled, say), pair / "target", note, bits=6)
    target = load_quantised(pair / "target")
    draft = train_draft_on_corpus(work, recipe, corpus, compiled, say)
    test = held_batches(corpus.stream("test"), recipe.window)
    corpus_loss = mean_loss(draft, test)
    stream = corpus.stream("train")
    if not (pair / "draft" / WEIGHTS).exists():
        own = own_output(
            target,
            stream,
            work / "own-output",
            sequences=recipe.own_sequences,
            length=recipe.window,
            seed=recipe.seed,
            say=say,
        )
        config = TrainConfig(
            steps=recipe.distill_steps,
            batch=recipe.batch,
            length=recipe.window,
            lr=3e-3,
            seed=recipe.seed,
            compile=compiled,
        )
        distill(target, draft, own, stream, config, work / "draft", say=say)
        tokenizer.save_pretrained(pair / "draft")
        save_quantised(draft, pair / "draft", note)
    prompts = held_out_prompts(tokenizer, "test", tokens=min(128, recipe.context // 4), root=root)
    results = gate(target, load_quantised(pair / "draft"), tokenizer, corpus_loss, test, prompts)
    results["recipe"] = asdict(recipe)
    results["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    results["sha256"] = {
        part: hashlib.sha256((pair / part / WEIGHTS).read_bytes()).hexdigest() for part in ("target", "draft")
    }
    write_text(pair / "results.json", json.dumps(results, indent=1) + "\n")
    plot_curves(work, pair / "curves.png")
    for name, value in results["gate"].items():
        say(f"gate {name}: {value}")
    return results


def distinct_share(tokens: list[int], n: int = 4) -> float:
    """Distinct n-grams / n-grams of an output; low where it loops."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def gate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft_corpus_loss: float,
    test: list[Tensor],
    prompts: list[list[int]],
) -> dict[str, Any]:
    """Whether the pair is fit to measure with, on files that no stage has seen; see docs/results/pair.md."""
    results: dict[str, Any] = {"distinct_4gram_share": {}, "sd": {}}
    for temperature in (0.0, 0.8):
        params = SamplingParams(
            max_new_tokens=min(128, target.config.max_position_embeddings // 2),
            temperature=temperature,
            seed=0,
            ignore_eos=True,
        )
        plain = Decoder(target, tokenizer, method=AR()).generate(prompts, params)
        shares = [distinct_share(completion.tokens) for completion in plain]
        results["distinct_4gram_share"][str(temperature)] = round(statistics.median(shares), 4)
        drafted = Decoder(target, tokenizer, draft, SD(gamma=5), guard=False).generate(prompts, params)
        stats = summarise([step for completion in drafted for step in completion.steps], seconds=0.0)
        results["sd"][str(temperature)] = {"gamma": 5, "tau": round(stats.tau, 4), "alpha": round(stats.alpha, 4)}
    loss = mean_loss(target, test)
    share = results["distinct_4gram_share"]["0.0"]
    results["loss"] = {
        "target": round(loss, 4),
        "draft_on_corpus": round(draft_corpus_loss, 4),
        "draft_distilled": round(mean_loss(draft, test), 4),
    }
    results["parameters"] = {"target": target.num_parameters(), "draft": draft.num_parameters()}
    results["gate"] = {
        "target's loss at least 0.4 nats below the draft's": f"{draft_corpus_loss - loss:.3f} "
        + ("passed" if draft_corpus_loss - loss >= 0.4 else "MISSED"),
        "median distinct 4-gram share at least 0.5": f"{share:.3f} " + ("passed" if share >= 0.5 else "MISSED"),
    }
    return results
