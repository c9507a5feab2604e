"""Load a model of transformers' class from a GGUF file: its configuration from the metadata, then tensor by tensor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    GenerationConfig,
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

from forerun.backends.panels import FORMATS as KNOWN
from forerun.backends.panels import Rows, check_inputs, pack
from forerun.backends.stored import FORMATS, StoredEmbedding, StoredLinear
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
EMBEDDING = "token_embd.weight"
# File formats that already have the bits of a weight format.
_KEPT = {"int4": (Type.Q4_0, Type.Q4_1, Type.Q4_K), "int8": (Type.Q8_0,), "bfloat16": (Type.BF16,)}
_TURNED = (
    "llama",
    "mistral",
    "smollm3",
)  # their files interleave the rotated halves of queries and keys


def load_gguf(path: str | Path, kind: str | None = None) -> tuple[PreTrainedModel, str | None]:
    """Return the model of a GGUF file on the CPU, and one line about the matrices whose format changed, or None.

    Linear layers become `StoredLinear` and the embedding `StoredEmbedding`, without a float copy of the model. A file
    whose matrices are all F16 or F32 gives an ordinary model in float32. Norms and biases are always float32.

    Args:
        kind: "float32" (an ordinary model), "bfloat16", "int8" or "int4" for every matrix. None: the file's formats,
            with 8 bits for those that the C library does not support.

    Raises ValueError as `open_gguf` and `gguf_config`, and for tensors that are missing, unknown, of other sizes or of
    types that `gguf` cannot read.
    """
    file = open_gguf(path)
    config = gguf_config(file)
    with torch.device("meta"):
        model: Any = _CLASSES[config.model_type][1](config)
    known = get_tensor_name_map(
        MODEL_ARCH.QWEN3, config.num_hidden_layers
    )  # its names cover the whole family
    weighted = [
        place
        for place, module in model.named_modules()
        if getattr(module, "weight", None) is not None
    ]
    modules = {
        str(known.get_name(place)): place for place in weighted
    }  # {name in the file: name in the model}
    _check(file, model, modules)
    note = None
    if kind == "float32" or (kind is None and file.is_float):
        _fill_plain(file, model, modules)
    else:
        note = _fill(file, model, modules, kind)
    base = model.model
    base.rotary_emb = _rotary(file, base.rotary_emb, config)
    model.generation_config = GenerationConfig(**special_ids(file))
    config.name_or_path = str(path)
    return model.eval(), note


def _check(file: GgufFile, model: Any, modules: dict[str, str]) -> None:
    wanted = {}
    for name, place in modules.items():
        for part, value in model.get_submodule(place).named_parameters():
            wanted[f"{name}.{part}"] = list(value.shape)
    if model.config.tie_word_embeddings:
        del wanted["output.weight"]
    if "rope_freqs.weight" in file.tensors:
        wanted["rope_freqs.weight"] = [model.config.head_dim // 2]
    for name, shape in wanted.items():
        found = file.tensor(name).shape.tolist()[::-1]
        if found != shape:
            raise file.error(f"{name} is {found}; the sizes in the metadata need {shape}")
    unknown = sorted(file.tensors.keys() - wanted.keys())
    if unknown:
        raise file.error(
            f"it has a tensor {unknown[0]}, which {type(model).__name__} does not have"
        )


def _fill(file: GgufFile, model: Any, modules: dict[str, str], kind: str | None) -> str | None:
    """Fill in weights for products of a few rows, in the file's formats or in `kind`. Return a line about changes."""
    changes: Counter[tuple[str, str]] = Counter()

    def rows(name: str, kind: str | None) -> Rows:
        tensor = file.tensor(name)
        if kind is None and tensor.tensor_type not in KNOWN:
            kind = "int8"
        if kind is None or tensor.tensor_type in _KEPT[kind]:
            raw = np.asarray(tensor.data).reshape(int(tensor.shape[1]), -1).view(np.uint8)
            return Rows(raw, tensor.tensor_type)
        if kind != "bfloat16":
            try:
                check_inputs(int(tensor.shape[0]), name)
            except ValueError as error:
                raise file.error(str(error)) from None
        how = (
            "rounded to bfloat16"
            if kind == "bfloat16"
            else f"stored anew in {kind.removeprefix('int')} bits"
        )
        changes[tensor.tensor_type.name, how] += 1
        own = FORMATS[kind]
        return Rows(
            np.concatenate(
                [Rows.quantised(torch.from_numpy(part), own).rows for part in file.floats(tensor)]
            ),
            own,
        )

    # The embedding is looked up and not multiplied, so it keeps the file's format.
    embedding = rows(EMBEDDING, None)
    model.model.embed_tokens = StoredEmbedding(embedding, torch.float32)
    for name, place in tqdm(
        modules.items(), f"packing {file.path.name}", leave=False, disable=None, delay=0.5
    ):
        module = model.get_submodule(place)
        if not isinstance(module, nn.Linear):
            if name != "token_embd":
                module.weight = nn.Parameter(_vector(file, f"{name}.weight"), requires_grad=False)
            continue
        order, is_head = _order(name, model.config), name == "output"
        tensor = EMBEDDING if is_head and model.config.tie_word_embeddings else f"{name}.weight"
        own_kind = kind
        if is_head and kind == "int4" and file.tensor(tensor).tensor_type not in _KEPT["int4"]:
            own_kind = "int8"
        own = rows(tensor, own_kind)
        weight = pack(own if order is None else own.chosen(order.tolist()), is_head)
        bias = None if module.bias is None else _vector(file, f"{name}.bias", order)
        model.set_submodule(place, StoredLinear(weight, bias))
        del own
        file.forget_pages(file.tensor(tensor))
    parts = [
        f"{count} {type} {'matrix' if count == 1 else 'matrices'} {how}"
        for (type, how), count in sorted(changes.items())
    ]
    return f"{file.path.name}: {', '.join(parts)}" if parts else None


def _fill_plain(file: GgufFile, model: Any, modules: dict[str, str]) -> None:
    for name, place in modules.items():
        module, order = model.get_submodule(place), _order(name, model.config)
        if name == "output" and model.config.tie_word_embeddings:
            module.weight = model.model.embed_tokens.weight
        else:
            values = np.concatenate(list(file.floats(file.tensor(f"{name}.weight"))))
            weight = torch.from_numpy(values).view(module.weight.shape)
            module.weight = nn.Parameter(weight if order is None else weight[order])
        if getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(_vector(file, f"{name}.bias", order))


def _order(name: str, config: PreTrainedConfig) -> Tensor | None:
    """Return which of the file's outputs of queries or keys comes at each place in the model, as files interleave the
    halves of a head; None for the same order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        name.rpartition(".")[2]
    )
    if heads is None or config.model_type not in _TURNED:
        return None
    return torch.arange(heads * config.head_dim).view(heads, -1, 2).transpose(1, 2).flatten()


def _vector(file: GgufFile, name: str, order: Tensor | None = None) -> Tensor:
    (rows,) = file.floats(file.tensor(name))
    values = torch.from_numpy(rows[0])
    return values if order is None else values[order]


def _rotary(file: GgufFile, meta: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Return the rotation, with its frequencies divided by the file's factors if it has any (Llama 3.1)."""
    rotary: Any = type(meta)(config)
    if "rope_freqs.weight" in file.tensors:
        factors = _vector(file, "rope_freqs.weight")
        if not bool((factors > 0).all()):
            raise file.error("rope_freqs.weight must be above 0")
        rotary.inv_freq = rotary.inv_freq / factors
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return rotary


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return transformers' configuration of a file's model, without reading a tensor.

    Raises ValueError for sizes that are missing or contradict each other, and models that transformers' class does not
    compute: experts, scaled rotations, heads that rotate in part.
    """
    arch = file.architecture
    for key in _OTHERS:
        if file.value(f"{arch}.{key}", float, 0.0) not in (0, 1):
            raise file.error(f"it has {arch}.{key}, which is not supported")
    embedding = file.tensor("token_embd.weight")
    layers, width, heads = (
        file.own(key, int) for key in ("block_count", "embedding_length", "attention.head_count")
    )
    groups = file.own("attention.head_count_kv", int, heads)
    size = file.own("attention.key_length", int, width // heads)
    if heads % groups or not size or size % 2:
        raise file.error(
            f"{heads} heads of {size}, {groups} of them for keys and values, are not possible"
        )
    # A damaged file's sizes are checked before anything is made in them.
    stored = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(stored) != layers:
        raise file.error(
            f"it has the tensors of {len(stored)} layers; {arch}.block_count is {layers}"
        )
    for name, rows in (("attn_q", heads), ("attn_k", groups), ("attn_v", groups)):
        found = int(file.tensor(f"blk.0.{name}.weight").shape[-1])
        if found != rows * size:
            raise file.error(
                f"blk.0.{name}.weight has {found} outputs; {rows} heads of {size} need {rows * size}"
            )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := file.own(key, int, size)) != size:
            raise file.error(
                f"{arch}.{key} is {found}; only {size}, the size of a head, is supported"
            )
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
            raise file.error(
                f"it has {arch}.attention.sliding_window, which is supported for llama only"
            )
        arch, settings["sliding_window"] = "mistral", window
    elif arch != "qwen2":  # qwen2 always has these
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch in ("llama", "smollm3"):
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    kind, model = _CLASSES[arch]
    return kind(**settings, architectures=[model.__name__], dtype="float32")


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
    return {
        "bos_token_id": bos,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": pad,
    }


def _rotation(file: GgufFile) -> dict[str, Any]:
    theta, arch = file.own("rope.freq_base", float, 10000.0), file.architecture
    kind = file.value(f"{arch}.rope.scaling.type", str, "linear")
    # Some files write a factor of 0 for none.
    factor = file.value(f"{arch}.rope.scaling.factor", float, 0.0) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear" or not factor > 0:
        raise file.error(
            f"its rotation is scaled ({kind!r}, {factor:g}); only none and linear are supported"
        )
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
