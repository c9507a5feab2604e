"""Heads that draft from the target's hidden states: Lyanna's and an EAGLE-like one.

Lyanna's head is that of arXiv 2602.21224. The EAGLE-like head (arXiv 2401.15077) has the same parts
and size, so that the two can be compared. The papers give few details; the forms here are ours.

Lyanna's head predicts state after state without seeing drafted tokens. Token information is added
to the logits instead. The feature h_j [d] is the input of the target's LM head at position j; the
head predicts features. (The paper's Figure 3 uses the states below the last layer, which cost 0.21
nats: docs/lab/2026-11/log.md.) All heads have logits for the *hot set* alone: the S most frequent
tokens of the target's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.engine.target import Capture

HEAD_KINDS = ("lyanna", "eagle")
# The last positions of a prompt that a head reads. It is trained on texts of some hundred
# positions. Behind three prompts of 3,700 tokens tau was 2.81 with the last 512 positions and 2.57
# with all of them, though lower for one prompt, and reading takes an eighth of the time
# (docs/lab/2026-11/log.md).
HEAD_READS = 512
# Settings that older versions could choose, with the only values that are still supported.
RETIRED_HEAD_SETTINGS = {"known": True, "feature": "head", "fusion": "every"}

KeysValues = tuple[Tensor, Tensor]


class HiddenConfig(PreTrainedConfig):
    """Settings of a head.

    Attributes:
        kind: one of HEAD_KINDS.
        hidden_size: the target's, as are `num_attention_heads`, `num_key_value_heads`, `head_dim`,
            `rope_theta`, `rms_norm_eps`, `vocab_size` and `max_position_embeddings`.
        num_hidden_layers: number of the head's own decoder layers.
        intermediate_size: of the head's own decoder layers.
        rank: of the token information (lyanna); 0 for a head without it.
        bias: whether queries, keys and values have biases, as in Qwen2.
        hot_size: size of the hot set.
        curves: calibration (a, b, m) for each of 1, 2, ... places ahead. If all tokens before it
            are accepted, a token to which the head gives the log-odds x is accepted with the
            log-odds a + b x; m is the mean acceptance of the head's argmax.
        target: fingerprint of its target (`forerun.model.causal_lm.fingerprint`).
        recipe: how it was trained.
    """

    model_type = "forerun-hidden"
    if TYPE_CHECKING:  # some versions of transformers turn annotations into fields
        curves: list[list[float]]
        target: dict[str, Any]
        recipe: dict[str, Any]

    def __init__(  # noqa: PLR0913 - transformers passes each field of config.json by its name
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
        self.kind = kind
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.num_hidden_layers = num_hidden_layers
        self.rank = rank
        self.bias = bias
        for name, supported in RETIRED_HEAD_SETTINGS.items():
            if kwargs.pop(name, supported) != supported:
                raise ValueError("this head has a form that is no longer supported: train it again")
        self.vocab_size = vocab_size
        self.hot_size = hot_size
        self.max_position_embeddings = max_position_embeddings
        self.curves = curves or [[0.0, 1.0, 0.7]]
        self.target = target or {}
        self.recipe = recipe or {}
        super().__init__(**kwargs)


class HiddenDrafter(PreTrainedModel):
    """A head of one of HEAD_KINDS.

    lyanna: P(x_{j+1} | x_j) = softmax(W_o h^_j + T(x_j)), where h^ are the states of the layers and
    T(v) = U norm(E[v]); a rank of 0 leaves T out. The layers see the tokens after the target's own
    features, never a drafted token.
    eagle: P(x_{j+1}) = softmax(W_o h^_j). The layers see the token after each state, even if it was
    drafted.
    W_o are the rows of the target's LM head for the hot set; they are not part of the head.

    Attributes:
        hot: [S] the hot set, most frequent token first.
    """

    config_class = HiddenConfig
    config: HiddenConfig
    capture: Capture = "head"

    def __init__(self, config: HiddenConfig) -> None:
        super().__init__(config)
        if config.kind not in HEAD_KINDS:
            raise ValueError(
                f"a head's kind must be {' or '.join(HEAD_KINDS)}, not {config.kind!r}"
            )
        size = config.hidden_size
        self.hot: Tensor
        self.register_buffer("hot", torch.zeros(config.hot_size, dtype=torch.long))
        self.layers = nn.ModuleList([HeadLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        if config.kind == "lyanna" and config.rank:
            self.embed = nn.Embedding(config.vocab_size, config.rank)
            self.answer = nn.Linear(config.rank, config.hot_size, bias=False)
        PreTrainedModel.post_init(self)

    @property
    def reads(self) -> int:
        """Return how many of a prompt's last positions the head reads. The limit is ours."""
        return HEAD_READS

    def begin(self) -> None:
        """Set initial weights: layers return their input, and token information is 0."""
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
        """Return the layers' input [.., d].

        Args:
            states: states [.., d].
            embedded: embeddings [.., d] of the tokens after the states, if these are known.
        """
        if embedded is None:
            return functional.linear(states, self.fuse.weight[:, : states.shape[-1]])
        normed = functional.rms_norm(embedded, embedded.shape[-1:])
        return self.fuse(torch.cat([states, normed], -1))

    def finish(self, x: Tensor) -> Tensor:
        """Return the next states [.., d] from the last layer's output."""
        return self.norm(x)

    @property
    def width(self) -> int:
        """Return the size of a feature."""
        return self.config.hidden_size

    @property
    def informed(self) -> bool:
        """Return whether the head has token information."""
        return self.config.kind == "lyanna" and self.config.rank > 0

    def drafted(self, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Draft `steps` places from every position (HASS, arXiv 2408.15766).

        Later places read the head's own states, as in decoding.

        Args:
            features: the target's features [B, T, d].
            embedded: the target's embeddings [B, T, d] of the same tokens.
            steps: the number of places.

        Returns:
            States [B, T - k, d] for k = 1 .. steps. State j predicts the feature at position j + k
            from features 0 .. j.
        """
        length = features.shape[1]
        positions = torch.arange(length, device=features.device)
        x = features
        drafted = []
        cache: list[list[KeysValues]] = [[] for _ in self.layers]
        for k in range(1, steps + 1):
            if self.config.kind == "eagle" or k == 1:
                # With the token after each state. The last k states have none; they are cut below.
                x = self.fused(x, embedded.roll(-k, 1)).float()
            else:
                x = self.fused(x).float()
            for layer, seen in zip(self.layers, cache, strict=True):
                x = layer(x, positions + k - 1, seen)
            x = self.norm(x)
            drafted.append(x[:, : length - k])
        return drafted


class HeadLayer(nn.Module):
    """A decoder layer like Llama's."""

    def __init__(self, config: HiddenConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.size = config.head_dim
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        self.before_attention = nn.RMSNorm(size, config.rms_norm_eps)
        self.qkv = nn.Linear(size, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(self.heads * self.size, size, bias=False)
        self.before_mlp = nn.RMSNorm(size, config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self.theta = config.rope_theta

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies [D / 2] of the rotary embedding.

        They are no buffer, because `from_pretrained` restores only tensors that are stored.
        """
        exponents = -torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size
        return self.theta**exponents

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, N, D], and keys and values [B, G, N, D].

        Args:
            x: states [B, N, d].
            positions: their positions [N] or [B, N].
        """
        parts = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        rotated_count = self.heads + self.groups
        frequencies = self.frequencies(x.device)
        rotated = rotate(parts[:, :rotated_count], positions, frequencies)
        return rotated[:, : self.heads], rotated[:, self.heads :], parts[:, rotated_count:]

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output [B, N, d].

        Args:
            x: the layer's input [B, N, d].
            mixed: the output of attention [B, H, N, D].
        """
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def forward(self, x: Tensor, positions: Tensor, seen: list[KeysValues]) -> Tensor:
        """Return the next states [B, T, d] of the drafts of all positions.

        Draft t sees the target's features up to t and its own earlier states. `seen` holds the keys
        and values of the steps so far; those of this step are appended.
        """
        queries, keys, values = self.project(x, positions)
        keys = keys.repeat_interleave(self.heads // self.groups, 1)
        values = values.repeat_interleave(self.heads // self.groups, 1)
        seen.append((keys, values))
        if len(seen) == 1:
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            mixed = self._mix_drafts(queries, seen)
        return self.finish(x, mixed)

    def _mix_drafts(self, queries: Tensor, seen: list[KeysValues]) -> Tensor:
        """Return the output of attention [B, H, T, D] of a later step.

        Each draft attends to the first step's states up to its position, and to its own states.
        """
        first_keys, first_values = seen[0]
        length = queries.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
        scores = [(queries @ first_keys.transpose(-1, -2)).masked_fill(later, -torch.inf)]
        scores += [(queries * keys).sum(-1, keepdim=True) for keys, _ in seen[1:]]
        weights = (torch.cat(scores, -1) * self.size**-0.5).softmax(-1)
        mixed = weights[..., :length] @ first_values
        for i, (_, values) in enumerate(seen[1:]):
            mixed = mixed + weights[..., length + i : length + i + 1] * values
        return mixed


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> Tensor:
    """Return queries or keys, rotated by a rotary embedding.

    Args:
        x: queries or keys [B, H, N, D].
        positions: their positions [N] or [B, N].
        frequencies: frequencies [D / 2] of the embedding.
        scaling: factor of the cosines and sines.
    """
    angle = positions[..., None].float() * frequencies
    cos = angle.cos()
    sin = angle.sin()
    if scaling != 1:
        cos = cos * scaling
        sin = sin * scaling
    cos = torch.cat([cos, cos], -1).to(x.dtype)
    sin = torch.cat([sin, sin], -1).to(x.dtype)
    if positions.ndim == 2:
        cos = cos[:, None]
        sin = sin[:, None]
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def hot_set(counts: Sequence[int] | Tensor, size: int) -> tuple[Tensor, float]:
    """Return the most frequent tokens and how much of the text they cover.

    Args:
        counts: how often each token of the vocabulary occurs.
        size: the number S of tokens to return.

    Returns:
        The tokens [S], most frequent first, and their share of all counts.

    Raises:
        ValueError: `size` is less than 1 or more than the vocabulary.
    """
    counts = torch.as_tensor(counts)
    if not 1 <= size <= len(counts):
        raise ValueError(f"the hot set must have 1 to {len(counts)} tokens, not {size}")
    hot = counts.argsort(descending=True, stable=True)[:size]
    return hot, float(counts[hot].sum() / counts.sum().clamp(min=1))
