"""Heads that draft from the target's hidden states: Lyanna's (arXiv 2602.21224) and, for comparison, an EAGLE-like one
(arXiv 2401.15077) of the same parts and size. The papers give few details; the forms here are ours.

Lyanna's head predicts state after state without seeing drafted tokens. Token information is added to the logits. The
feature h_j [d] is the input of the target's LM head at position j; the head predicts features. (The paper's Figure 3
uses the states below the last layer; docs/log.md has the cost.) All heads have logits for the *hot set* alone: the S
most frequent tokens of the target's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.engine.target import Capture

KINDS = ("lyanna", "eagle")
# A head is trained on texts of some hundred positions. Behind three prompts of 3,700 tokens tau was 2.81 with the last
# 512 and 2.57 with all, though lower for one of them (docs/log.md), and reading takes an eighth of the time.
READS = 512
OLDER = {
    "known": True,
    "feature": "head",
    "fusion": "every",
}  # what older files may choose, and did


class HiddenConfig(PreTrainedConfig):
    """Settings of a head.

    Attributes:
        kind: one of KINDS.
        hidden_size, num_attention_heads, num_key_value_heads, head_dim, rope_theta, rms_norm_eps: the target's.
        num_hidden_layers, intermediate_size: of the head's decoder layers.
        rank: of the token information (lyanna); 0 for a head without it.
        bias: whether its queries, keys and values have biases, as Qwen2's.
        vocab_size, hot_size: sizes of the target's vocabulary and of the hot set.
        max_position_embeddings: the target's.
        curves: calibration (a, b, m) for each of 1, 2, ... places ahead. If all tokens before are accepted, a token
            with log-odds x by the head is accepted with log-odds a + b x; m is the mean acceptance of the head's
            argmax.
        target: fingerprint of its target (`forerun.model.causal_lm.fingerprint`).
        recipe: how it was trained.
    """

    model_type = "forerun-hidden"
    if TYPE_CHECKING:  # some versions of transformers take annotations for fields
        curves: list[list[float]]
        target: dict[str, Any]
        recipe: dict[str, Any]

    def __init__(
        self,
        kind: str = "lyanna",
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 16,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        num_hidden_layers: int = 1,
        rank: int = 32,
        bias: bool = False,
        vocab_size: int = 256,
        hot_size: int = 64,
        max_position_embeddings: int = 1024,
        curves: list[list[float]] | None = None,
        target: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.kind, self.hidden_size, self.intermediate_size = kind, hidden_size, intermediate_size
        self.num_attention_heads, self.num_key_value_heads = (
            num_attention_heads,
            num_key_value_heads,
        )
        self.head_dim, self.rope_theta, self.rms_norm_eps = head_dim, rope_theta, rms_norm_eps
        self.num_hidden_layers, self.rank, self.bias = num_hidden_layers, rank, bias
        if any(kwargs.pop(name, value) != value for name, value in OLDER.items()):
            raise ValueError("this head has a form that is no longer supported: train it again")
        self.vocab_size, self.hot_size, self.max_position_embeddings = (
            vocab_size,
            hot_size,
            max_position_embeddings,
        )
        self.curves = curves or [[0.0, 1.0, 0.7]]
        self.target, self.recipe = target or {}, recipe or {}
        super().__init__(**kwargs)


class HiddenDrafter(PreTrainedModel):
    """A head of one of the KINDS. `hot` [S] is its hot set, most frequent token first.

    lyanna: P(x_{j+1} | x_j) = softmax(W_o h^_j + T(x_j)) with states h^ of the layers and T(v) = U norm(E[v]), or no T
    for a rank of 0. The layers see the tokens after the target's own features, never a drafted one.
    eagle: P(x_{j+1}) = softmax(W_o h^_j). The layers see the token after each state, drafted ones too.
    W_o is the target's LM head, at the hot set; it is not part of the head.
    """

    config_class = HiddenConfig
    config: HiddenConfig
    capture: Capture = "head"

    def __init__(self, config: HiddenConfig) -> None:
        super().__init__(config)
        if config.kind not in KINDS:
            raise ValueError(f"a head's kind must be {' or '.join(KINDS)}, not {config.kind!r}")
        size = config.hidden_size
        self.hot: Tensor
        self.register_buffer("hot", torch.zeros(config.hot_size, dtype=torch.long))
        self.layers = nn.ModuleList([HeadLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        if config.kind == "lyanna" and config.rank:
            self.embed = nn.Embedding(config.vocab_size, config.rank)
            self.answer = nn.Linear(config.rank, config.hot_size, bias=False)
        self.post_init()

    @property
    def reads(self) -> int:
        """Return the number of a prompt's last positions that it reads. Ours."""
        return READS

    def begin(self) -> None:
        """Set initial weights for training: layers return their input, and token information is 0."""
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "answer.weight")):
                nn.init.zeros_(parameter)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)

    def token_information(self, tokens: Tensor) -> Tensor:
        """Return the token information T [.., S] of tokens [..]."""
        return self.answer(self.token_states(tokens))

    def token_states(self, tokens: Tensor) -> Tensor:
        """Return norm(E[v]) [.., r] of tokens v [..]."""
        return functional.rms_norm(self.embed(tokens), (self.config.rank,))

    def fused(self, states: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Return the layers' input [.., d] of states [.., d], with the embeddings of the tokens after them if given."""
        if embedded is None:
            return functional.linear(states, self.fuse.weight[:, : states.shape[-1]])
        return self.fuse(
            torch.cat([states, functional.rms_norm(embedded, embedded.shape[-1:])], -1)
        )

    def finish(self, x: Tensor) -> Tensor:
        """Return the states [.., d] that follow, from the last layer's output."""
        return self.norm(x)

    @property
    def width(self) -> int:
        """Return the size of a feature."""
        return self.config.hidden_size

    @property
    def informed(self) -> bool:
        """Return whether it has token information."""
        return self.config.kind == "lyanna" and self.config.rank > 0

    def drafted(self, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Draft `steps` places from every position, with the head's own states as input (HASS, arXiv 2408.15766).

        `features` [B, T, d] and `embedded` [B, T, d] are the target's over the same tokens. Return states [B, T - k, d]
        for k = 1 .. steps. State j predicts the feature at position j + k from features 0 .. j.
        """
        length = features.shape[1]
        positions = torch.arange(length, device=features.device)
        x, found = features, []
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        for k in range(1, steps + 1):
            if self.config.kind == "eagle" or k == 1:
                # The token after each state. The last k have none, and are cut off below.
                x = self.fused(x, embedded.roll(-k, 1)).float()
            else:
                x = self.fused(x).float()
            for layer, own in zip(self.layers, seen, strict=True):
                x = layer(x, positions + k - 1, own)
            x = self.norm(x)
            found.append(x[:, : length - k])
        return found


class HeadLayer(nn.Module):
    """A decoder layer like Llama's."""

    def __init__(self, config: HiddenConfig) -> None:
        super().__init__()
        size, self.size = config.hidden_size, config.head_dim
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.before_attention = nn.RMSNorm(size, config.rms_norm_eps)
        self.qkv = nn.Linear(size, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(self.heads * self.size, size, bias=False)
        self.before_mlp = nn.RMSNorm(size, config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self.theta = config.rope_theta

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the rotation's frequencies [D / 2]. Not a buffer, as `from_pretrained` restores stored tensors
        alone."""
        return self.theta ** (
            -torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size
        )

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, N, D], keys and values [B, G, N, D] of states [B, N, d] at positions [N] or [B, N]."""
        parts = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        turned = rotate(parts[:, : self.heads + self.groups], positions, self.frequencies(x.device))
        return (
            turned[:, : self.heads],
            turned[:, self.heads :],
            parts[:, self.heads + self.groups :],
        )

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output [B, N, d] from that of attention [B, H, N, D]."""
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def forward(self, x: Tensor, positions: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the next states [B, T, d] of the drafts of all positions. Draft t sees the target's features up to t
        and its own earlier states. `seen` holds the steps' keys and values so far; this step's are appended."""
        q, k, v = self.project(x, positions)
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        seen.append((k, v))
        if len(seen) == 1:
            return self.finish(x, functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        first_k, first_v = seen[0]
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
        scores += [(q * own).sum(-1, keepdim=True) for own, _ in seen[1:]]
        weights = (torch.cat(scores, -1) * self.size**-0.5).softmax(-1)
        mixed = weights[..., :length] @ first_v
        for i, (_, own) in enumerate(seen[1:]):
            mixed = mixed + weights[..., length + i : length + i + 1] * own
        return self.finish(x, mixed)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> Tensor:
    """Return queries or keys [B, H, N, D], rotated to positions [N] or [B, N] by `frequencies` [D / 2]. `scaling`: of
    cosines and sines."""
    angle = positions[..., None].float() * frequencies
    cos, sin = angle.cos(), angle.sin()
    if scaling != 1:
        cos, sin = cos * scaling, sin * scaling
    cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (cos, sin))
    if positions.ndim == 2:
        cos, sin = cos[:, None], sin[:, None]
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def hot_set(counts: Sequence[int] | Tensor, size: int) -> tuple[Tensor, float]:
    """Return the `size` most frequent tokens [S], most frequent first, and the share of all counts that they cover.

    Raises ValueError for a size outside the vocabulary.
    """
    counts = torch.as_tensor(counts)
    if not 1 <= size <= len(counts):
        raise ValueError(f"the hot set must have 1 to {len(counts)} tokens, not {size}")
    hot = counts.argsort(descending=True, stable=True)[:size]
    return hot, float(counts[hot].sum() / counts.sum().clamp(min=1))
