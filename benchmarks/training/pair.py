"""The recipe of the embedded pair, from this machine's standard library, stage by stage.

    python -m benchmarks.training.pair [--out runs/pair] [--corpus TREE] [--set FIELD=N ...]
        [--threads N]

It makes the tokenizer, the target and the draft, and says whether the pair is fit to measure with
(docs/lab/2026-11/pair.md). Every stage continues where it was stopped.
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
Loss = Callable[[Tensor], Tensor]

HEAD_SIZE = 64
LEAST_GAP = 0.4  # nats by which the target's loss must be below the draft's
LEAST_DISTINCT = 0.5  # median share of distinct 4-grams of the target's greedy outputs
GATE_GAMMA = 5


@dataclass(frozen=True)
class PairRecipe:
    """Sizes and lengths of the pair.

    The defaults made the bundled weights (`zoo/weights/results.json`).

    Attributes:
        batch: windows of `window` tokens in a step.
        target_heads: heads of 64 without grouping; five fit into the shape of any bigger Llama with
            8 or more KV heads.
        target_steps: of 8192 tokens, with a shallow target.
        grown_steps: of 8192 tokens, at twice the depth, where a step takes twice as long; with 0 it
            stays shallow.
        draft_layers: two are the fewest that can copy from the context; width costs a CPU little.
        draft_steps: of 8192 tokens, on the corpus alone.
        own_sequences: of 513 tokens, which the target writes.
        distill_steps: of 8192 tokens, half of them the target's own.
    """

    vocabulary: int = 4096
    context: int = 1024
    batch: int = 16
    window: int = 512
    target_width: int = 320
    target_layers: int = 8
    target_heads: int = 5
    target_mlp: int = 864
    target_steps: int = 2500
    grown_steps: int = 1100
    draft_width: int = 192
    draft_layers: int = 2
    draft_heads: int = 2
    draft_mlp: int = 512
    draft_steps: int = 1500
    own_sequences: int = 1536
    distill_steps: int = 1600
    seed: int = 0


@dataclass(frozen=True)
class Shape:
    """The shape of a model."""

    width: int
    layers: int
    heads: int
    mlp: int
    context: int


class Windows:
    """Windows of `length + 1` tokens over a token stream, in a new order and phase every epoch.

    `batch(step, size)` is the same whenever it is asked for, so there is no iterator state to save.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int = 0) -> None:
        if len(stream) < 2 * length + 2:
            raise ValueError(
                f"the data holds {len(stream)} tokens, too few for windows of {length}: "
                f"give at least {2 * length + 2} tokens or a smaller length"
            )
        self.stream = stream
        self.length = length
        self.seed = seed
        self.per_epoch = (len(stream) - length - 1) // length
        self._order = lru_cache(maxsize=2)(self._new_order)

    def _new_order(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        return rng.permutation(self.per_epoch) * self.length + rng.integers(self.length)

    def batch(self, step: int, size: int) -> Tensor:
        """Return the tokens [size, length + 1] of a step."""
        rows = []
        for number in range(step * size, (step + 1) * size):
            start = self._order(number // self.per_epoch)[number % self.per_epoch]
            rows.append(self.stream[start : start + self.length + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def new_llama(tokenizer: PreTrainedTokenizerBase, shape: Shape, seed: int) -> LlamaForCausalLM:
    """Return a fresh Llama with tied embeddings over the tokenizer's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=HEAD_SIZE,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def deepen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model of twice the layers that computes the same, to train on.

    Every layer is followed by a copy of itself that adds nothing yet, because its output
    projections are 0. Stacking is an old idea (Gong et al. 2019); the silent copies are those of
    LLaMA Pro (arXiv 2401.02415).
    """
    facts = model.config.to_dict()
    facts["num_hidden_layers"] *= 2
    deep = LlamaForCausalLM(LlamaConfig(**facts))
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        head, _, tail = name.partition("layers.")
        if not tail:
            state[name] = value
            continue
        number, _, rest = tail.partition(".")
        is_silent = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        copy = torch.zeros_like(value) if is_silent else value
        state[f"{head}layers.{2 * int(number)}.{rest}"] = value
        state[f"{head}layers.{2 * int(number) + 1}.{rest}"] = copy
    deep.load_state_dict(state)
    return deep


def next_token_loss(model: PreTrainedModel) -> Loss:
    """Return the mean cross-entropy in nats of tokens[:, 1:], for tokens [B, T+1]."""

    def loss(tokens: Tensor) -> Tensor:
        with mixed_precision(tokens.device):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: list[Tensor]) -> float:
    """Return the mean of `next_token_loss` over batches [B, T+1] of one shape."""
    loss = next_token_loss(model)
    training = model.training
    model.eval()
    value = sum(float(loss(batch.to(model.device))) for batch in batches) / len(batches)
    model.train(training)
    return value


class Corpus:
    """The splits of a source tree as token streams, made once and kept in the working folder."""

    def __init__(self, work: Path, recipe: PairRecipe, root: Path | None) -> None:
        self.work = work
        self.root = root
        folder = work / "tokenizer"
        if not folder.exists():
            texts = (text for _, text in source_files("train", root))
            temporary = work / "tokenizer.tmp"
            train_tokenizer(texts, recipe.vocabulary).save_pretrained(temporary)
            temporary.rename(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def stream(self, split: Split) -> np.ndarray:
        """Return a split as one token stream [n]."""
        path = self.work / "tokens" / f"{split}.safetensors"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            tokens = tokenize(self.tokenizer, [text for _, text in source_files(split, self.root)])
            save_tensors(path, {"tokens": torch.from_numpy(tokens.astype(np.int32))})
        return load_file(path)["tokens"]


def held_batches(stream: np.ndarray, length: int, rows: int = 64) -> list[Tensor]:
    """Return `rows` fixed windows in batches of 16."""
    windows = Windows(stream, length)
    return [windows.batch(step, 16) for step in range(rows // 16)]


@torch.no_grad()
def best_between(
    start: dict[str, Tensor], model: PreTrainedModel, loss: Callable[[], float]
) -> dict[float, float]:
    """Put the model where its loss is least on the line from weights `start` to its own.

    The line is searched by fifths. On a small corpus both ends have overfitted, each to its own
    order of it (arXiv 2109.01903).

    Returns:
        The loss by the share of the way.
    """
    end = {name: value.clone() for name, value in model.state_dict().items()}

    def go(share: float) -> None:
        model.load_state_dict({name: start[name].lerp(end[name], share) for name in end})

    losses = {}
    for fifths in range(6):
        go(fifths / 5)
        losses[fifths / 5] = loss()
    go(min(losses, key=losses.__getitem__))
    return losses


class PairTraining:
    """The stages of the recipe.

    Args:
        work: the folder of everything that is made.
        recipe: sizes and lengths.
        root: the source tree to learn from; this interpreter's standard library by default.
        compiled: whether losses are compiled, if there is a C++ compiler.
        say: gets lines of progress.

    Raises:
        ValueError: `work` holds another recipe, or the tree is too small.
    """

    def __init__(
        self, work: Path, recipe: PairRecipe, root: Path | None, compiled: bool, say: Say
    ) -> None:
        if not any(True for _ in source_files("train", root)):
            raise ValueError(
                f"{root or 'the standard library'} holds no Python sources to learn from"
            )
        claim(work, asdict(recipe) | {"corpus": str(root.resolve()) if root else None})
        self.work = work
        self.recipe = recipe
        self.root = root
        self.compiled = compiled
        self.say = say
        self.corpus = Corpus(work, recipe, root)
        self.tokenizer = self.corpus.tokenizer
        self.pair = work / "pair"

    def run(self) -> dict[str, Any]:
        """Make the whole pair in `work/pair`; return and store the results."""
        recipe = self.recipe
        target = self.finished_target()
        draft = self.train_draft_on_corpus()
        test = held_batches(self.corpus.stream("test"), recipe.window)
        corpus_loss = mean_loss(draft, test)
        if not (self.pair / "draft" / WEIGHTS).exists():
            self.distil(target, draft)
        tokens = min(128, recipe.context // 4)
        prompts = held_out_prompts(self.tokenizer, "test", tokens=tokens, root=self.root)
        distilled = load_quantised(self.pair / "draft")
        results = gate(Pair(target, distilled, self.tokenizer), corpus_loss, test, prompts)
        results["recipe"] = asdict(recipe)
        results["versions"] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        results["sha256"] = {part: self._sha256(part) for part in ("target", "draft")}
        write_text(self.pair / "results.json", json.dumps(results, indent=1) + "\n")
        for name, value in results["gate"].items():
            self.say(f"gate {name}: {value}")
        return results

    def _sha256(self, part: str) -> str:
        return hashlib.sha256((self.pair / part / WEIGHTS).read_bytes()).hexdigest()

    def _note(self) -> dict[str, str]:
        return {"recipe": json.dumps(asdict(self.recipe))}

    def _compiled(self, loss: Loss) -> Loss:
        """Return the loss, compiled if that is wanted and there is a C++ compiler."""
        return torch.compile(loss) if self.compiled and shutil.which("g++") else loss

    def finished_target(self) -> PreTrainedModel:
        """Return the target in few bits, trained if it is not yet."""
        folder = self.pair / "target"
        if not (folder / WEIGHTS).exists():
            self.tokenizer.save_pretrained(folder)
            save_quantised(self.train_target(), folder, self._note(), bits=6)
        return load_quantised(folder)

    def train_target(self) -> PreTrainedModel:
        """Train a shallow target, then one of twice the depth that continues from it."""
        recipe = self.recipe
        shape = Shape(
            recipe.target_width,
            recipe.target_layers,
            recipe.target_heads,
            recipe.target_mlp,
            recipe.context,
        )
        model = new_llama(self.tokenizer, shape, recipe.seed)
        held = held_batches(self.corpus.stream("validation"), recipe.window)
        self._train_target(model, TrainConfig(recipe.target_steps), "target", recipe.seed, held)
        if not recipe.grown_steps:
            return model
        model = deepen(model)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        # It starts trained, so its rate is lower and falls for most of the way.
        grown = TrainConfig(recipe.grown_steps, lr=3e-3, warmup=50, cooldown=0.8)
        self._train_target(model, grown, "target-grown", recipe.seed + 10, held)
        losses = best_between(start, model, lambda: mean_loss(model, held))
        shown = [f"{share}: {loss:.3f}" for share, loss in losses.items()]
        self.say(f"validation loss by share of the way from the start: {', '.join(shown)}")
        return model

    def _train_target(
        self,
        model: LlamaForCausalLM,
        config: TrainConfig,
        folder: str,
        seed: int,
        held: list[Tensor],
    ) -> None:
        """Train a target; the last fifth of the steps has windows of twice the length."""
        recipe = self.recipe
        stream = self.corpus.stream("train")
        short = Windows(stream, recipe.window, seed)
        long = Windows(stream, 2 * recipe.window, seed + 1)

        def batch(step: int) -> Tensor:
            if step < config.steps * 4 // 5:
                return short.batch(step, recipe.batch)
            return long.batch(step, recipe.batch // 2)

        train(
            model,
            self._compiled(next_token_loss(model)),
            batch,
            lambda: mean_loss(model, held),
            config,
            self.work / folder,
            self.say,
        )

    def train_draft_on_corpus(self) -> PreTrainedModel:
        """Train the draft on text alone.

        Distillation starts from it, and the distilled draft is compared with it.
        """
        recipe = self.recipe
        shape = Shape(
            recipe.draft_width,
            recipe.draft_layers,
            recipe.draft_heads,
            recipe.draft_mlp,
            recipe.context,
        )
        model = new_llama(self.tokenizer, shape, recipe.seed + 1)
        windows = Windows(self.corpus.stream("train"), recipe.window, recipe.seed + 2)
        held = held_batches(self.corpus.stream("validation"), recipe.window)
        train(
            model,
            self._compiled(next_token_loss(model)),
            lambda step: windows.batch(step, recipe.batch),
            lambda: mean_loss(model, held),
            TrainConfig(recipe.draft_steps),
            self.work / "draft-corpus",
            self.say,
        )
        return model

    def distil(self, target: PreTrainedModel, draft: PreTrainedModel) -> None:
        """Distil the draft from the target, and write it in few bits."""
        recipe = self.recipe
        float32 = self.work / "float32"
        for name, model in (("target", target), ("draft-corpus", draft)):
            model.save_pretrained(float32 / name)
            self.tokenizer.save_pretrained(float32 / name)
        texts = self.work / "texts.jsonl"
        lines = [json.dumps({"text": text}) for _, text in source_files("train", self.root)]
        write_text(texts, "\n".join(lines))
        distilled = DraftRecipe(
            recipe.own_sequences,
            recipe.window,
            steps=recipe.distill_steps,
            batch=recipe.batch,
            seed=recipe.seed,
        )
        run = Run(str(float32 / "target"), self.work / "draft", [str(texts)], say=self.say)
        train_draft(run, distilled, init=str(float32 / "draft-corpus"))
        self.tokenizer.save_pretrained(self.pair / "draft")
        finished = LlamaForCausalLM.from_pretrained(run.out)
        save_quantised(finished, self.pair / "draft", self._note())


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def distinct_share(tokens: list[int], n: int = 4) -> float:
    """Return distinct n-grams / n-grams of an output, which is low if it loops."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def gate(
    pair: Pair, draft_corpus_loss: float, test: list[Tensor], prompts: list[list[int]]
) -> dict[str, Any]:
    """Return whether the pair is fit to measure with, on files that no stage has seen.

    See docs/lab/2026-11/pair.md.
    """
    shares: dict[str, float] = {}
    drafting: dict[str, dict[str, Any]] = {}
    for temperature in (0.0, 0.8):
        key = str(temperature)
        shares[key], drafting[key] = _decoded(pair, prompts, temperature)
    loss = mean_loss(pair.target, test)
    gap = draft_corpus_loss - loss
    share = shares["0.0"]
    return {
        "distinct_4gram_share": shares,
        "sd": drafting,
        "loss": {
            "target": round(loss, 4),
            "draft_on_corpus": round(draft_corpus_loss, 4),
            "draft_distilled": round(mean_loss(pair.draft, test), 4),
        },
        "parameters": {
            "target": pair.target.num_parameters(),
            "draft": pair.draft.num_parameters(),
        },
        "gate": {
            f"target's loss at least {LEAST_GAP} nats below the draft's": _passed(gap, LEAST_GAP),
            f"median distinct 4-gram share at least {LEAST_DISTINCT}": _passed(
                share, LEAST_DISTINCT
            ),
        },
    }


def _passed(value: float, least: float) -> str:
    return f"{value:.3f} {'passed' if value >= least else 'MISSED'}"


def _decoded(
    pair: Pair, prompts: list[list[int]], temperature: float
) -> tuple[float, dict[str, Any]]:
    """Return the median share of distinct 4-grams of plain outputs, and the figures of drafting."""
    params = SamplingParams(
        max_new_tokens=min(128, pair.target.config.max_position_embeddings // 2),
        temperature=temperature,
        seed=0,
        ignore_eos=True,
    )
    plain = Decoder(pair.target, pair.tokenizer, method=AR()).generate(prompts, params)
    share = statistics.median(distinct_share(output.tokens) for output in plain)
    method = SD(gamma=GATE_GAMMA)
    decoder = Decoder(pair.target, pair.tokenizer, pair.draft, method, guard=False)
    drafted = decoder.generate(prompts, params)
    stats = summarise([step for output in drafted for step in output.steps], seconds=0.0)
    figures = {
        "gamma": GATE_GAMMA,
        "tau": round(stats.tau, 4),
        "alpha": round(stats.alpha, 4),
    }
    return round(share, 4), figures


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
    args = parser.parse_args()
    names = {field.name for field in fields(PairRecipe)}
    settings = dict(setting.split("=", 1) for setting in args.set)
    if not settings.keys() <= names:
        parser.error(f"the recipe has {', '.join(sorted(names))}")
    if args.threads:
        torch.set_num_threads(args.threads)
    recipe = replace(PairRecipe(), **{name: int(value) for name, value in settings.items()})
    PairTraining(args.out, recipe, args.corpus, not args.no_compile, print).run()


if __name__ == "__main__":
    main()
