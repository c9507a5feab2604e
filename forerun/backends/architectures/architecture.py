"""What a file of an architecture says, and the parts that most architectures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.backends.gguf.metadata import Metadata
from forerun.backends.stored import expert_linears, linear_of
from forerun.backends.table import ExpertsTable, LayerTable, ModelTable, Norm, Rotation

Settings = dict[str, Any]
# {module of a layer in transformers: name in a file, without `blk.N.`}.
LLAMA_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
HEAD_NORM_TENSORS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
# Of norms after attention and the MLP.
POST_NORM_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# The kinds of layers by what they see, in transformers' words.
LOCAL = "sliding_attention"
FULL = "full_attention"


def no_settings(metadata: Metadata, settings: Settings) -> Settings:
    """Return no settings beyond the common ones."""
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files and of transformers.

    Attributes:
        name: its name in GGUF files (`general.architecture`).
        classes: the names of transformers' classes that `table` takes. Files become the first one,
            unless `settings` names another one under "architectures".
        table: returns the table of a model of these classes.
        tensors: {module of a layer: name in a file, without `blk.N.`}.
        settings: returns what the configuration of a file has beyond the common settings, which it
            is given, or in place of them.
        epsilon: the name of the norms' epsilon in the configuration, and its key in a file.
        are_halves_interleaved: whether files interleave the halves of queries and keys that
            transformers rotates with each other.
        norm_offset: what files add to the gains of norms.
        expert_tensors: {module of experts in a layer: names of the tensors of gate, up and down}.
        may_rotate_parts: whether heads may rotate in part (`rope.dimension_count`).
        plain_modules: classes of torch whose modules the table covers, beyond linear layers.
    """

    name: str
    classes: tuple[str, ...]
    table: Callable[[Any], ModelTable]
    tensors: Mapping[str, str] = field(default_factory=lambda: LLAMA_TENSORS)
    settings: Callable[[Metadata, Settings], Settings] = no_settings
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    are_halves_interleaved: bool = False
    norm_offset: float = 0.0
    expert_tensors: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    may_rotate_parts: bool = False
    plain_modules: tuple[type, ...] = ()


def norm_of(module: Any) -> Norm:
    """Return a norm whose weight is its gain."""
    return Norm(module.weight, getattr(module, "bias", None))


def shifted_norm(module: Any) -> Norm:
    """Return a norm whose gain is 1 + its weight."""
    return Norm(shifted_gain(module))


def shifted_gain(module: Any) -> Tensor:
    """Return 1 + the weight of a norm."""
    gain: Tensor = module.weight.float() + 1
    return gain


def attention_matrices(layer: Any) -> dict[str, Any]:
    """Return the matrices of attention called like Llama's, by their fields."""
    attention = layer.self_attn
    return {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
    }


def mlp_matrices(mlp: Any) -> dict[str, Any]:
    """Return the matrices of an MLP called like Llama's, by their fields."""
    return {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}


def norms_before(layer: Any) -> dict[str, Any]:
    """Return the norms before attention and the MLP called like Llama's, by their fields."""
    return {
        "attention_norm": norm_of(layer.input_layernorm),
        "mlp_norm": norm_of(layer.post_attention_layernorm),
    }


def head_norms(layer: Any) -> dict[str, Any]:
    """Return the gains of the norms of queries and keys called like Qwen3's, by their fields."""
    attention = layer.self_attn
    return {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}


def layer_table(layer: Any, **changes: Any) -> LayerTable:
    """Return the table of a layer like Llama's, with norms before attention and the MLP.

    Args:
        layer: a decoder layer with the modules that LLAMA_TENSORS names.
        **changes: fields that differ.
    """
    parts = attention_matrices(layer) | mlp_matrices(layer.mlp) | norms_before(layer)
    return LayerTable(**parts | changes)


def expert_layer(layer: Any, experts: ExpertsTable, **changes: Any) -> LayerTable:
    """Return the table of a layer like Llama's, with experts in place of the MLP."""
    return LayerTable(
        **attention_matrices(layer), **norms_before(layer), experts=experts, **changes
    )


def experts_table(experts: Any, router: Any, chosen: int, **changes: Any) -> ExpertsTable:
    """Return the table of a layer's experts.

    Args:
        experts: transformers' module of experts, or a `StoredExperts`.
        router: a module with a weight [E, d], and a bias [E] or none.
        chosen: the experts that a token takes.
        **changes: fields that differ.
    """
    linears = expert_linears(experts)
    return ExpertsTable(
        router=linear_of(router.weight, getattr(router, "bias", None)),
        gate=[expert.gate for expert in linears],
        up=[expert.up for expert in linears],
        down=[expert.down for expert in linears],
        chosen=chosen,
        **changes,
    )


def expert_counts(metadata: Metadata) -> tuple[int, int]:
    """Return how many experts a layer has, and how many a token takes.

    Raises:
        ValueError: a token would take more than there are.
    """
    count = metadata.number("expert_count", int)
    chosen = metadata.number("expert_used_count", int)
    if chosen > count:
        raise metadata.file.error(f"a token takes {chosen} of {count} experts")
    return count, chosen


def post_norm_layer(layer: Any, **changes: Any) -> LayerTable:
    """Return the table of a layer that norms only what attention and the MLP add to the state.

    It norms queries and keys too.

    Args:
        layer: a decoder layer.
        **changes: fields that differ.
    """
    return LayerTable(
        **attention_matrices(layer),
        **mlp_matrices(layer.mlp),
        attention_after=norm_of(layer.post_attention_layernorm),
        mlp_after=norm_of(layer.post_feedforward_layernorm),
        **head_norms(layer),
        **changes,
    )


def rotation_of(rotary: Any, kind: str = "", **changes: Any) -> Rotation:
    """Return the rotation of transformers' module, for layers of a kind if it has several."""
    prefix = f"{kind}_" if kind else ""
    rope_type = rotary.rope_type[kind] if kind else rotary.rope_type
    return Rotation(
        frequencies=getattr(rotary, f"{prefix}original_inv_freq"),
        scaling=float(getattr(rotary, f"{prefix}attention_scaling")),
        kind=rope_type,
        **changes,
    )


def windows_of(config: Any) -> list[int]:
    """Return how many of the last positions each layer sees; 0 for all."""
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * layers
    return [window if kind == LOCAL else 0 for kind in kinds[:layers]]


def layer_tables(
    model: Any, table: Callable[..., LayerTable] = layer_table, **changes: Any
) -> list[LayerTable]:
    """Return the tables of a model's layers.

    Args:
        model: the model.
        table: returns the table of a layer, given the layer and the fields `window`, `activation`
            and `changes`.
        **changes: fields of all layers that differ.
    """
    config = model.config
    fields = {"activation": config.hidden_act} if "activation" not in changes else {}
    return [
        table(layer, window=window, **fields, **changes)
        for layer, window in zip(model.model.layers, windows_of(config), strict=True)
    ]


def model_table(model: Any, layers: list[LayerTable], **changes: Any) -> ModelTable:
    """Return the table of a model with modules and sizes named like Llama's.

    Args:
        model: the model.
        layers: the tables of its layers.
        **changes: fields that differ.
    """
    config = model.config
    base = model.model
    heads = config.num_attention_heads
    parts: dict[str, Any] = {
        "width": config.hidden_size,
        "heads": heads,
        "groups": config.num_key_value_heads,
        "size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "embedding": base.embed_tokens,
        "head": model.lm_head,
        "layers": layers,
    }
    if "norm" not in changes:
        parts["norm"] = norm_of(base.norm)
    if "eps" not in changes:
        parts["eps"] = config.rms_norm_eps
    if "rotations" not in changes:
        parts["rotations"] = [rotation_of(base.rotary_emb)]
    return ModelTable(**parts | changes)


def llama_table(model: Any, **changes: Any) -> ModelTable:
    """Return the table of a model whose layers are all like Llama's."""
    return model_table(model, layer_tables(model), **changes)


def windowed_layer_types(metadata: Metadata, layers: int, default_period: int) -> list[str]:
    """Return which layers of a file see a window, in transformers' words.

    A file says it layer by layer, or says after how many layers a full one comes, or nothing.

    Args:
        metadata: the file's.
        layers: their number.
        default_period: every so many layers one sees all, if the file does not say it. It is the
            last one of a period.
    """
    pattern = metadata.per_layer("attention.sliding_window_pattern", layers)
    if pattern is None:
        pattern = [(index + 1) % default_period for index in range(layers)]
    return [LOCAL if is_local else FULL for is_local in pattern]


def rotations_by_kind(settings: Settings, local_base: float) -> Settings:
    """Return the rotations of a file, in transformers' words, if those of local layers differ.

    What scales rotations for long texts counts for the full layers alone.

    Args:
        settings: the common settings; their rotation is that of the full layers.
        local_base: the base of the local layers.
    """
    local = {"rope_type": "default", "rope_theta": local_base}
    return {LOCAL: local, FULL: settings["rope_parameters"]}


def attention_bias_settings(metadata: Metadata, settings: Settings) -> Settings:
    """Return whether the matrices of attention have biases, and nothing else."""
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}
