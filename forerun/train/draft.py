"""A draft for any target: a small Llama, distilled on the target's own output.

Its vocabulary is the target's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from forerun.backends.hot import save_hot
from forerun.heads.heads import hot_set
from forerun.model.causal_lm import CausalLM, context_of
from forerun.model.eager import capture_hidden_states
from forerun.train.labels import Labels, cross_entropy, in_parts, label
from forerun.train.loop import TrainConfig, mixed_precision, save_card, train
from forerun.train.run import OwnOutput, Run, check_context
from forerun.train.texts import Texts, joined, load_train_val, of_windows, split_windows

VALIDATION_SHARE = 0.05  # of the windows of own output
DRAFT_EVALUATION_TEXTS = 256  # how many texts an evaluation reads while a draft is trained


@dataclass(frozen=True)
class DraftRecipe:
    """How a draft is made.

    As many windows of plain text are added to those of own output, so that a small set is not
    learned by heart.

    Attributes:
        sequences: windows of the target's own output.
        length: tokens of a window; longer conversations are cut.
        layers: layers of a new draft.
        width: width of a new draft.
        hot: share of the vocabulary that the draft proposes, besides the tokens of the context
            (`forerun.backends.hot`).
        batch: texts of a step.
    """

    sequences: int = 3072
    length: int = 512
    layers: int = 2
    width: int = 192
    hot: float = 1.0
    steps: int = 2000
    batch: int = 16
    lr: float = 3e-3
    seed: int = 0


def train_draft(run: Run, recipe: DraftRecipe, init: str | None = None) -> None:
    """Distil a draft into `run.out`; with `init` go on from that model instead of a new Llama.

    Raises:
        ValueError: settings, data, models or folders do not fit.
    """
    if not 0 < recipe.hot <= 1:
        raise ValueError(f"hot must be above 0 and at most 1, not {recipe.hot}")
    tokenizer, stream = run.prompts(4 * recipe.length)
    parts = None if run.chats is None else load_train_val(run.chats, recipe.length)
    model = run.load(run.target, "target")
    check_context(model.config, parts, recipe.length, "target")
    target = CausalLM(model.requires_grad_(False))
    draft = (
        new_draft(model, tokenizer, recipe) if init is None else run.load(init, "draft", "float32")
    )
    _check_draft(draft, init, run.target, target.vocab_size)
    drafter = CausalLM(draft.to(model.device))  # type: ignore[arg-type]
    if not has_plain_head(drafter):
        raise ValueError(
            f"{type(draft).__name__} caps or scales its logits; such a draft cannot be trained"
        )
    settings = asdict(recipe) | {"init": init, "texts": parts and parts[0].digest}
    run.claim({"target": target.fingerprint}, settings)
    texts, val = parts or _own_texts(run, target, stream, recipe)
    hot_count = max(1, round(recipe.hot * target.vocab_size))
    hot, coverage = hot_set(texts.frequencies(target.vocab_size), hot_count)
    if stream is not None:
        texts = joined(texts, _plain_texts(stream, len(texts), recipe))
    labels = label(run, target, texts)
    val_labels = label(run, target, val)
    trained_hot = hot.to(model.device) if recipe.hot < 1 else None

    def loss(rows: Tensor) -> Tensor:
        return distillation_loss(drafter, labels, rows, trained_hot)[0]

    def evaluate() -> float:
        figures = [
            torch.stack(distillation_loss(drafter, val_labels, rows, trained_hot))
            for rows in val.spread(DRAFT_EVALUATION_TEXTS).split(8)
        ]
        divergence, agreement = torch.stack(figures).mean(0).tolist()
        run.say(f"{run.folder.name} greedy agreement on held-out output {agreement:.3f}")
        return float(divergence)

    batch = partial(texts.batch, recipe.seed, size=recipe.batch)
    config = TrainConfig(
        recipe.steps, recipe.lr, tokens=recipe.batch * texts.mean_length, known=init is not None
    )
    train(draft, loss, batch, evaluate, config, run.folder, run.say)
    draft.save_pretrained(run.out)
    tokenizer.save_pretrained(run.out)
    if recipe.hot < 1:
        save_hot(run.out, hot)
        run.say(f"its {len(hot)} tokens are {coverage:.2%} of its training output")
    save_card(
        run.out,
        "A draft for speculative decoding",
        f"It drafts for `{run.target}`, whose tokenizer it has. Made by `forerun train draft` with",
        asdict(recipe) | {"init": init} | run.provenance,
    )
    run.say(f"the draft is in {run.out}: forerun generate --target {run.target} --draft {run.out}")


def _check_draft(
    draft: PreTrainedModel, name: str | None, target_name: str, vocab_size: int
) -> None:
    """Raise ValueError if a draft has another number of embeddings than its target."""
    entries = draft.get_input_embeddings().num_embeddings
    if entries != vocab_size:
        raise ValueError(
            f"{name} has a vocabulary of {entries} entries, {target_name} of {vocab_size}"
        )


def _own_texts(
    run: Run, target: CausalLM, stream: np.ndarray | None, recipe: DraftRecipe
) -> tuple[Texts, Texts]:
    """Return windows of the target's own output, for training and for validation."""
    output = OwnOutput(
        sequences=recipe.sequences,
        # Several lengths, because drafts are used right after a prompt and later.
        prompts=[recipe.length // share for share in (8, 4, 2)],
        length=recipe.length,
        temperatures=(0.0, 0.8),
        seed=recipe.seed,
    )
    windows = np.concatenate(run.own_output(target, stream, output))
    return split_windows(windows, VALIDATION_SHARE, 0, 0)


def _plain_texts(stream: np.ndarray, count: int, recipe: DraftRecipe) -> Texts:
    """Return `count` windows of a stream [n] of tokens."""
    rng = np.random.default_rng(recipe.seed)
    starts = rng.integers(len(stream) - recipe.length + 1, size=count)
    return of_windows(np.stack([stream[start : start + recipe.length] for start in starts]))


def new_draft(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: DraftRecipe
) -> LlamaForCausalLM:
    """Make a Llama with tied embeddings, heads of 64, and the target's vocabulary and context."""
    config = target.config.get_text_config(decoder=True)
    pad = tokenizer.pad_token_id
    if pad is not None and pad >= config.vocab_size:
        raise ValueError(
            f"pad_token_id must be below the target's {config.vocab_size} embeddings, not {pad}"
        )
    torch.manual_seed(recipe.seed)
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,  # it may be padded beyond the tokenizer's
            hidden_size=recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.width // 64,
            num_key_value_heads=recipe.width // 64,
            head_dim=64,
            intermediate_size=recipe.width * 8 // 3 // 16 * 16,
            max_position_embeddings=context_of(config) or 4096,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=pad,
        )
    )
    init_embeddings(draft, target)
    return draft


@torch.no_grad()
def init_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give a new draft the target's embeddings along their main directions (ours).

    Tokens that are alike for the target are then alike for the draft. The embeddings keep the scale
    of the draft's initial ones. Does nothing if the target's embeddings are narrower.
    """
    embeddings = draft.get_input_embeddings().get_parameter("weight")
    targets = target.get_input_embeddings().get_parameter("weight")
    width = embeddings.shape[-1]
    if targets.shape[-1] < width:
        return
    wide = targets.float()
    _, directions = torch.linalg.eigh(wide.T @ wide)  # smallest first
    projected = wide @ directions[:, -width:]
    embeddings.copy_(projected * (embeddings.std() / projected.std()))


@torch.no_grad()
def has_plain_head(model: CausalLM) -> bool:
    """Return whether the LM head alone gives the logits, as some models cap or scale them."""
    tokens = torch.arange(8, device=model.device)[None] % model.vocab_size
    with capture_hidden_states(model.model) as captured:
        logits = model.model(input_ids=tokens, use_cache=False).logits
    return torch.allclose(model.head(captured[0]).float(), logits.float(), atol=1e-3, rtol=1e-3)


def distillation_loss(
    draft: CausalLM, labels: Labels, rows: Tensor, hot: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return how far a draft is from its target on some texts.

    It goes backward inside, as `in_parts` does.

    Args:
        draft: the draft.
        labels: the target's labels.
        rows: the numbers of the texts.
        hot: [S] tokens, if only the target's probabilities among these count.

    Returns:
        The mean KL(target || draft) in nats over the positions that count, and the share of these
        positions at which both have the same argmax.
    """
    part = labels.texts.take(rows)
    whole = labels.probs(rows)
    head: Any = draft.head
    same = torch.zeros((), device=part.tokens.device)
    wanted = whole
    weight = None
    if hot is not None:
        wanted = whole.within(hot, draft.vocab_size)
        # A leaf, which gathers the gradients of all parts.
        weight = head.weight[hot].detach().requires_grad_(torch.is_grad_enabled())

    def divergence(states: Tensor, chosen: slice) -> Tensor:
        nonlocal same
        logits = head(states) if weight is None else functional.linear(states, weight)
        best = logits.argmax(-1) if hot is None else hot[logits.argmax(-1)]
        same = same + (best == whole.tokens[chosen, 0]).sum()
        chosen_probs = wanted.at(chosen)
        entropy = torch.special.entr(chosen_probs.probs).sum()
        return cross_entropy(logits.float(), chosen_probs) - entropy

    with mixed_precision(part.tokens.device):
        with capture_hidden_states(draft.model, last_only=True) as states:
            draft.model(input_ids=part.tokens, use_cache=False)
        total = in_parts(states[0][part.counted()], divergence, len(whole.tokens))
    if weight is not None and weight.grad is not None:
        # A term of value 0, whose gradient by the head is the one that the leaf has gathered.
        carrier = (head.weight[hot] * weight.grad).sum()
        total = total + carrier - carrier.detach()
    return total, same / len(whole.tokens)
