"""EAGLE-3 heads (arXiv 2503.01840) as they are published: in the format of speculators
(https://github.com/vllm-project/speculators) and in the original layout (https://github.com/SafeAILab/EAGLE).

A feature is the target's states after three numbers of layers, side by side. The head maps it to its own size. One
decoder layer reads it beside the embedding of the token after it; later states follow from the head's own ones. Logits
are for a vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.engine.target import Capture
from forerun.heads.heads import rotate
from forerun.model.support import context_of, window_of

_ROPE = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # whose frequencies do not depend on how long a text is
READS = 2048  # positions: heads of the hub are trained on texts about as long
_UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, eq=False)
class Eagle3Config:
    """Settings of a head.

    Attributes:
        layer: transformers' configuration of its decoder layer, of the type llama or qwen3.
        stored: names of its weights. Biases and embeddings of its own are there if they are stored.
        captured: numbers of the target's layers after which its states are read.
        feature_size: size of a feature, of all these states together.
        draft_vocab_size: number of tokens that it has logits for.
        norm_before_residual: whether the layer adds to the normed state.
        norm_before_fc, fc_norm: whether a feature is normed, as a whole or each of its states.
        norm_output: whether later states follow from the normed ones.
        frequencies, scaling: of the rotation.
        curves: see `HiddenConfig`. Nothing is calibrated: the head's probabilities are taken as they are.
    """

    layer: Any
    stored: frozenset[str]
    captured: tuple[int, ...]
    feature_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    frequencies: Tensor
    scaling: float
    kind: str = "eagle"
    curves: list[list[float]] = field(default_factory=lambda: [[0.0, 1.0, 0.7]])


def read_config(settings: Mapping[str, Any], stored: frozenset[str], layers: int) -> Eagle3Config:
    """Return the settings in a config.json, for weights of these names and a target of that many layers.

    Raises ValueError for forms that are not supported.
    """
    nested = settings.get("transformer_layer_config")
    own = {"model_type": "qwen3"} | nested if isinstance(nested, dict) else dict(settings)
    kind = own.pop("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"its layer is of the type {kind!r}; it must be llama or qwen3")
    layer: Any = AutoConfig.for_model(kind, **own)
    context_of(layer)  # raises for too many positions
    named = settings.get("eagle_aux_hidden_state_layer_ids")
    if not named:  # SafeAILab's successors (SpecForge, SGLang) count from the first layer's output
        inner = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        named = [number + 1 for number in inner or []] or [2, layers // 2, layers - 3]
    captured = tuple(map(int, named))
    if not all(0 <= number <= layers for number in captured) or len(set(captured)) < len(captured):
        raise ValueError(f"it reads states after {list(captured)} layers; its target has {layers}")
    rope = layer.rope_parameters or {}
    wrong = {
        "num_hidden_layers": layer.num_hidden_layers != 1,
        "hidden_act": layer.hidden_act != "silu",
        "sliding_window": window_of(layer) is not None,
        "rope_type": rope.get("rope_type", "default") not in _ROPE,
        "partial_rotary_factor": rope.get("partial_rotary_factor") not in (None, 1.0),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        value = rope.get(name, getattr(layer, name, None))
        raise ValueError(
            f"its layer has {name} {value!r}: one full-attention layer like Llama's or Qwen3's is supported"
        )
    rotary = LlamaRotaryEmbedding(layer)
    size = int(settings.get("target_hidden_size") or layer.hidden_size)
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flags: dict[str, Any] = {name: bool(settings.get(name)) for name in names}
    return Eagle3Config(
        layer=layer,
        stored=stored,
        captured=captured,
        feature_size=size * len(captured),
        draft_vocab_size=int(settings.get("draft_vocab_size") or layer.vocab_size),
        frequencies=rotary.inv_freq.float(),
        scaling=float(rotary.attention_scaling),
        **flags,
    )


def own_name(name: str) -> str | None:
    """Return speculators' name of a published weight, or None for one that drafting does not use."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return None if name.endswith(_UNUSED) else name


class Eagle3Head(nn.Module):
    """An EAGLE-3 head, with the names of speculators for its weights.

    Attributes:
        capture: the target's states that it reads.
        width: size of a feature.
        reads: the last positions of a prompt that it reads.
        informed: False, as no token information is added to its logits.
    """

    informed = False
    reads = READS
    d2t: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        size, count = layer.hidden_size, len(config.captured)
        self.capture: Capture = config.captured
        self.width = config.feature_size
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        own = "embed_tokens.weight" in config.stored
        self.embed_tokens = nn.Embedding(layer.vocab_size, size) if own else None
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, layer.rms_norm_eps)
        if config.fc_norm:
            each = config.feature_size // count
            self.fc_norm = nn.ModuleList(
                [nn.RMSNorm(each, layer.rms_norm_eps) for _ in range(count)]
            )
        has_map = config.draft_vocab_size != layer.vocab_size or "d2t" in config.stored
        self.register_buffer(
            "d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if has_map else None
        )
        if "t2d" in config.stored:
            self.register_buffer("t2d", torch.zeros(layer.vocab_size, dtype=torch.bool))

    @property
    def hot(self) -> Tensor:
        """Return the target's tokens [S] that it has logits for, in the order of its vocabulary."""
        every = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return every if self.d2t is None else every + self.d2t

    def read(self, features: Tensor) -> Tensor:
        """Return states [n, d] of features [n, f]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        return self.fc(features)

    def fused(self, states: Tensor, embedded: Tensor | None) -> Tensor:
        """Return the layer's input [.., 2 d] of states [.., d] and the embeddings of the tokens after them."""
        assert embedded is not None
        return torch.cat([embedded, states], -1)

    def finish(self, x: Tensor) -> Tensor:
        """Return the states [.., d] that follow, from the layer's output."""
        return self.norm(x) if self.config.norm_output else x

    def before_logits(self, states: Tensor) -> Tensor:
        """Return the LM head's inputs [n, d] of states [n, d]."""
        return states if self.config.norm_output else self.norm(states)


class Eagle3Layer(nn.Module):
    """A decoder layer like Llama's or Qwen3's that reads [embedding, state] and returns a state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, layer, self._frequencies = config, config.layer, config.frequencies
        size, self.size, eps = layer.hidden_size, layer.head_dim, layer.rms_norm_eps
        queries, keys = layer.num_attention_heads * self.size, layer.num_key_value_heads * self.size

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=f"layers.0.{name}.bias" in config.stored)

        sizes = {
            "q_proj": (2 * size, queries),
            "k_proj": (2 * size, keys),
            "v_proj": (2 * size, keys),
        }
        sizes["o_proj"] = (queries, size)
        parts: dict[str, nn.Module] = {
            name: linear(f"self_attn.{name}", *each) for name, each in sizes.items()
        }
        if layer.model_type == "qwen3":
            parts |= {name: nn.RMSNorm(self.size, eps) for name in ("q_norm", "k_norm")}
        self.self_attn = nn.ModuleDict(parts)
        inner = layer.intermediate_size
        sizes = {"gate_proj": (size, inner), "up_proj": (size, inner), "down_proj": (inner, size)}
        self.mlp = nn.ModuleDict(
            {name: linear(f"mlp.{name}", *each) for name, each in sizes.items()}
        )
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(size, eps) for _ in range(3)
        )

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, N, D], keys and values [B, G, N, D] of [embedding, state] [B, N, 2 d] at positions [N]
        or [B, N]."""
        embedded, states = x.chunk(2, -1)
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        queries, keys, values = (
            self.self_attn[name](x).unflatten(-1, (-1, self.size))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if "q_norm" in self.self_attn:
            queries, keys = self.self_attn["q_norm"](queries), self.self_attn["k_norm"](keys)
        self._frequencies = self._frequencies.to(
            x.device
        )  # no buffer, as these are cast with the weights
        both = torch.cat([queries, keys], 2).transpose(1, 2)
        turned = rotate(both, positions, self._frequencies, self.config.scaling)
        return *turned.split([queries.shape[2], keys.shape[2]], 1), values.transpose(1, 2)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the next state [B, N, d] from [embedding, state] and the output of attention [B, H, N, D]."""
        _, states = x.chunk(2, -1)
        if self.config.norm_before_residual:
            states = self.hidden_norm(states)
        x = states + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gated = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return x + self.mlp["down_proj"](gated)
