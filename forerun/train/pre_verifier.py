"""The pre-verifier, trained on the target's verdicts on drafts that leave its own output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
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
from forerun.train.run import OwnOutput, Run, check_context
from forerun.train.texts import SPLITS, Conversation, Texts, of_chats, read_chats, split_windows

TEMPERATURE = 1.0  # of sampled windows and conversations
WINDOW_TOP_P = 0.95  # of sampled windows
CHAT_TOP_P = 1.0  # of sampled conversations
# A warning comes below these.
MIN_AUC = 0.6
MIN_HELD_OUT_DRAFTS = 200
PRE_VERIFIER_OUTPUT_SEED = 8000  # so that the draft was not distilled on the same output

TrainVal = tuple[Texts, Texts]  # texts for training and for validation


@dataclass(frozen=True)
class Recipe:
    """How a pre-verifier is made.

    Attributes:
        sequences: number of windows of the target's own output, or the most conversations. Half of
            them are greedy.
        prompt: tokens of text in a window.
        output: tokens of output in a window.
        anchors: drafts that leave each window or answer; a short answer has fewer.
        depth: tokens of a greedy draft.
        sampled_depth: tokens of a sampled draft.
        batch: drafts of a step.
        width: width of the layer.
        held: share of the windows that is kept for validation; of conversations, the number for
            validation relative to that for training.
    """

    sequences: int = 2048
    prompt: int = 128
    output: int = 148
    anchors: int = 48
    depth: int = 20
    sampled_depth: int = 10
    steps: int = 2000
    batch: int = 256
    lr: float = 2e-3
    width: int = 32
    held: float = 0.1
    seed: int = 0


# Settings that drafts do not depend on.
_TRAINING_SETTINGS = ("steps", "batch", "lr", "width")


def train_pre_verifier(run: Run, draft: str, recipe: Recipe) -> dict[str, Any]:
    """Train a pre-verifier of this draft and save it in `run.out`; return figures of validation.

    Drafts leave the target's own output, or the answers of conversations.

    Raises:
        ValueError: settings, data, models or folders do not fit.
    """
    if recipe.sequences < 4:
        raise ValueError(
            f"sequences must be at least 4, two greedy and two sampled, not {recipe.sequences}"
        )
    tokenizer, stream = run.prompts(4 * recipe.prompt)
    translation_for(tokenizer, draft, "a pre-verifier", trust_remote_code=run.trust_remote_code)
    parts = None if run.chats is None else of_conversations(run.chats, recipe)
    texts = None if parts is None else list(chain.from_iterable(parts.values()))
    target, drafter = _load_pair(run, draft, recipe, texts)
    drafts_settings = {
        name: value for name, value in asdict(recipe).items() if name not in _TRAINING_SETTINGS
    }
    drafts_settings |= {
        "target": target.fingerprint,
        "draft": drafter.fingerprint,
        "texts": None if texts is None else [text.digest for text in texts],
    }
    run.claim(drafts_settings, asdict(recipe))
    parts = parts or _windows(run, target, stream, recipe)
    gathered = _gather(run, target, drafter, parts, recipe)
    config = PreVerifierConfig(
        width=recipe.width,
        depth=recipe.depth,
        recipe=asdict(recipe) | {"draft": draft} | run.provenance,
        target=target.fingerprint,
        draft=drafter.fingerprint,
    )
    torch.manual_seed(recipe.seed)
    layer = PreVerifier(config)
    nn.Module.to(layer, target.device)
    _fit(run, recipe, layer, list(gathered.values()))
    _keep_traces(layer.greedy_traces, layer, gathered["greedy"][1])
    _keep_traces(layer.drawn_traces, layer, gathered["sampling"][1])
    figures = {name: measure(layer, held_out) for name, (_, held_out) in gathered.items()}
    config.recipe["validation"] = {
        name: {"auc": kind["auc"], "ece": kind["ece"]} for name, kind in figures.items()
    }
    layer.save_pretrained(run.out)
    _report(run, draft, layer, figures)
    return figures


def _load_pair(
    run: Run, draft: str, recipe: Recipe, texts: Sequence[Texts] | None
) -> tuple[CausalLM, CausalLM]:
    """Load the target and the draft; raise ValueError if the texts or the two do not fit.

    `texts` are conversations, or None for windows of the target's own output.
    """
    length = recipe.prompt + recipe.output
    target_model = fastest(run.load(run.target, "target"))
    draft_model = fastest(run.load(draft, "draft"))
    check_context(target_model.config, texts, length, "target")
    check_context(draft_model.config, texts, length, "draft")
    target = CausalLM(target_model)
    drafter = CausalLM(draft_model)
    if target.vocab_size != drafter.vocab_size:
        raise ValueError(
            "embeddings must be of one size to train a pre-verifier; the target's has "
            f"{target.vocab_size} entries, the draft's {drafter.vocab_size}"
        )
    if texts is not None:
        length = max(part.tokens.shape[1] for part in texts)
    longest = length + recipe.depth
    for name, runner in (("target", target), ("draft", drafter)):
        window = window_of(runner.config)
        if window is not None and window < longest:
            raise ValueError(
                f"the {name} sees {window} tokens back, and a text with a draft has {longest}"
            )
    return target, drafter


def _gather(
    run: Run, target: CausalLM, drafter: CausalLM, parts: Mapping[str, TrainVal], recipe: Recipe
) -> dict[str, tuple[Drafts, Drafts]]:
    """Draft from the texts of each kind; return the drafts for training and for validation."""
    top_p = WINDOW_TOP_P if run.chats is None else CHAT_TOP_P
    sampling = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_p=top_p, top_k=0)
    sampler = Sampler(False, target.processors(sampling, recipe.prompt))
    kinds = {
        "greedy": Kind(Sampler(), recipe.depth, *parts["greedy"]),
        "sampling": Kind(sampler, recipe.sampled_depth, *parts["sampling"]),
    }
    return collect(run, target, drafter, kinds, recipe.anchors, recipe.seed + 5)


def _keep_traces(traces: Tensor, layer: PreVerifier, drafts: Drafts) -> None:
    """Fill a buffer of traces (`PreVerifier`) from validation drafts."""
    chosen = torch.arange(TRACES) * len(drafts["accept"]) // TRACES  # from all texts
    survival = survival_of(layer, drafts, chosen)[1].detach().cpu()
    products = drafts["log_q"][chosen].cumsum(-1).exp()
    both = torch.stack([survival, products])
    padded = functional.pad(both, (0, traces.shape[-1] - both.shape[-1]))
    traces.copy_((255 * padded).round())


def _report(run: Run, draft: str, layer: PreVerifier, figures: Mapping[str, Any]) -> None:
    """Write the card of a trained layer, and say how good it is and where."""
    summary = "; ".join(
        f"{name}: AUC {kind['auc']:.3f}, ECE {kind['ece']:.3f} on {kind['drafts']} held-out drafts"
        for name, kind in figures.items()
    )
    pair = f"--target {run.target} --draft {draft} --method pacer --pre-verifier"
    text = (
        f"It predicts how far the target `{run.target}` follows the draft `{draft}` and fits no "
        "other pair;\nboth are recognised by a fingerprint in config.json when it is loaded.\n\n"
        f"    forerun generate {pair} THIS\n\n"
        f"{summary}.\n\n"
        f"{layer.num_parameters():,} parameters. Trained by `forerun train pre-verifier` with"
    )
    save_card(run.out, "A pre-verifier for speculative decoding", text, layer.config.recipe)
    run.say(summary)
    weak = [
        name
        for name, kind in figures.items()
        if kind["auc"] < MIN_AUC or kind["drafts"] < MIN_HELD_OUT_DRAFTS
    ]
    if weak:
        few = f"an AUC below {MIN_AUC} or fewer than {MIN_HELD_OUT_DRAFTS} held-out drafts"
        run.say(f"warning: {few} ({', '.join(weak)}): take more --data, or --sequences")
    run.say(f"the pre-verifier is in {run.out}: forerun generate {pair} {run.out}")


def _windows(
    run: Run, target: CausalLM, stream: np.ndarray | None, recipe: Recipe
) -> dict[str, TrainVal]:
    """Return windows of the target's own output by kind, for training and for validation."""
    output = OwnOutput(
        sequences=recipe.sequences,
        prompts=[recipe.prompt],
        length=recipe.prompt + recipe.output,
        temperatures=(0.0, TEMPERATURE),
        top_p=WINDOW_TOP_P,
        seed=recipe.seed + PRE_VERIFIER_OUTPUT_SEED,
    )
    files = run.own_output(target, stream, output)
    begin = recipe.prompt - 1
    return {
        name: split_windows(np.concatenate(windows), recipe.held, begin, begin)
        for name, windows in (("greedy", files[::2]), ("sampling", files[1::2]))
    }


def of_conversations(chats: Path, recipe: Recipe) -> dict[str, TrainVal]:
    """Return answers in a folder of conversations by kind, for training and for validation.

    They are in the order of their lengths. Of the train split there are at most `sequences`, half
    of them greedy and half sampled; of the validation split `held` times as many. Each answer has
    room for a whole draft.

    Raises:
        ValueError: a kind has no answer.
    """
    texts: dict[str, list[Texts]] = {"greedy": [], "sampling": []}
    for split, share in zip(SPLITS, (1.0, recipe.held), strict=False):
        conversations = read_chats(chats, split)
        most = max(1, round(recipe.sequences // 2 * share))
        for kind, temperature, depth in (
            ("greedy", 0.0, recipe.depth),
            ("sampling", TEMPERATURE, recipe.sampled_depth),
        ):
            chosen = [chat for chat in conversations if chat.temperature == temperature]
            answers = _long_answers(chosen, depth, most)
            if answers is None:
                raise ValueError(
                    f"{chats} has no {kind} answer of {depth} tokens in its {split} conversations"
                )
            texts[kind].append(answers)
    return {kind: (train_texts, val) for kind, (train_texts, val) in texts.items()}


def _long_answers(conversations: Sequence[Conversation], depth: int, most: int) -> Texts | None:
    """Return the first `most` answers of at least `depth` tokens, or None if there is none."""
    chosen = [chat for chat in conversations if len(chat.answer) >= depth]
    if not chosen:
        return None
    texts = of_chats(chosen)
    # An answer behind a long prompt may have been cut.
    rows = (texts.ends - texts.begins >= depth).nonzero()[:most, 0]
    if not len(rows):
        return None
    rows = rows[texts.ends[rows].argsort(stable=True)]
    return Texts(texts.tokens[rows], texts.begins[rows], texts.ends[rows])


def survival_of(layer: PreVerifier, drafts: Drafts, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [R, G] and survival [R, G] of some of the drafts."""
    names = ("history", "log_q", "echoes")
    return layer(**{name: drafts[name][rows].to(layer.device) for name in names})


def survival_loss(logits: Tensor, accept: Tensor) -> Tensor:
    """Return the cross-entropy of logits [N, G] with survival.

    `accept` [N, G] are the probabilities that tokens are accepted.
    """
    return functional.binary_cross_entropy_with_logits(logits, accept.cumprod(-1))


def _fit(
    run: Run, recipe: Recipe, layer: PreVerifier, parts: Sequence[tuple[Drafts, Drafts]]
) -> None:
    """Train on greedy and on sampled drafts, one batch of each in turn.

    `parts` are the drafts of each kind, for training and for validation.
    """

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
        losses = [loss_of(held, torch.arange(len(held["accept"]))) for _, held in parts]
        return sum(map(float, losses)) / len(parts)

    config = TrainConfig(
        recipe.steps, recipe.lr, warmup=50, cooldown=0.6, evaluate_every=500, save_every=500
    )
    train(layer, loss, batch, evaluate, config, run.folder, run.say)


@torch.no_grad()
def measure(layer: PreVerifier, drafts: Drafts) -> dict[str, Any]:
    """Return how well survival is predicted.

    The figures are the AUC, and the expected calibration error over 20 bins.
    """
    parts = torch.arange(len(drafts["accept"])).split(1024)
    survival = torch.cat([survival_of(layer, drafts, rows)[1].cpu() for rows in parts]).flatten()
    alive = drafts["accept"].cumprod(-1).flatten()
    bins = (survival * 20).long().clamp(max=19)
    ece = 0.0
    for number in bins.unique():
        here = bins == number
        ece += float(here.float().mean() * (survival[here].mean() - alive[here].mean()).abs())
    return {
        "drafts": len(drafts["accept"]),
        "auc": round(auc(survival, alive), 4),
        "ece": round(ece, 4),
    }


def auc(scores: Tensor, alive: Tensor) -> float:
    """Return the area under the ROC curve of scores [N] for outcomes.

    That is how often an outcome that survives is scored above one that does not. `alive` [N] are
    the probabilities that outcomes survive.
    """
    order = scores.double().argsort()
    alive = alive.double()[order]
    dead = 1 - alive
    below = dead.cumsum(0) - dead / 2
    return float((alive * below).sum() / (alive.sum() * dead.sum()).clamp(min=1e-9))
