"""A draft learns the target's laws, on the target's own output and on plain text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from forerun.model import CausalLM
from forerun.train.data import Windows
from forerun.train.judged import Recall, head_is_plain, judged
from forerun.train.laws import cross_entropy
from forerun.train.lm import logits_of, states_at
from forerun.train.loop import TrainConfig, train
from forerun.train.parts import in_parts
from forerun.train.texts import Texts

EVALUATED = 256  # texts, while a draft is trained


def distill_chats(
    judge: CausalLM,
    draft: PreTrainedModel,
    learnt: Texts,
    held: Texts,
    config: TrainConfig,
    out: Path,
    hot: Tensor | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Trains `draft` in place on conversations, resumes from `out`: KL(target || draft) where a draft is used, over the
    target's most probable tokens (`forerun.train.laws`). The target runs over each text once, as far as memory allows.

    `hot` [S]: the only tokens that the draft will propose; it then learns the target's probabilities among these.
    """
    learnt, held = learnt.to(judge.device), held.to(judge.device)
    if not head_is_plain(CausalLM(draft), learnt.take(torch.arange(1)).tokens, tolerance=1e-3):
        raise ValueError(f"{type(draft).__name__} caps or scales its logits; conversations cannot train such a draft")
    recall, again = judged(judge, learnt), judged(judge, held)
    asked = held.spread(EVALUATED)

    head = draft.get_output_embeddings()

    def compared(texts: Texts, recall: Recall, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean divergence, the number of places where both have one argmax, and of all places."""
        part = texts.take(rows)
        known, met = recall(rows), part.met()
        places, same = met.flatten().nonzero()[:, 0], torch.zeros((), dtype=torch.long, device=met.device)
        law = whole = known.law(places)
        weight = None
        if hot is not None:
            law = whole.within(hot, draft.config.vocab_size)
            # Rows of their own, which gather the gradients of all parts.
            weight = head.weight[hot].detach().requires_grad_(torch.is_grad_enabled())

        def divergence(states: Tensor, chosen: slice) -> Tensor:
            nonlocal same
            wanted = law.at(chosen)
            logits = head(states) if weight is None else functional.linear(states, weight)
            best = logits.argmax(-1) if hot is None else hot[logits.argmax(-1)]
            same = same + (best == whole.tokens[chosen, 0]).sum()
            return cross_entropy(logits.float(), wanted) - torch.special.entr(wanted.probabilities).sum()

        with torch.autocast(judge.device.type, torch.bfloat16):
            total = in_parts(states_at(draft, part.tokens, met), divergence, len(places))
        if weight is not None and weight.grad is not None:
            way = (head.weight[hot] * weight.grad).sum()
            total = total + way - way.detach()
        return total, same, met.sum()

    def loss(rows: Tensor) -> Tensor:
        return compared(learnt, recall, rows)[0]

    @torch.no_grad()
    def evaluate() -> float:
        draft.eval()
        found = [
            torch.stack([each.double() for each in compared(held, again, rows)]) for rows in asked.split(config.batch)
        ]
        means, same, counts = torch.stack(found).unbind(-1)
        say(f"{out.name} greedy agreement on held-out answers {float(same.sum() / counts.sum()):.3f}")
        draft.train()
        return float((means * counts).sum() / counts.sum())

    config = replace(config, compile=False)  # texts are of many lengths
    train(draft, loss, lambda step: learnt.batch(config.seed, step, config.batch), evaluate, config, out, say)


def distillation_loss(target: PreTrainedModel, draft: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Mean KL(target || draft) in nats over all positions of tokens [B, T+1]; the target is frozen."""

    def loss(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits_of(target, tokens[:, :-1]).float().log_softmax(-1)
        found = logits_of(draft, tokens[:, :-1]).float().log_softmax(-1)
        return functional.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)

    return loss


@torch.no_grad()
def agreement(target: PreTrainedModel, draft: PreTrainedModel, windows: Tensor) -> float:
    """Share of positions of windows [B, T+1] where both have the same argmax."""
    same = [
        (logits_of(target, rows[:, :-1]).argmax(-1) == logits_of(draft, rows[:, :-1]).argmax(-1)).float().mean()
        for rows in windows.split(16)
    ]
    return float(torch.stack(same).mean())


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    own: np.ndarray,
    stream: np.ndarray,
    config: TrainConfig,
    out: Path,
    own_share: float = 0.5,
    say: Callable[[str], None] = print,
) -> None:
    """Trains `draft` in place; resumes from `out`.

    `own` [S, length + 1]: windows of the target's own output, of which the last 5 percent are kept for
    validation. `stream` [n]: text tokens for the other share of a batch, so that a small set of own output is not
    learnt by heart.
    """
    held = torch.from_numpy(own[-max(1, len(own) // 20) :][:64].astype(np.int64)).to(target.device)
    mine = own[: -max(1, len(own) // 20)]
    text = Windows(stream, config.length, config.seed)
    from_own = round(config.batch * own_share)
    loss = distillation_loss(target, draft)

    def batch(step: int) -> Tensor:
        rows = np.random.default_rng([config.seed, step]).integers(len(mine), size=from_own)
        chosen = torch.from_numpy(mine[rows].astype(np.int64))
        return torch.cat([chosen, text.batch(step, config.batch - from_own)])

    @torch.no_grad()
    def evaluate() -> float:
        draft.eval()
        value = sum(float(loss(rows)) * len(rows) for rows in held.split(16)) / len(held)
        say(f"{out.name} greedy agreement on held-out own output {agreement(target, draft, held):.3f}")
        draft.train()
        return value

    target.requires_grad_(False).eval()
    train(draft, loss, batch, evaluate, config, out, say)
