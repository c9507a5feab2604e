"""The pre-verifier, trained on the target's verdicts on drafts that leave its own output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig

from forerun.api.loading import translation_for
from forerun.heads.pre_verifier import TRACES, PreVerifier, PreVerifierConfig
from forerun.model.causal_lm import CausalLM
from forerun.model.support import window_of
from forerun.sampling.sampler import Sampler
from forerun.train.loop import TrainConfig, fastest, save_card, train
from forerun.train.rollout import Drafts, Kind, collect
from forerun.train.run import Run, check_context
from forerun.train.texts import SPLITS, Texts, of_chats, read_chats, split_windows

TEMPERATURE, TOP_P = 1.0, 0.95  # of sampled windows
CHAT_TOP_P = 1.0  # what conversations are sampled with
LEAST_AUC, LEAST_DRAFTS = 0.6, 200  # below which a warning comes
SEED = 8000  # so that the draft was not distilled on the same output


@dataclass(frozen=True)
class Recipe:
    """How a pre-verifier is made."""

    sequences: int = (
        2048  # windows of the target's own output, half of them greedy; of conversations the most
    )
    prompt: int = 128  # tokens of text in a window
    output: int = 148  # tokens of output in a window
    anchors: int = 48  # drafts that leave each window or answer; a short answer has fewer
    depth: int = 20  # tokens of a greedy draft
    sampled_depth: int = 10  # tokens of a sampled draft
    steps: int = 2000
    batch: int = 256  # drafts
    lr: float = 2e-3
    width: int = 32  # of the layer
    held: float = 0.1  # share of the windows kept for validation; of conversations, validation's share of training's
    seed: int = 0


_OF_TRAINING = ("steps", "batch", "lr", "width")  # drafts are the same whatever these are


def train_pre_verifier(run: Run, draft: str, recipe: Recipe) -> dict[str, Any]:
    """Train a pre-verifier of this draft and save it in `run.out`; return the figures of validation.

    Drafts leave the target's own output, or the answers of conversations.
    Raises ValueError for settings, data, models and folders that do not fit.
    """
    if recipe.sequences < 4:
        raise ValueError(
            f"sequences must be at least 4, two greedy and two sampled, not {recipe.sequences}"
        )
    tokenizer, stream = run.prompts(4 * recipe.prompt)
    translation_for(tokenizer, draft, "a pre-verifier", trust_remote_code=run.trust_remote_code)
    parts = None if run.chats is None else of_conversations(run.chats, recipe)
    every = None if parts is None else [part for each in parts.values() for part in each]
    length = recipe.prompt + recipe.output
    models = {
        part: fastest(run.load(name, part))
        for part, name in (("target", run.target), ("draft", draft))
    }
    for name, model in models.items():
        check_context(model.config, every, length, name)
    target, drafter = (CausalLM(model) for model in models.values())
    if target.vocab_size != drafter.vocab_size:
        raise ValueError(
            f"embeddings must be of one size to train a pre-verifier; the target's has {target.vocab_size} entries, "
            f"the draft's {drafter.vocab_size}"
        )
    longest = recipe.depth + (
        length if every is None else max(part.tokens.shape[1] for part in every)
    )
    for name, runner in (("target", target), ("draft", drafter)):
        if (window := window_of(runner.config)) is not None and window < longest:
            raise ValueError(
                f"the {name} sees {window} tokens back, and a text with a draft has {longest}"
            )
    drafted = {name: value for name, value in asdict(recipe).items() if name not in _OF_TRAINING}
    drafted |= {"target": target.fingerprint, "draft": drafter.fingerprint}
    drafted["texts"] = every and [part.digest for part in every]
    run.claim(drafted, asdict(recipe))
    parts = parts or _windows(run, target, stream, recipe)
    top_p = TOP_P if run.chats is None else CHAT_TOP_P
    sampling = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_p=top_p, top_k=0)
    sampler = Sampler(False, target.processors(sampling, recipe.prompt))
    kinds = {
        "greedy": Kind(Sampler(), recipe.depth, *parts["greedy"]),
        "sampling": Kind(sampler, recipe.sampled_depth, *parts["sampling"]),
    }
    gathered = collect(run, target, drafter, kinds, recipe.anchors, recipe.seed + 5)
    config = PreVerifierConfig(
        width=recipe.width,
        depth=recipe.depth,
        recipe=asdict(recipe) | {"draft": draft} | run.provenance,
        target=target.fingerprint,
        draft=drafter.fingerprint,
    )
    torch.manual_seed(recipe.seed)
    model = PreVerifier(config)
    nn.Module.to(model, target.device)
    _fit(run, recipe, model, list(gathered.values()))
    for name, buffer in (("greedy", model.greedy_traces), ("sampling", model.drawn_traces)):
        spare = gathered[name][1]
        chosen = torch.arange(TRACES) * len(spare["accept"]) // TRACES  # from all texts
        survival = survival_of(model, spare, chosen)[1]
        both = torch.stack([survival.detach().cpu(), spare["log_q"][chosen].cumsum(-1).exp()])
        buffer.copy_((255 * functional.pad(both, (0, recipe.depth - both.shape[-1]))).round())
    found = {name: measure(model, spare) for name, (_, spare) in gathered.items()}
    config.recipe["validation"] = {
        name: {"auc": each["auc"], "ece": each["ece"]} for name, each in found.items()
    }
    model.save_pretrained(run.out)
    figures = [
        f"{name}: AUC {each['auc']:.3f}, ECE {each['ece']:.3f} on {each['drafts']} held-out drafts"
        for name, each in found.items()
    ]
    text = f"""It predicts how far the target `{run.target}` follows the draft `{draft}` and fits no other pair;
both are recognised by a fingerprint in config.json when it is loaded.

    forerun generate --target {run.target} --draft {draft} --method pacer --pre-verifier THIS

{"; ".join(figures)}.

{model.num_parameters():,} parameters. Trained by `forerun train pre-verifier` with"""
    save_card(run.out, "A pre-verifier for speculative decoding", text, config.recipe)
    run.say("; ".join(figures))
    if weak := [
        name
        for name, each in found.items()
        if each["auc"] < LEAST_AUC or each["drafts"] < LEAST_DRAFTS
    ]:
        few = f"an AUC below {LEAST_AUC} or fewer than {LEAST_DRAFTS} held-out drafts"
        run.say(f"warning: {few} ({', '.join(weak)}): take more --data, or --sequences")
    way = f"--target {run.target} --draft {draft} --method pacer --pre-verifier {run.out}"
    run.say(f"the pre-verifier is in {run.out}: forerun generate {way}")
    return found


def _windows(
    run: Run, target: CausalLM, stream: np.ndarray | None, recipe: Recipe
) -> dict[str, tuple[Texts, Texts]]:
    windows = run.own_output(
        target,
        stream,
        sequences=recipe.sequences,
        prompts=[recipe.prompt],
        length=recipe.prompt + recipe.output,
        temperatures=(0.0, TEMPERATURE),
        top_p=TOP_P,
        seed=recipe.seed + SEED,
    )
    begin = recipe.prompt - 1
    kinds = {"greedy": windows[::2], "sampling": windows[1::2]}
    return {
        name: split_windows(np.concatenate(own), recipe.held, begin, begin)
        for name, own in kinds.items()
    }


def of_conversations(chats: Path, recipe: Recipe) -> dict[str, tuple[Texts, Texts]]:
    """Return answers in a folder of conversations by kind, for training and for validation, in the order of their
    lengths.

    Of the train split at most `sequences`, half of them greedy and half at temperature 1; of the validation split
    `held` times as many. An answer holds a whole draft. Raises ValueError if a kind has none.
    """
    found: dict[str, list[Texts]] = {"greedy": [], "sampling": []}
    for split, share in zip(SPLITS, (1.0, recipe.held), strict=False):
        every, most = read_chats(chats, split), max(1, round(recipe.sequences // 2 * share))
        for kind, temperature, depth in (
            ("greedy", 0.0, recipe.depth),
            ("sampling", 1.0, recipe.sampled_depth),
        ):
            chosen = [
                each
                for each in every
                if each.temperature == temperature and len(each.answer) >= depth
            ]
            texts = of_chats(chosen) if chosen else None
            # After a long prompt an answer may have been cut.
            rows = (
                None if texts is None else (texts.ends - texts.begins >= depth).nonzero()[:most, 0]
            )
            if texts is None or rows is None or not len(rows):
                raise ValueError(
                    f"{chats} has no {kind} answer of {depth} tokens in its {split} conversations"
                )
            rows = rows[texts.ends[rows].argsort(stable=True)]
            found[kind].append(Texts(texts.tokens[rows], texts.begins[rows], texts.ends[rows]))
    return {kind: (train_texts, val) for kind, (train_texts, val) in found.items()}


def survival_of(layer: PreVerifier, drafts: Drafts, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [R, G] and survival [R, G] of some of the drafts."""
    return layer(
        **{name: drafts[name][rows].to(layer.device) for name in ("history", "log_q", "echoes")}
    )


def survival_loss(logits: Tensor, accept: Tensor) -> Tensor:
    """Return the cross-entropy of logits [N, G] with survival, by the probabilities [N, G] of acceptance."""
    return functional.binary_cross_entropy_with_logits(logits, accept.cumprod(-1))


def _fit(
    run: Run, recipe: Recipe, layer: PreVerifier, parts: Sequence[tuple[Drafts, Drafts]]
) -> None:
    """Train on greedy and sampled drafts, in turns of one batch each; `parts` are for training and validation."""

    def batch(step: int) -> Tensor:
        kind = step % len(parts)
        count = len(parts[kind][0]["accept"])
        rows = np.random.default_rng([recipe.seed, step]).integers(count, size=recipe.batch)
        return torch.from_numpy(np.stack([np.full_like(rows, kind), rows]))

    def loss_of(drafts: Drafts, rows: Tensor) -> Tensor:
        logits, _ = survival_of(layer, drafts, rows)
        return survival_loss(logits, drafts["accept"][rows].to(logits.device))

    def loss(chosen: Tensor) -> Tensor:
        return loss_of(parts[int(chosen[0, 0])][0], chosen[1].cpu())

    def evaluate() -> float:
        return sum(
            float(loss_of(held, torch.arange(len(held["accept"])))) for _, held in parts
        ) / len(parts)

    config = TrainConfig(
        recipe.steps, recipe.lr, warmup=50, cooldown=0.6, evaluate_every=500, save_every=500
    )
    train(layer, loss, batch, evaluate, config, run.folder, run.say)


@torch.no_grad()
def measure(layer: PreVerifier, drafts: Drafts) -> dict[str, Any]:
    """Return how well survival is predicted: AUC, and the expected calibration error over 20 bins."""
    every = torch.arange(len(drafts["accept"])).split(1024)
    survival = torch.cat([survival_of(layer, drafts, rows)[1].cpu() for rows in every]).flatten()
    alive = drafts["accept"].cumprod(-1).flatten()
    bins, ece = (survival * 20).long().clamp(max=19), 0.0
    for each in bins.unique():
        here = bins == each
        ece += float(here.float().mean() * (survival[here].mean() - alive[here].mean()).abs())
    return {
        "drafts": len(drafts["accept"]),
        "auc": round(auc(survival, alive), 4),
        "ece": round(ece, 4),
    }


def auc(scores: Tensor, alive: Tensor) -> float:
    """Return the area under the ROC curve of scores [N] for outcomes of probability `alive` [N]: how often one that
    survives is scored above one that does not."""
    order = scores.double().argsort()
    alive = alive.double()[order]
    dead = 1 - alive
    below = dead.cumsum(0) - dead / 2
    return float((alive * below).sum() / (alive.sum() * dead.sum()).clamp(min=1e-9))
