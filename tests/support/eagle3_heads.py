"""EAGLE-3 heads as others publish them: random ones in both layouts, run without our code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from forerun.api.layers import load_head
from forerun.backends.heads import Head
from forerun.model.causal_lm import CausalLM

HOT = 24
SIZES = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own embeddings": {"embedding": True},
    "residual": {"norm_before_residual": True},
    "one norm": {"norm_before_fc": True, "norm_output": True},
    "norms": {"fc_norm": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3"},
    "llama3 rope": {"rope_parameters": ROPE},
}


FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
)


def save_eagle3(
    folder: Path,
    target: CausalLM,
    layout: str = "speculators",
    seed: int = 0,
    embedding: bool = False,
    **settings: Any,
) -> Path:
    """Save a random head. `settings` are those of its layer, and those of the head."""
    size, layers = target.config.hidden_size, target.config.num_hidden_layers
    ids = settings.pop("eagle_aux_hidden_state_layer_ids", [layers, 0, 1])
    hot = settings.pop("draft_vocab_size", HOT)
    flags = {name: settings.pop(name) for name in FLAGS if name in settings}
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": size,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        **SIZES,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        **settings,
    }
    shapes = matrix_shapes(layer, size * len(ids), hot)
    if embedding:
        shapes["embed_tokens.weight"] = (target.vocab_size, layer["hidden_size"])
    norms = norm_sizes(layer, flags, size, len(ids))
    weights = random_weights(shapes, norms, target.vocab_size, hot, seed)
    config: dict[str, Any] = {"draft_vocab_size": hot, **flags}
    if layout == "speculators":
        config |= speculators_config(layer, ids)
    else:
        config |= layer | {"architectures": ["LlamaForCausalLMEagle3"]}
        # This layout counts from the output of the first layer.
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [number - 1 for number in ids]
        }
        weights = {
            name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def matrix_shapes(layer: dict[str, Any], feature: int, hot: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's matrices and of their biases."""
    width, inner = layer["hidden_size"], layer["intermediate_size"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    attention = {
        "q_proj": (queries, 2 * width),
        "k_proj": (keys, 2 * width),
        "v_proj": (keys, 2 * width),
        "o_proj": (width, queries),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()
    }
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
    shapes["layers.0.mlp.down_proj.weight"] = (width, inner)
    shapes["fc.weight"] = (width, feature)
    shapes["lm_head.weight"] = (hot, width)
    for part, flag in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
        with_bias = [name for name in shapes if part in name and layer.get(flag)]
        shapes |= {name.replace(".weight", ".bias"): shapes[name][:1] for name in with_bias}
    return shapes


def norm_sizes(
    layer: dict[str, Any], flags: dict[str, Any], size: int, features: int
) -> dict[str, int]:
    """Return the sizes of a head's norms. The target's states have `size` numbers."""
    norms = {"norm.weight": layer["hidden_size"]}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        norms[f"layers.0.{name}.weight"] = layer["hidden_size"]
    if layer["model_type"] == "qwen3":
        norms |= {f"layers.0.self_attn.{name}_norm.weight": layer["head_dim"] for name in "qk"}
    if flags.get("norm_before_fc"):
        norms["input_norm.weight"] = size * features
    if flags.get("fc_norm"):
        norms |= {f"fc_norm.{i}.weight": size for i in range(features)}
    return norms


def random_weights(
    shapes: dict[str, tuple[int, ...]],
    norms: dict[str, int],
    vocabulary: int,
    hot: int,
    seed: int,
) -> dict[str, Tensor]:
    """Draw weights, and the tables between the hot tokens and the target's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    weights |= {
        name: 1 + 0.2 * torch.randn(size, generator=generator) for name, size in norms.items()
    }
    if hot != vocabulary:
        tokens = torch.randperm(vocabulary, generator=generator)[:hot].sort().values
        weights["d2t"] = tokens - torch.arange(hot)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, tokens, True)
    return weights


def speculators_config(layer: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Return what the format of speculators says of a head."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": ids,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
    }


def random_eagle3(target: CausalLM, **settings: Any) -> Head:
    with TemporaryDirectory() as folder:
        return load_head(save_eagle3(Path(folder), target, **settings), target)


class Plain:
    """A head in the format of speculators, told from its weights, without a cache."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.settings = json.loads((folder / "config.json").read_text())
        self.layer = self.settings["transformer_layer_config"]
        self.embedding = self.weights.get("embed_tokens.weight", embedding.detach())

    @property
    def hot(self) -> Tensor:
        return torch.arange(self.settings["draft_vocab_size"]) + self.weights.get("d2t", 0)

    def logits(
        self, features: Tensor, tokens: Sequence[int], drafted: Sequence[int] = ()
    ) -> Tensor:
        """Logits [1 + k, S] after features [T, f] and after each drafted token.

        The tokens [T] follow the features.
        """
        count = len(tokens)
        logits = []
        states = self._linear("fc", self._normed_features(features))
        embedded = self.embedding[torch.tensor([*tokens, *drafted])]
        for k in range(len(drafted) + 1):
            out = self._layer(torch.cat([embedded[: count + k], states], -1))[-1:]
            final = self._norm("norm", out)
            logits.append(self._linear("lm_head", final)[0])
            states = torch.cat([states, final if self.settings.get("norm_output") else out])
        return torch.stack(logits)

    def _normed_features(self, features: Tensor) -> Tensor:
        if self.settings.get("norm_before_fc"):
            return self._norm("input_norm", features)
        if self.settings.get("fc_norm"):
            return torch.cat(
                [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(features.chunk(3, -1))],
                -1,
            )
        return features

    def _layer(self, x: Tensor) -> Tensor:
        size = self.layer["head_dim"]
        count = len(x)
        embedded, states = x.chunk(2, -1)
        normed = self._norm("layers.0.hidden_norm", states)
        x = torch.cat([self._norm("layers.0.input_layernorm", embedded), normed], -1)
        q, k, v = (
            self._linear(f"layers.0.self_attn.{name}_proj", x).view(count, -1, size)
            for name in "qkv"
        )
        if self.layer["model_type"] == "qwen3":
            q = self._norm("layers.0.self_attn.q_norm", q)
            k = self._norm("layers.0.self_attn.k_norm", k)
        angles = torch.arange(count)[:, None, None] * self._frequencies()
        q, k = (
            torch.view_as_complex(torch.stack(part.chunk(2, -1), -1))
            * torch.polar(torch.ones(()), angles)
            for part in (q, k)
        )
        q, k = (torch.cat([part.real, part.imag], -1) for part in (q, k))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        attended = self._linear("layers.0.self_attn.o_proj", mixed)
        x = (normed if self.settings.get("norm_before_residual") else states) + attended
        y = self._norm("layers.0.post_attention_layernorm", x)
        gate, up = (self._linear(f"layers.0.mlp.{name}_proj", y) for name in ("gate", "up"))
        return x + self._linear("layers.0.mlp.down_proj", functional.silu(gate) * up)

    def _frequencies(self) -> Tensor:
        rope = self.layer.get("rope_parameters") or {}
        frequencies = rope.get("rope_theta", 10000.0) ** -torch.arange(
            0, 1, 2 / self.layer["head_dim"]
        )
        if rope.get("rope_type") != "llama3":
            return frequencies
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / rope["factor"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.layer["rms_norm_eps"]
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )


class Speculators:
    """The same, told by speculators' own model code."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        from speculators.models import Eagle3DraftModel, Eagle3SpeculatorConfig

        config = Eagle3SpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        self.model = Eagle3DraftModel(config).eval()  # from_pretrained asks the hub for the target
        weights = {"embed_tokens.weight": embedding.detach()} | load_file(
            folder / "model.safetensors"
        )
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected and all(name.startswith("verifier_") for name in missing)

    @property
    def hot(self) -> Tensor:
        every = torch.arange(self.model.draft_vocab_size)
        return every if self.model.d2t is None else every + self.model.d2t

    @torch.no_grad()
    def logits(
        self, features: Tensor, tokens: Sequence[int], drafted: Sequence[int] = ()
    ) -> Tensor:
        outputs: list[Tensor] = []
        hook = self.model.lm_head.register_forward_hook(
            lambda module, given, output: outputs.append(output[0])
        )
        padding = features.new_zeros(
            len(drafted), features.shape[1]
        )  # for tokens that are seen a step later alone
        ids = torch.tensor([[*tokens, *drafted]])
        self.model(
            hidden_states=torch.cat([features, padding])[None],
            input_ids=ids,
            document_ids=torch.zeros_like(ids),
            ttt_steps=len(drafted) + 1,
        )
        hook.remove()
        return torch.stack([output[len(tokens) - 1] for output in outputs])
