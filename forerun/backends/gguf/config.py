"""The configuration of a model in a GGUF file, from its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from forerun.zoo.gguf_file import GgufFile, open_gguf

_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),  # a file's `llama` with a sliding window
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
# Settings of models that a file calls `llama`, but whose forward is another.
_OTHERS = ("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale")


def gguf_config(path: str | Path) -> PreTrainedConfig:
    """Return transformers' configuration of the model, without reading a tensor.

    Raises ValueError for a file that cannot be read (`open_gguf`), sizes that are missing or contradict each other, and
    models that transformers' class does not compute: experts, scaled rotations, heads that rotate in part.
    """
    file = open_gguf(path)
    arch = file.architecture
    for key in _OTHERS:
        if file.value(f"{arch}.{key}", float, 0.0) not in (0, 1):
            raise file.error(f"it has {arch}.{key}, which is not supported")
    embedding = file.tensor("token_embd.weight")
    layers, width, heads = (file.own(key, int) for key in ("block_count", "embedding_length", "attention.head_count"))
    groups = file.own("attention.head_count_kv", int, heads)
    size = file.own("attention.key_length", int, width // heads)
    if heads % groups or not size or size % 2:
        raise file.error(f"{heads} heads of {size}, {groups} of them for keys and values, are not possible")
    # A damaged file's sizes are checked before anything is made in them.
    stored = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(stored) != layers:
        raise file.error(f"it has the tensors of {len(stored)} layers; {arch}.block_count is {layers}")
    for name, rows in (("attn_q", heads), ("attn_k", groups), ("attn_v", groups)):
        found = int(file.tensor(f"blk.0.{name}.weight").shape[-1])
        if found != rows * size:
            raise file.error(f"blk.0.{name}.weight has {found} outputs; {rows} heads of {size} need {rows * size}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := file.own(key, int, size)) != size:
            raise file.error(f"{arch}.{key} is {found}; only {size}, the size of a head, is supported")
    context = file.own("context_length", int)
    settings: dict[str, Any] = {
        "vocab_size": int(embedding.shape[-1]),
        "hidden_size": width,
        "intermediate_size": file.own("feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "rms_norm_eps": file.own("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": context,
        "rope_parameters": _rotation(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special_ids(file),
    }
    window = file.own("attention.sliding_window", int, context)
    if window < context:
        if arch != "llama":
            raise file.error(f"it has {arch}.attention.sliding_window, which is supported for llama only")
        arch, settings["sliding_window"] = "mistral", window
    elif arch != "qwen2":  # qwen2 always has these
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch in ("llama", "smollm3"):
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    kind, model = _CLASSES[arch]
    return kind(**settings, architectures=[model.__name__], dtype="float32")


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the model class of a configuration made here."""
    return _CLASSES[config.model_type][1]


def special_ids(file: GgufFile) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text, by their names in a configuration; None for those that the file
    lacks. An end of turn ends a text too: then `eos_token_id` is a list."""
    names = ("bos", "eos", "eot", "padding")
    bos, eos, turn, pad = (file.value(f"tokenizer.ggml.{name}_token_id", int) for name in names)
    rows = int(file.tensor("token_embd.weight").shape[-1])
    for name, token in zip(names, (bos, eos, turn, pad), strict=True):
        if token is not None and not 0 <= token < rows:
            raise file.error(f"tokenizer.ggml.{name}_token_id is {token}; there are {rows} tokens")
    ends: Any = list(dict.fromkeys(token for token in (eos, turn) if token is not None))
    return {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None), "pad_token_id": pad}


def _rotation(file: GgufFile) -> dict[str, Any]:
    theta, arch = file.own("rope.freq_base", float, 10000.0), file.architecture
    kind = file.value(f"{arch}.rope.scaling.type", str, "linear")
    # Some files write a factor of 0 for none.
    factor = file.value(f"{arch}.rope.scaling.factor", float, 0.0) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear" or not factor > 0:
        raise file.error(f"its rotation is scaled ({kind!r}, {factor:g}); only none and linear are supported")
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
