"""The recipe of the embedded pair, from this machine's standard library, stage by stage; every stage resumes where it
was stopped: python -m benchmarks.training.pair [--out runs/pair] [--corpus TREE] [--set FIELD=N ...] [--threads N]

Tokenizer, target, draft, and whether the pair is fit to measure with (docs/results/pair.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from benchmarks.training.quantise import save_quantised
from benchmarks.training.tokenizer import train_tokenizer
from forerun.api.load import Decoder
from forerun.engine.stats import summarise
from forerun.files import write_text
from forerun.methods import AR, SD
from forerun.sampling.params import SamplingParams
from forerun.train.corpus import Split, held_out_prompts, source_files
from forerun.train.draft import DraftRecipe, train_draft
from forerun.train.loop import TrainConfig, claim, mixed_precision, save_tensors, train
from forerun.train.run import Run
from forerun.train.texts import tokenize
from forerun.zoo.quantise import WEIGHTS, load_quantised

Say = Callable[[str], None]


@dataclass(frozen=True)
class PairRecipe:
    """Sizes and lengths of the pair. The defaults made the bundled weights (`zoo/weights/results.json`)."""

    vocabulary: int = 4096
    context: int = 1024
    batch: int = 16  # windows of `window` tokens a step
    window: int = 512
    # Five heads of 64 without grouping: fits into the shape of any bigger Llama with 8 or more KV heads.
    target_width: int = 320
    target_layers: int = 8
    target_heads: int = 5
    target_mlp: int = 864
    target_steps: int = 2500  # of 8192 tokens
    # Shallow first, then at twice the depth, which costs twice the time a step. 0: it stays shallow.
    grown_steps: int = 1100  # of 8192 tokens
    # Two layers are the fewest that can copy from the context; width costs a CPU little.
    draft_width: int = 192
    draft_layers: int = 2
    draft_heads: int = 2
    draft_mlp: int = 512
    draft_steps: int = 1500  # of 8192 tokens, on the corpus alone
    own_sequences: int = 1536  # of 513 tokens
    distill_steps: int = 1600  # of 8192 tokens, half of them the target's own
    seed: int = 0


class Windows:
    """Windows of `length + 1` tokens over a flat token stream, in a new order and phase every epoch.

    `batch(step, size)` is the same whenever it is asked for: no iterator state to save.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int = 0) -> None:
        if len(stream) < 2 * length + 2:
            raise ValueError(
                f"the data holds {len(stream)} tokens, too few for windows of {length}: "
                f"give at least {2 * length + 2} tokens or a smaller length"
            )
        self.stream, self.length, self.seed = stream, length, seed
        self.per_epoch = (len(stream) - length - 1) // length
        self._order = lru_cache(maxsize=2)(self._new_order)

    def _new_order(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        return rng.permutation(self.per_epoch) * self.length + rng.integers(self.length)

    def batch(self, step: int, size: int) -> Tensor:
        """Tokens [size, length + 1] of the given step."""
        starts = [
            self._order(i // self.per_epoch)[i % self.per_epoch]
            for i in range(step * size, (step + 1) * size)
        ]
        rows = np.stack([self.stream[start : start + self.length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))


def new_llama(
    tokenizer: PreTrainedTokenizerBase,
    width: int,
    layers: int,
    heads: int,
    mlp: int,
    context: int,
    seed: int,
) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings over the tokenizer's vocabulary, with heads of 64."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=64,
            intermediate_size=mlp,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@torch.no_grad()
def deepen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of twice the layers that computes the same: every layer is followed by a copy of itself that adds
    nothing yet, its output projections being 0. For training on; stacking is an old idea (Gong et al. 2019), the
    silent copies are those of LLaMA Pro (arXiv 2401.02415)."""
    config = LlamaConfig(
        **model.config.to_dict() | {"num_hidden_layers": 2 * model.config.num_hidden_layers}
    )
    deep = LlamaForCausalLM(config)
    old, new = model.state_dict(), {}
    for name, value in old.items():
        head, _, tail = name.partition("layers.")
        if not tail:
            new[name] = value
            continue
        number, _, rest = tail.partition(".")
        new[f"{head}layers.{2 * int(number)}.{rest}"] = value
        silent = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        new[f"{head}layers.{2 * int(number) + 1}.{rest}"] = (
            torch.zeros_like(value) if silent else value
        )
    deep.load_state_dict(new)
    return deep


def next_token_loss(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Mean cross-entropy in nats of tokens[:, 1:] given what stands before them, for tokens [B, T+1]."""

    def loss(tokens: Tensor) -> Tensor:
        with mixed_precision(tokens.device):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: list[Tensor]) -> float:
    """Mean of `next_token_loss` over token batches [B, T+1] of one shape."""
    loss, training = next_token_loss(model), model.training
    model.eval()
    value = sum(float(loss(batch.to(model.device))) for batch in batches) / len(batches)
    model.train(training)
    return value


def maybe_compiled(loss: Callable[[Tensor], Tensor], compiled: bool) -> Callable[[Tensor], Tensor]:
    """The loss, compiled where that is wished for and there is a C++ compiler."""
    return torch.compile(loss) if compiled and shutil.which("g++") else loss


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
            save_tensors(path, {"tokens": torch.from_numpy(tokens.astype(np.int32))})
        return load_file(path)["tokens"]


def held_batches(stream: np.ndarray, length: int, rows: int = 64) -> list[Tensor]:
    """`rows` fixed windows in batches of 16."""
    windows = Windows(stream, length)
    return [windows.batch(step, 16) for step in range(rows // 16)]


def train_target(
    work: Path, recipe: PairRecipe, corpus: Corpus, compiled: bool, say: Say
) -> PreTrainedModel:
    """The target: a shallow one, then one of twice the depth that goes on from it. The last fifth of the steps of
    each uses windows of twice the length."""
    shape = recipe.target_width, recipe.target_layers, recipe.target_heads, recipe.target_mlp
    model = new_llama(corpus.tokenizer, *shape, recipe.context, recipe.seed)
    stream = corpus.stream("train")
    held = held_batches(corpus.stream("validation"), recipe.window)

    def run(model: LlamaForCausalLM, config: TrainConfig, folder: str, seed: int) -> None:
        short, long = (
            Windows(stream, recipe.window, seed),
            Windows(stream, 2 * recipe.window, seed + 1),
        )

        def batch(step: int) -> Tensor:
            if step < config.steps * 4 // 5:
                return short.batch(step, recipe.batch)
            return long.batch(step, recipe.batch // 2)

        loss = maybe_compiled(next_token_loss(model), compiled)
        train(model, loss, batch, lambda: mean_loss(model, held), config, work / folder, say)

    run(model, TrainConfig(recipe.target_steps), "target", recipe.seed)
    if not recipe.grown_steps:
        return model
    model = deepen(model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    # It starts trained: a lower rate that falls for most of the way.
    grown = TrainConfig(recipe.grown_steps, lr=3e-3, warmup=50, cooldown=0.8)
    run(model, grown, "target-grown", recipe.seed + 10)
    losses = best_between(start, model, lambda: mean_loss(model, held))
    say(
        "validation loss by share of the way from the start: "
        + ", ".join(f"{s}: {v:.3f}" for s, v in losses.items())
    )
    return model


@torch.no_grad()
def best_between(
    start: dict[str, Tensor], model: PreTrainedModel, loss: Callable[[], float]
) -> dict[float, float]:
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


def train_draft_on_corpus(
    work: Path, recipe: PairRecipe, corpus: Corpus, compiled: bool, say: Say
) -> PreTrainedModel:
    """The draft trained on text alone: what distillation starts from, and what it is compared with."""
    shape = recipe.draft_width, recipe.draft_layers, recipe.draft_heads, recipe.draft_mlp
    model = new_llama(corpus.tokenizer, *shape, recipe.context, recipe.seed + 1)
    windows = Windows(corpus.stream("train"), recipe.window, recipe.seed + 2)
    held = held_batches(corpus.stream("validation"), recipe.window)
    loss = next_token_loss(model)
    train(
        model,
        maybe_compiled(loss, compiled),
        lambda step: windows.batch(step, recipe.batch),
        lambda: mean_loss(model, held),
        TrainConfig(recipe.draft_steps),
        work / "draft-corpus",
        say,
    )
    return model


def train_pair(
    work: Path,
    recipe: PairRecipe,
    root: Path | None = None,
    compiled: bool = True,
    say: Say = print,
) -> dict[str, Any]:
    """Makes the whole pair under `work`, the finished models in `work/pair`; returns and stores the results.

    `root` is the source tree to learn from, by default this interpreter's standard library. Raises ValueError
    where `work` holds another recipe or the tree is too small.
    """
    if not any(True for _ in source_files("train", root)):
        raise ValueError(f"{root or 'the standard library'} holds no Python sources to learn from")
    note = {"recipe": json.dumps(asdict(recipe))}
    claim(work, asdict(recipe) | {"corpus": str(root.resolve()) if root else None})
    corpus = Corpus(work, recipe, root)
    tokenizer = corpus.tokenizer
    pair = work / "pair"
    if not (pair / "target" / WEIGHTS).exists():
        tokenizer.save_pretrained(pair / "target")
        save_quantised(
            train_target(work, recipe, corpus, compiled, say), pair / "target", note, bits=6
        )
    target = load_quantised(pair / "target")
    draft = train_draft_on_corpus(work, recipe, corpus, compiled, say)
    test = held_batches(corpus.stream("test"), recipe.window)
    corpus_loss = mean_loss(draft, test)
    if not (pair / "draft" / WEIGHTS).exists():
        for name, model in (("target", target), ("draft-corpus", draft)):
            model.save_pretrained(work / "float32" / name)
            tokenizer.save_pretrained(work / "float32" / name)
        texts = work / "texts.jsonl"
        lines = [json.dumps({"text": text}) for _, text in source_files("train", root)]
        write_text(texts, "\n".join(lines))
        float32 = [str(work / "float32" / name) for name in ("target", "draft-corpus")]
        distilled = DraftRecipe(
            recipe.own_sequences,
            recipe.window,
            steps=recipe.distill_steps,
            batch=recipe.batch,
            seed=recipe.seed,
        )
        run = Run(float32[0], work / "draft", [str(texts)], say=say)
        train_draft(run, distilled, init=float32[1])
        tokenizer.save_pretrained(pair / "draft")
        save_quantised(LlamaForCausalLM.from_pretrained(run.out), pair / "draft", note)
    prompts = held_out_prompts(tokenizer, "test", tokens=min(128, recipe.context // 4), root=root)
    results = gate(target, load_quantised(pair / "draft"), tokenizer, corpus_loss, test, prompts)
    results["recipe"] = asdict(recipe)
    results["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    results["sha256"] = {
        part: hashlib.sha256((pair / part / WEIGHTS).read_bytes()).hexdigest()
        for part in ("target", "draft")
    }
    write_text(pair / "results.json", json.dumps(results, indent=1) + "\n")
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
        drafted = Decoder(target, tokenizer, draft, SD(gamma=5), guard=False).generate(
            prompts, params
        )
        stats = summarise(
            [step for completion in drafted for step in completion.steps], seconds=0.0
        )
        results["sd"][str(temperature)] = {
            "gamma": 5,
            "tau": round(stats.tau, 4),
            "alpha": round(stats.alpha, 4),
        }
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
        "median distinct 4-gram share at least 0.5": f"{share:.3f} "
        + ("passed" if share >= 0.5 else "MISSED"),
    }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument(
        "--corpus", type=Path, help="a tree of .py files instead of the standard library"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=N", help="change the recipe"
    )
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    names = {field.name for field in fields(PairRecipe)}
    settings = dict(each.split("=", 1) for each in asked.set)
    if not settings.keys() <= names:
        parser.error(f"the recipe has {', '.join(sorted(names))}")
    if asked.threads:
        torch.set_num_threads(asked.threads)
    recipe = replace(PairRecipe(), **{name: int(value) for name, value in settings.items()})
    train_pair(asked.out, recipe, asked.corpus, not asked.no_compile)


if __name__ == "__main__":
    main()
