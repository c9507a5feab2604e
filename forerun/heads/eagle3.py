"""EAGLE-3 heads (arXiv 2503.01840), in the formats in which others publish them.

Supported are the format of speculators (https://github.com/vllm-project/speculators) and the
original layout (https://github.com/SafeAILab/EAGLE).

A feature is the concatenation of the target's hidden states after several of its layers, three as
a rule. The head projects it to its own width. One decoder layer reads the result together with the
embedding of the next token. Further draft steps read the head's own states instead of features.
The logits cover the head's own draft vocabulary.
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

EAGLE3_READS = 2048  # positions of a prompt: published heads are trained on texts about as long
# The rotary embeddings whose frequencies do not depend on the length of the text.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, eq=False)
class Eagle3Config:
    """Settings of a head.

    Attributes:
        layer: transformers' configuration of the decoder layer, of the type llama or qwen3.
        stored: names of the stored weights. The head has biases and its own embeddings only if
            they are stored.
        captured: the numbers of target layers after which the target's states are read.
        feature_size: size of a feature, which is all these states together.
        draft_vocab_size: number of tokens that the head has logits for.
        norm_before_residual: whether the residual connection starts from the normed state.
        norm_before_fc: whether a feature is normed as a whole before the projection.
        fc_norm: whether each of a feature's states is normed before the projection.
        norm_output: whether the next draft step reads the normed state.
        frequencies: frequencies [D / 2] of the rotary embedding.
        scaling: factor of the rotary embedding's cosines and sines.
        curves: see `HiddenConfig`. Nothing is calibrated: the head's probabilities are used as
            they are.
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
    """Return the settings of a config.json.

    Args:
        settings: the content of config.json.
        stored: the names of the weights.
        layers: the number of the target's layers.

    Raises:
        ValueError: the head has a form that is not supported.
    """
    layer = _layer_config(settings)
    captured = _captured_layers(settings, layers)
    _check_layer(layer)
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


def _layer_config(settings: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of the decoder layer."""
    nested = settings.get("transformer_layer_config")
    if isinstance(nested, dict):
        layer_settings = {"model_type": "qwen3"} | nested
    else:
        layer_settings = dict(settings)
    kind = layer_settings.pop("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"its layer is of the type {kind!r}; it must be llama or qwen3")
    layer: Any = AutoConfig.for_model(kind, **layer_settings)
    context_of(layer)  # raises for too many positions
    return layer


def _captured_layers(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the numbers of the target's layers after which the head reads its states."""
    numbers = settings.get("eagle_aux_hidden_state_layer_ids")
    if not numbers:
        # SpecForge and SGLang, which follow SafeAILab's code, count from the first layer's output.
        inner = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        numbers = [number + 1 for number in inner or []]
    if not numbers:
        numbers = [2, layers // 2, layers - 3]
    captured = tuple(map(int, numbers))
    if not all(0 <= number <= layers for number in captured) or len(set(captured)) < len(captured):
        raise ValueError(f"it reads states after {list(captured)} layers; its target has {layers}")
    return captured


def _check_layer(layer: Any) -> None:
    """Raise ValueError for a decoder layer that `Eagle3Layer` does not compute."""
    rope = layer.rope_parameters or {}
    wrong = {
        "num_hidden_layers": layer.num_hidden_layers != 1,
        "hidden_act": layer.hidden_act != "silu",
        "sliding_window": window_of(layer) is not None,
        "rope_type": rope.get("rope_type", "default") not in _ROPE_TYPES,
        "partial_rotary_factor": rope.get("partial_rotary_factor") not in (None, 1.0),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            value = rope.get(name, getattr(layer, name, None))
            raise ValueError(
                f"its layer has {name} {value!r}: one full-attention layer like Llama's or "
                "Qwen3's is supported"
            )


def own_name(name: str) -> str | None:
    """Return speculators' name of a published weight, or None if drafting does not use it."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return None if name.endswith(_UNUSED) else name


class Eagle3Head(nn.Module):
    """An EAGLE-3 head, whose weights have speculators' names.

    Attributes:
        capture: the states of the target that the head reads.
        width: size of a feature.
        reads: how many of a prompt's last positions the head reads.
        informed: False, because no token information is added to the logits.
    """

    informed = False
    reads = EAGLE3_READS
    d2t: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        size = layer.hidden_size
        self.capture: Capture = config.captured
        self.width = config.feature_size
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        has_embeddings = "embed_tokens.weight" in config.stored
        self.embed_tokens = nn.Embedding(layer.vocab_size, size) if has_embeddings else None
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, layer.rms_norm_eps)
        if config.fc_norm:
            count = len(config.captured)
            state_size = config.feature_size // count
            self.fc_norm = nn.ModuleList(
                [nn.RMSNorm(state_size, layer.rms_norm_eps) for _ in range(count)]
            )
        has_map = config.draft_vocab_size != layer.vocab_size or "d2t" in config.stored
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.long) if has_map else None
        self.register_buffer("d2t", offsets)
        if "t2d" in config.stored:
            self.register_buffer("t2d", torch.zeros(layer.vocab_size, dtype=torch.bool))

    @property
    def hot(self) -> Tensor:
        """Return the target's tokens [S] that the head has logits for, in vocabulary order."""
        numbers = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return numbers if self.d2t is None else numbers + self.d2t

    def read(self, features: Tensor) -> Tensor:
        """Return states [n, d] of features [n, f]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        return self.fc(features)

    def fused(self, states: Tensor, embedded: Tensor | None) -> Tensor:
        """Return the layer's input [.., 2 d].

        Args:
            states: states [.., d].
            embedded: embeddings [.., d] of the tokens after the states.
        """
        assert embedded is not None
        return torch.cat([embedded, states], -1)

    def finish(self, x: Tensor) -> Tensor:
        """Return the next states [.., d] from the layer's output."""
        return self.norm(x) if self.config.norm_output else x

    def before_logits(self, states: Tensor) -> Tensor:
        """Return the LM head's inputs [n, d] of states [n, d]."""
        return states if self.config.norm_output else self.norm(states)


class Eagle3Layer(nn.Module):
    """A decoder layer like Llama's or Qwen3's that reads [embedding, state] and returns a state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        # Not a buffer, because buffers are cast together with the weights.
        self._frequencies = config.frequencies
        layer = config.layer
        eps = layer.rms_norm_eps
        size = layer.hidden_size
        self.size = layer.head_dim
        queries = layer.num_attention_heads * self.size
        keys = layer.num_key_value_heads * self.size
        inner = layer.intermediate_size

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=f"layers.0.{name}.bias" in config.stored)

        attention: dict[str, nn.Module] = {
            "q_proj": linear("self_attn.q_proj", 2 * size, queries),
            "k_proj": linear("self_attn.k_proj", 2 * size, keys),
            "v_proj": linear("self_attn.v_proj", 2 * size, keys),
            "o_proj": linear("self_attn.o_proj", queries, size),
        }
        if layer.model_type == "qwen3":
            attention["q_norm"] = nn.RMSNorm(self.size, eps)
            attention["k_norm"] = nn.RMSNorm(self.size, eps)
        self.self_attn = nn.ModuleDict(attention)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear("mlp.gate_proj", size, inner),
                "up_proj": linear("mlp.up_proj", size, inner),
                "down_proj": linear("mlp.down_proj", inner, size),
            }
        )
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, N, D], and keys and values [B, G, N, D].

        Args:
            x: [embedding, state] [B, N, 2 d].
            positions: their positions [N] or [B, N].
        """
        embedded, states = x.chunk(2, -1)
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        queries, keys, values = (
            self.self_attn[name](x).unflatten(-1, (-1, self.size))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if "q_norm" in self.self_attn:
            queries = self.self_attn["q_norm"](queries)
            keys = self.self_attn["k_norm"](keys)
        self._frequencies = self._frequencies.to(x.device)
        both = torch.cat([queries, keys], 2).transpose(1, 2)
        rotated = rotate(both, positions, self._frequencies, self.config.scaling)
        queries, keys = rotated.split([queries.shape[2], keys.shape[2]], 1)
        return queries, keys, values.transpose(1, 2)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the next state [B, N, d].

        Args:
            x: [embedding, state] [B, N, 2 d], the layer's input.
            mixed: the output of attention [B, H, N, D].
        """
        _, states = x.chunk(2, -1)
        if self.config.norm_before_residual:
            states = self.hidden_norm(states)
        x = states + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gated = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return x + self.mlp["down_proj"](gated)
