"""Training of the pre-verifier: what the target does with a draft's tokens, learnt from its own output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerBase

from forerun.files import write_text
from forerun.loading import check_draft_tokenizer, load_model, load_tokenizer
from forerun.model import CausalLM, context_of
from forerun.nn.pre_verifier import TRACES, PreVerifier, PreVerifierConfig
from forerun.sampling import Sampler
from forerun.train.chats import check_chats
from forerun.train.data import read_texts, tokenize
from forerun.train.drafts import Shard, collect, gather, of_conversations, of_own_output, split
from forerun.train.loop import TrainConfig, claim, train
from forerun.train.own_output import behind_prompts
from forerun.train.processes import processes
from forerun.train.texts import check_sources
from forerun.zoo.corpus import spare_files

SPARE = "stdlib-spare"
TEMPERATURE, TOP_P = 1.0, 0.95  # of sampled windows
CHAT_TOP_P = 1.0  # what conversations are sampled with
SEED = 8000  # so that the draft was not distilled on the same output


@dataclass(frozen=True)
class Recipe:
    """How a pre-verifier is trained.

    Attributes:
        sequences: windows of the target's own output, half of them greedy; prompt and output are tokens of each. Of
            conversations, the most that are used.
        anchors: drafts that leave each window or answer; a short answer has fewer.
        depth, drawn_depth: tokens of a draft, greedy and drawn.
        steps, batch, lr, seed: of the training; a batch counts drafts.
        weight: of what the target rejects in the loss.
        held: share of the windows kept for validation. Conversations have a validation split: so many of it, for each
            that is learnt from.
    """

    sequences: int = 2048
    prompt: int = 128
    output: int = 148
    anchors: int = 48
    depth: int = 20
    drawn_depth: int = 10
    steps: int = 2000
    batch: int = 256
    lr: float = 2e-3
    weight: float = 1.0
    held: float = 0.1
    seed: int = 0


def train_pre_verifier(
    target: str,
    draft: str,
    data: Sequence[str],
    out: Path,
    recipe: Recipe,
    layer: dict[str, Any] | None = None,
    *,
    chats: Path | None = None,
    work: Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains a pre-verifier of this draft for this target and saves it in `out`; returns what validation says.

    `work`, by default a folder of that name in `out`, holds what a stopped run needs to go on; several layers may be
    trained from the drafts that one has gathered. `layer` holds settings of PreVerifierConfig. `chats` is a folder of
    conversations (`forerun.train.chat_data`), which take the place of `data` and of windows: drafts leave the answers.
    Under `accelerate launch` the processes share the drafting, which is nearly all of the work; the first one trains.

    Raises ValueError for data that is missing or too little, texts longer than a context, and an `out` that holds
    another run.
    """
    check_sources(data, chats)
    work = work or out / "work"
    sharing = processes()
    how: dict[str, Any] = {"device": sharing.device(device)}
    how["trust_remote_code"] = trust_remote_code
    if recipe.sequences < 2:
        raise ValueError(f"sequences must be at least 2, one greedy and one drawn, not {recipe.sequences}")
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(target, trust_remote_code=trust_remote_code)
    check_draft_tokenizer(tokenizer, draft, trust_remote_code=trust_remote_code)
    depths, stream, shards = (recipe.depth, recipe.drawn_depth), np.zeros(0), []
    if chats is None:
        texts = [text for source in data if source != SPARE for text in read_texts([source])]
        if SPARE in data:
            texts += spare_files(tokenizer)
        stream = tokenize(tokenizer, texts, recipe.seed)
        if len(stream) < 4 * recipe.prompt:
            raise ValueError(f"--data holds {len(stream)} tokens; give at least {4 * recipe.prompt}")
        length, what = recipe.prompt + recipe.output, "prompt + output"
    else:
        check_chats(chats, tokenizer, target)
        shards = of_conversations(chats, recipe.sequences, recipe.held, depths)
        length, what = max(shard.texts.tokens.shape[1] for shard in shards), "the longest conversation"
    big, small = (
        load_model(source, part, plain=True, **how) for source, part in ((target, "target"), (draft, "draft"))
    )
    for name, model in (("target", big), ("draft", small)):
        context = context_of(model.config.get_text_config(decoder=True))
        if context is not None and length > context:
            raise ValueError(f"{what} is {length} tokens, more than the {name}'s context of {context}")
    verifying, drafting = CausalLM(big), CausalLM(small)
    if verifying.vocab_size != drafting.vocab_size:
        raise ValueError(
            f"embeddings must be of one size to train a pre-verifier; the target's has {verifying.vocab_size} entries, "
            f"the draft's {drafting.vocab_size}"
        )
    for name, runner in (("target", verifying), ("draft", drafting)):
        if runner.window is not None and runner.window < length + recipe.depth:
            raise ValueError(f"the {name} sees {runner.window} tokens back: {what} + {recipe.depth} must not be more")
    source: dict[str, Any] = {"data": list(data)} if chats is None else {"chats": chats.name}
    embeddings: Tensor = small.get_input_embeddings().get_parameter("weight").detach()
    sizes = [model.head.get_parameter("weight").shape[-1] for model in (drafting, verifying)]
    config = PreVerifierConfig(
        draft_size=sizes[0],
        token_size=embeddings.shape[-1],
        target_size=sizes[1],
        depth=recipe.depth,
        draft=drafting.fingerprint,
        target=verifying.fingerprint,
        recipe=asdict(recipe) | {"target": target, "draft": draft} | source,
        **layer or {},
    )
    if sharing.is_first:
        mark: dict[str, Any] = {"target": verifying.fingerprint, "draft": drafting.fingerprint}
        mark |= {"data": list(data)} if chats is None else {"chats": str(chats)}
        other = _OF_TRAINING if chats is None else _NOT_OF_CHATS
        drawn = {name: value for name, value in asdict(recipe).items() if name not in other}
        claim(work, json.dumps(mark | drawn))
        if chats is None:
            behind_prompts(
                verifying.model,
                stream,
                work / "own-output",
                sequences=recipe.sequences,
                prompt=recipe.prompt,
                output=recipe.output,
                seed=recipe.seed + SEED,
                top_p=TOP_P,
                say=say,
            )
    sharing.wait()
    shards = shards or of_own_output(work / "own-output", recipe.prompt)
    top_p = TOP_P if chats is None else CHAT_TOP_P
    law = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_p=top_p, top_k=0)
    collect(
        verifying,
        drafting,
        shards,
        work / "rollouts",
        Sampler(False, verifying.processors(law, recipe.prompt)),
        anchors=recipe.anchors,
        depths=depths,
        seed=recipe.seed + 5,
        sharing=sharing,
        say=say,
    )
    sharing.wait()
    if not sharing.is_first:
        return {}
    torch.manual_seed(recipe.seed)
    model = PreVerifier(config)
    nn.Module.to(model, big.device)
    kinds = {name: _parts(work / "rollouts", shards, name == "greedy", recipe.held) for name in ("greedy", "sampling")}
    _fit(model, list(kinds.values()), embeddings, recipe, work / "training" / out.resolve().name, say)
    model.eval()
    for name, buffer in (("greedy", model.greedy_traces), ("sampling", model.drawn_traces)):
        _, spare = kinds[name]
        chosen = torch.arange(TRACES) * len(spare["accept"]) // TRACES  # from all windows
        _, survival = run(model, spare, chosen, embeddings)
        both = torch.stack([survival.detach().cpu(), spare["log_q"][chosen].cumsum(-1).exp()])
        buffer.copy_((255 * functional.pad(both, (0, recipe.depth - both.shape[-1]))).round())
    found = {name: measure(model, spare, embeddings) for name, (_, spare) in kinds.items()}
    model.config.recipe["validation"] = {name: {"auc": each["auc"], "ece": each["ece"]} for name, each in found.items()}
    save(model, found, out)
    for name, each in found.items():
        say(f"{name}: AUC {each['auc']:.3f}, ECE {each['ece']:.3f} on {each['drafts']} held-out drafts")
    say(f"the pre-verifier is in {out}: forerun generate --method pacer --pre-verifier {out} ...")
    return found


Drafts = dict[str, Tensor]
_OF_TRAINING = ("steps", "batch", "lr", "weight", "held")  # drafts are the same whatever these are
_NOT_OF_CHATS = ("steps", "batch", "lr", "weight", "prompt", "output")


def _parts(folder: Path, shards: Sequence[Shard], greedy: bool, held: float) -> tuple[Drafts, Drafts]:
    """The drafts of a kind to learn from, and those kept for validation."""
    learnt, spare = ([each for each in shards if each.greedy == greedy and each.held == kept] for kept in (False, True))
    return (gather(folder, learnt), gather(folder, spare)) if spare else split(gather(folder, learnt), held)


def run(layer: PreVerifier, drafts: dict[str, Tensor], rows: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [R, G] and survival [R, G] of some of the drafts."""
    device, inputs = embeddings.device, layer.config.inputs
    taken = {name: drafts[name][rows].to(device) for name in ("target", "history", "log_q", "echoes", "law")}
    hidden = drafts["hidden"][rows].to(device) if "hidden" in inputs else None
    embedded = embeddings[drafts["tokens"][rows].long().to(device)] if "token" in inputs else None
    return layer(**taken, hidden=hidden, embedded=embedded)


def loss_of(layer: PreVerifier, logits: Tensor, accept: Tensor, weight: float) -> Tensor:
    """Cross-entropy of logits [N, G] with survival or acceptance; `weight` is that of rejections, 1 for calibrated
    answers."""
    wanted, seen = accept.cumprod(-1), torch.ones_like(accept)
    if layer.config.kind == "acceptance":  # of tokens whose predecessors were all accepted
        wanted, seen = accept, torch.cat([seen[:, :1], wanted[:, :-1]], -1)
    each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return (each * seen * (1 + (weight - 1) * (1 - wanted))).sum() / seen.sum()


def _fit(
    layer: PreVerifier,
    parts: Sequence[tuple[Drafts, Drafts]],
    embeddings: Tensor,
    recipe: Recipe,
    work: Path,
    say: Callable[[str], None],
) -> None:
    """Trains on greedy and drawn drafts, of each those to learn from and those held, in turns of one batch each."""

    def batch(step: int) -> Tensor:
        kind = step % len(parts)
        count = len(parts[kind][0]["accept"])
        rows = np.random.default_rng([recipe.seed, step]).integers(count, size=recipe.batch)
        return torch.from_numpy(np.stack([np.full_like(rows, kind), rows]))

    def loss(chosen: Tensor) -> Tensor:
        drafts, rows = parts[int(chosen[0, 0])][0], chosen[1].cpu()
        logits, _ = run(layer, drafts, rows, embeddings)
        return loss_of(layer, logits, drafts["accept"][rows].to(logits.device), recipe.weight)

    @torch.no_grad()
    def evaluate() -> float:
        values = []
        for _, held in parts:
            logits, _ = run(layer, held, torch.arange(len(held["accept"])), embeddings)
            values.append(float(loss_of(layer, logits, held["accept"].to(logits.device), recipe.weight)))
        return sum(values) / len(values)

    config = TrainConfig(
        steps=recipe.steps,
        batch=recipe.batch,
        length=recipe.depth,
        lr=recipe.lr,
        warmup=50,
        cooldown=0.6,
        seed=recipe.seed,
        evaluate_every=500,
        save_every=500,
        compile=False,
    )
    own = ("width", "layers", "depth", "inputs", "kind")
    settings = {name: getattr(layer.config, name) for name in own} | {"weight": recipe.weight, "held": recipe.held}
    claim(work / "settings", json.dumps(settings))
    train(layer, loss, batch, evaluate, config, work, say)


@torch.no_grad()
def measure(layer: PreVerifier, drafts: dict[str, Tensor], embeddings: Tensor) -> dict[str, Any]:
    """How well survival is told: AUC, expected calibration error (20 bins), and the reliability diagram's points as
    (mean said, mean seen, share of tokens)."""
    survival = torch.cat(
        [run(layer, drafts, rows, embeddings)[1].cpu() for rows in torch.arange(len(drafts["accept"])).split(1024)]
    ).flatten()
    alive = drafts["accept"].cumprod(-1).flatten()
    places = (survival * 20).long().clamp(max=19)
    points = []
    for place in places.unique():
        here = places == place
        points.append([float(survival[here].mean()), float(alive[here].mean()), float(here.float().mean())])
    return {
        "drafts": len(drafts["accept"]),
        "auc": round(auc(survival, alive), 4),
        "ece": round(sum(share * abs(said - seen) for said, seen, share in points), 4),
        "reliability": [[round(value, 4) for value in point] for point in points],
    }


def auc(scores: Tensor, alive: Tensor) -> float:
    """Area under the ROC curve of scores [N] for outcomes of probability `alive` [N]: how often one that survives is
    scored above one that does not."""
    order = scores.double().argsort()
    alive = alive.double()[order]
    dead = 1 - alive
    below = dead.cumsum(0) - dead / 2
    return float((alive * below).sum() / (alive.sum() * dead.sum()).clamp(min=1e-9))


def save(layer: PreVerifier, found: dict[str, dict[str, Any]], out: Path) -> None:
    """Weights, configuration, a model card and the reliability diagram."""
    layer.save_pretrained(out)
    recipe = layer.config.recipe
    target, draft = recipe["target"], recipe["draft"]
    lines = [
        "---",
        "library_name: forerun",
        "---",
        "",
        "# A pre-verifier for speculative decoding",
        "",
        f"It tells how far the target `{target}` follows the draft `{draft}` and fits no other pair;",
        "both are recognised by a fingerprint in config.json when it is loaded.",
        "",
        f"    forerun generate --target {target} --draft {draft} --method pacer --pre-verifier THIS",
        "",
        "| on held-out drafts | AUC | ECE | drafts |",
        "|---|---|---|---|",
        *(f"| {name} | {each['auc']:.3f} | {each['ece']:.3f} | {each['drafts']} |" for name, each in found.items()),
        "",
        "![said and seen survival](reliability.png)",
        "",
        f"{layer.num_parameters():,} parameters. Trained by `forerun train pre-verifier` with",
        "",
        "```json",
        json.dumps({name: value for name, value in recipe.items() if name != "validation"}, indent=1),
        "```",
        "",
    ]
    write_text(out / "README.md", "\n".join(lines))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4, 4), layout="constrained")
    axes.plot([0, 1], [0, 1], color="#adb5bd", linewidth=1)
    for name, each in found.items():
        points = each["reliability"]
        axes.plot(
            [p[0] for p in points], [p[1] for p in points], "o-", markersize=3, label=f"{name}: ECE {each['ece']:.3f}"
        )
    axes.set(xlabel="survival, as the layer says", ylabel="survival, as seen")
    axes.legend()
    figure.savefig(out / "reliability.png", dpi=120)
    pyplot.close(figure)
