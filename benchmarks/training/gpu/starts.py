"""The forms of heads, and what they begin with."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.training.gpu.data import Data
from benchmarks.training.gpu.target import Target
from forerun.backends.hot import hot_tokens
from forerun.heads.heads import HeadLayer, HiddenConfig, HiddenDrafter
from forerun.zoo import MODELS, ModelSource

HOT = 16_384  # tokens that a head drafts
RANK = 64  # numbers of token information
INNER = 2048  # neurons
BATCH = 16_384  # positions of a step
PROMPT_WEIGHT = 0.3  # of a prompt's token among hot tokens; an answer's counts 1
# The bigrams' part of a head begins at this share of its size, because the states know most of it.
BIGRAM_SIZE = 0.4
LEAST_GAIN = 0.1  # of a norm
FIT_POSITIONS = 16_384  # of a batch for the least squares
FIT_BATCHES = 24
RIDGE = 3e-3
CONTEXT = 32_768


@dataclass(frozen=True)
class Form:
    """A head and how it is trained.

    Attributes:
        kind: one of HEAD_KINDS.
        hot: tokens that it drafts.
        rank: numbers of token information.
        inner: neurons, at most the target's.
        unroll: drafted places in the loss.
        reads_lower: whether the first step sees states of two lower blocks, as EAGLE-3 does
            (arXiv 2503.01840).
        copied: whether it begins as least squares' map and the target's last layer.
        reads_token: whether the first step sees the token that follows.
        law: whether the loss is with the target's distribution, not with its likeliest token.
        batch: positions of a step.
        seed: of weights and of the order of the data.
    """

    kind: str = "lyanna"
    hot: int = HOT
    rank: int = RANK
    inner: int = INNER
    unroll: int = 4
    reads_lower: bool = False
    copied: bool = True
    reads_token: bool = True
    law: bool = True
    batch: int = BATCH
    seed: int = 0


MAIN = Form()
# The short runs, which change one part each.
SHORT = {
    "as it is": MAIN,
    "no token in the first step": replace(MAIN, reads_token=False),
    "no token information": replace(MAIN, rank=0),
    "likeliest token": replace(MAIN, law=False),
    "8,192 hot tokens": replace(MAIN, hot=8192),
    "unrolled once": replace(MAIN, unroll=1),
    "no map and no copied layer": replace(MAIN, copied=False),
    "EAGLE-like": replace(MAIN, kind="eagle"),
    "states of three layers": replace(MAIN, reads_lower=True),
    "1,024 neurons": replace(MAIN, inner=INNER // 2),
}


class Starts:
    """What heads begin with, made once for all.

    Attributes:
        hot: [S] the hot tokens, the most frequent ones first.
        number: [V] the place of each token among them, or -1.
        embed, answer: [V, r] and [S, r] a model of the next hot token by the last one.
        fuse: least squares' maps [d, 2 d] to the next state, with and without the next token.
        deeper: such a map [d, 4 d] with lower states, or None.
    """

    def __init__(self, name: str, target: Target, data: Data, batch: int, hot: int) -> None:
        vocabulary = len(target.embed)
        counts = _counts(data, vocabulary)
        draft = ModelSource.parse(MODELS[name].draft or name, "draft")
        known = hot_tokens(cast(Path, draft.hot_folder), None, vocabulary)
        assert known is not None
        # The draft's own order decides for rare tokens.
        counts[known] += torch.linspace(2, 0, len(known))
        order = counts.argsort(descending=True, stable=True)
        self.hot = order[:hot].to(target.device)
        self.number = torch.full((vocabulary,), -1, device=target.device)
        self.number[self.hot] = torch.arange(hot, device=target.device)
        self.embed, self.answer = self._bigrams(data, vocabulary, 2 * batch)
        self.fuse = {reads: least_squares(target, data, reads) for reads in (True, False)}
        self.deeper = None
        if len(data.lower):
            self.deeper = least_squares(target, data, True, data.lower)

    def _bigrams(self, data: Data, vocabulary: int, size: int) -> tuple[Tensor, Tensor]:
        """Fit a model of the next hot token by the last one.

        Returns:
            Its states [V, r], and its weight [S, r] at a share of its size.
        """
        device = data.tokens.device
        steps = min(400, 3 * len(data.tokens) // size + 1)
        torch.manual_seed(0)
        embed = torch.randn(vocabulary, RANK, device=device, requires_grad=True)
        weight = torch.zeros(len(self.hot), RANK, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([{"params": [embed]}, {"params": [weight]}], betas=(0.9, 0.95))
        is_last = torch.zeros(len(data.tokens), dtype=torch.bool, device=device)
        is_last[data.starts + data.sizes - 1] = True
        following = self.number[data.tokens.roll(-1)]
        chosen = (~is_last & (following >= 0)).nonzero()[:, 0]
        for step in range(steps):
            rising = (step + 1) / min(30, 1 + steps // 5)
            falling = (1 - step / steps) / 0.7
            for group, rate in zip(optimizer.param_groups, (0.05, 0.01), strict=True):
                group["lr"] = rate * min(1, rising, falling)
            at = chosen[torch.randint(len(chosen), (size,), device=device)]
            with torch.autocast(device.type, torch.bfloat16):
                states = functional.rms_norm(embed[data.tokens[at]], (RANK,))
                logits = functional.linear(states, weight)
            optimizer.zero_grad()
            functional.cross_entropy(logits.float(), following[at]).backward()
            optimizer.step()
        return functional.rms_norm(embed.detach(), (RANK,)), BIGRAM_SIZE * weight.detach()


def _counts(data: Data, vocabulary: int) -> Tensor:
    """Return how often each token occurs [V], where a prompt's token counts less."""
    position = torch.arange(int(data.lengths.max()), device=data.tokens.device)
    is_answer = position >= data.begins[:, None]
    within = position < data.sizes[:, None]
    weights = torch.where(is_answer[within], 1.0, PROMPT_WEIGHT)  # of all positions in turn
    return torch.bincount(data.tokens, weights, vocabulary).cpu()


def least_squares(
    target: Target, data: Data, reads_token: bool, lower: Tensor | None = None
) -> Tensor:
    """Return the least squares' map [d, 2 d] from a state to the next one.

    It also reads the next token's embedding, if `reads_token`. With lower states it is [d, 4 d].
    """
    size = target.size
    gain = target.norm.float().clamp(min=LEAST_GAIN)
    reads = (2 if lower is None else 4) * size
    both = torch.zeros(reads, reads, device=target.device)
    wanted = torch.zeros(reads, size, device=target.device)
    for rows in data.batches(FIT_POSITIONS, random.Random(1))[:FIT_BATCHES]:
        at, within, _ = data.take(rows)
        states = data.states[at].float()
        seen = within[:, 1:]
        following = target.embed[data.tokens[at][:, 1:]].float()
        after = functional.rms_norm(following, (size,))
        x = torch.cat([states[:, :-1], after * reads_token], -1)[seen]
        if lower is not None:
            x = torch.cat([x, lower[at[:, :-1]][seen].float()], -1)
        both += x.T @ x
        wanted += x.T @ (states[:, 1:] / gain)[seen]
    both.diagonal().add_(RIDGE * both.diagonal().mean())
    return torch.linalg.solve(both, wanted).T


class Deeper(HiddenDrafter):
    """A Lyanna head whose first step adds `more` of the states of two lower blocks.

    It was only tried.

    Attributes:
        lower: [B, T, 2 d] these states, which are set before a forward.
    """

    lower: Tensor

    def __init__(self, config: HiddenConfig) -> None:
        super().__init__(config)
        self.more = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def fused(self, states: Tensor, embedded: Tensor | None = None) -> Tensor:
        x = super().fused(states, embedded)
        return x if embedded is None else x + self.more(self.lower)


def begin(target: Target, starts: Starts, form: Form) -> HiddenDrafter:
    """Return a head of a form.

    A copied one begins as least squares' map; its layers are the target's last, whose output does
    not count yet.
    """
    config = _config(target, form)
    torch.manual_seed(form.seed)
    head = (Deeper if form.reads_lower else HiddenDrafter)(config)
    head.begin()
    head.to(target.device)
    head.hot.copy_(starts.hot[: form.hot])
    with torch.no_grad():
        if head.informed:
            head.embed.weight.copy_(starts.embed)
            head.answer.weight.copy_(starts.answer[: form.hot])
        head.norm.weight.copy_(target.norm.clamp(min=LEAST_GAIN))
        if form.copied:
            _copy_map(head, target, starts, form)
            _copy_layer(cast(HeadLayer, head.layers[0]), target, config.intermediate_size)
    return head


def _config(target: Target, form: Form) -> HiddenConfig:
    inner = min(form.inner, target.inner)
    if form.kind == "eagle":
        # It has the same size: more neurons in place of token information.
        table = RANK * (len(target.embed) + form.hot)
        inner += round(table / (3 * target.size * 32)) * 32
    return HiddenConfig(
        kind=form.kind,
        hidden_size=target.size,
        intermediate_size=inner,
        num_attention_heads=target.heads,
        num_key_value_heads=target.groups,
        head_dim=target.width,
        rope_theta=target.theta,
        rms_norm_eps=target.eps,
        rank=form.rank,
        bias=target.is_biased,
        vocab_size=len(target.embed),
        hot_size=form.hot,
        states=form.unroll,
        max_position_embeddings=CONTEXT,
    )


def _copy_map(head: HiddenDrafter, target: Target, starts: Starts, form: Form) -> None:
    head.fuse.weight.copy_(starts.fuse[form.reads_token])
    if isinstance(head, Deeper):
        assert starts.deeper is not None
        fuse, more = starts.deeper.split(2 * target.size, 1)
        head.fuse.weight.copy_(fuse)
        head.more.weight.copy_(more)


def _copy_layer(layer: HeadLayer, target: Target, inner: int) -> None:
    """Copy the target's last layer, with its largest neurons if there are fewer."""
    last = target.blocks[-1]
    gate, up = last["gate_up"].float().chunk(2)
    sizes = gate.norm(dim=1) * up.norm(dim=1) * last["down"].float().norm(dim=0)
    kept = sizes.topk(min(inner, len(gate))).indices
    layer.qkv.weight.copy_(last["qkv"])
    if target.is_biased:
        layer.qkv.bias.copy_(last["bias"])
    layer.gate_up.weight[: len(kept)] = gate[kept]
    layer.gate_up.weight[inner : inner + len(kept)] = up[kept]
    layer.before_attention.weight.copy_(last["before_attention"])
    layer.before_mlp.weight.copy_(last["before_mlp"])
