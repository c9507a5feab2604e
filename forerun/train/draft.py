"""A draft for any target: a small Llama over the target's vocabulary, distilled on the target's own output."""

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
from forerun.train.run import Run, check_context
from forerun.train.texts import joined, load_train_val, of_windows, split_windows

VALIDATION = 0.05  # of the windows of own output
EVALUATED = 256  # texts, while a draft is trained


@dataclass(frozen=True)
class DraftRecipe:
    """How a draft is made.

    As many windows of plain text are added to those of own output, so that a small set is not learned by heart.
    """

    sequences: int = 3072  # windows of the target's own output
    length: int = 512  # tokens of a window; longer conversations are cut
    layers: int = 2  # of a new draft
    width: int = 192  # of a new draft
    hot: float = 1.0  # share of the vocabulary that it proposes, besides the context's tokens (`forerun.backends.hot`)
    steps: int = 2000
    batch: int = 16  # texts
    lr: float = 3e-3
    seed: int = 0


def train_draft(run: Run, recipe: DraftRecipe, init: str | None = None) -> None:
    """Distil a draft into `run.out`; with `init` go on from that model instead of a new Llama.

    Raises ValueError for settings, data, models and folders that do not fit.
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
    entries = draft.get_input_embeddings().num_embeddings
    if entries != target.vocab_size:
        raise ValueError(
            f"{init} has a vocabulary of {entries} entries, {run.target} of {target.vocab_size}"
        )
    drafter = CausalLM(draft.to(model.device))  # type: ignore[arg-type]
    if not has_plain_head(drafter):
        raise ValueError(
            f"{type(draft).__name__} caps or scales its logits; such a draft cannot be trained"
        )
    own = asdict(recipe) | {"init": init, "texts": parts and parts[0].digest}
    run.claim({"target": target.fingerprint}, own)
    if parts is None:
        windows = run.own_output(
            target,
            stream,
            sequences=recipe.sequences,
            prompts=[
                recipe.length // share for share in (8, 4, 2)
            ],  # drafts are used right after a prompt and later
            length=recipe.length,
            temperatures=(0.0, 0.8),
            seed=recipe.seed,
        )
        parts = split_windows(np.concatenate(windows), VALIDATION, 0, 0)
    texts, val = parts
    hot, share = hot_set(
        texts.frequencies(target.vocab_size), max(1, round(recipe.hot * target.vocab_size))
    )
    if stream is not None:
        starts = np.random.default_rng(recipe.seed).integers(
            len(stream) - recipe.length + 1, size=len(texts)
        )
        plain = of_windows(np.stack([stream[start : start + recipe.length] for start in starts]))
        texts = joined(texts, plain)
    labels, val_labels = (label(run, target, each) for each in (texts, val))
    own_hot = hot.to(model.device) if recipe.hot < 1 else None

    def loss(rows: Tensor) -> Tensor:
        return distillation_loss(drafter, labels, rows, own_hot)[0]

    def evaluate() -> float:
        asked = val.spread(EVALUATED).split(8)
        found = [
            torch.stack(distillation_loss(drafter, val_labels, rows, own_hot)) for rows in asked
        ]
        divergence, agreement = torch.stack(found).mean(0).tolist()
        run.say(f"{run.folder.name} greedy agreement on held-out output {agreement:.3f}")
        return float(divergence)

    batch = partial(texts.batch, recipe.seed, size=recipe.batch)
    settings = TrainConfig(
        recipe.steps, recipe.lr, tokens=recipe.batch * texts.mean_length, known=init is not None
    )
    train(draft, loss, batch, evaluate, settings, run.folder, run.say)
    draft.save_pretrained(run.out)
    tokenizer.save_pretrained(run.out)
    if recipe.hot < 1:
        save_hot(run.out, hot)
        run.say(f"its {len(hot)} tokens are {share:.2%} of its training output")
    text = (
        f"It drafts for `{run.target}`, whose tokenizer it has. Made by `forerun train draft` with"
    )
    save_card(
        run.out,
        "A draft for speculative decoding",
        text,
        asdict(recipe) | {"init": init} | run.provenance,
    )
    run.say(f"the draft is in {run.out}: forerun generate --target {run.target} --draft {run.out}")


def new_draft(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: DraftRecipe
) -> LlamaForCausalLM:
    """Make a Llama with tied embeddings, heads of 64, and the target's vocabulary and context."""
    config, pad = target.config.get_text_config(decoder=True), tokenizer.pad_token_id
    if pad is not None and pad >= config.vocab_size:
        raise ValueError(
            f"pad_token_id must be below the target's {config.vocab_size} embeddings, not {pad}"
        )
    torch.manual_seed(recipe.seed)
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,  # may be padded beyond the tokenizer's
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
    """Give a new draft the target's embeddings along their main directions, at the scale of its own (ours).

    Tokens that are alike for the target are then alike for the draft. Does nothing if the target's are narrower.
    """
    own, theirs = (
        model.get_input_embeddings().get_parameter("weight") for model in (draft, target)
    )
    if theirs.shape[-1] >= own.shape[-1]:
        wide = theirs.float()
        _, directions = torch.linalg.eigh(wide.T @ wide)  # smallest first
        seen = wide @ directions[:, -own.shape[-1] :]
        own.copy_(seen * (own.std() / seen.std()))


@torch.no_grad()
def has_plain_head(model: CausalLM) -> bool:
    """Whether the LM head alone gives the logits: some models cap or scale them."""
    tokens = torch.arange(8, device=model.device)[None] % model.vocab_size
    with capture_hidden_states(model.model) as captured:
        logits = model.model(input_ids=tokens, use_cache=False).logits
    return torch.allclose(model.head(captured[0]).float(), logits.float(), atol=1e-3, rtol=1e-3)


def distillation_loss(
    draft: CausalLM, labels: Labels, rows: Tensor, hot: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean KL(target || draft) in nats over the counted positions of some texts, and the share of these
    where both have one argmax. With `hot` [S] it is about the target's probabilities among these tokens alone.

    It goes backward inside, as `in_parts` does.
    """
    part, whole = labels.texts.take(rows), labels.probs(rows)
    head: Any = draft.head
    same, wanted, weight = torch.zeros((), device=part.tokens.device), whole, None
    if hot is not None:
        wanted = whole.within(hot, draft.vocab_size)
        # Rows of their own, which gather the gradients of all parts.
        weight = head.weight[hot].detach().requires_grad_(torch.is_grad_enabled())

    def divergence(states: Tensor, chosen: slice) -> Tensor:
        nonlocal same
        logits = head(states) if weight is None else functional.linear(states, weight)
        best = logits.argmax(-1) if hot is None else hot[logits.argmax(-1)]
        same = same + (best == whole.tokens[chosen, 0]).sum()
        own = wanted.at(chosen)
        return cross_entropy(logits.float(), own) - torch.special.entr(own.probs).sum()

    with mixed_precision(part.tokens.device):
        with capture_hidden_states(draft.model, last_only=True) as states:
            draft.model(input_ids=part.tokens, use_cache=False)
        total = in_parts(states[0][part.counted()], divergence, len(whole.tokens))
    if weight is not None and weight.grad is not None:
        way = (head.weight[hot] * weight.grad).sum()
        total = total + way - way.detach()
    return total, same / len(whole.tokens)
