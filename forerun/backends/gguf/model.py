"""A model of transformers' class whose weights come out of a GGUF file, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from forerun.backends.bits import Blocks, check_inputs
from forerun.backends.gguf.config import configuration, model_class, special_ids
from forerun.backends.gguf.reader import GgufFile, open_gguf
from forerun.backends.gguf.tensors import EMBEDDING, FLOATS, Matrices
from forerun.backends.kernels import library
from forerun.backends.panels import Panels, Rows
from forerun.backends.stored import FORMATS, StoredEmbedding, StoredLinear
from forerun.kinds import KINDS

# The file's names for modules, by what they are called in transformers.
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TURNED = ("llama", "mistral", "smollm3")  # whose files have queries and keys in the order of another rotation


def load_gguf(path: str | Path, kind: str | None = None) -> tuple[PreTrainedModel, str | None]:
    """The model of a GGUF file on the CPU, and one line about matrices that could not stay as they are (None: all did).

    Linear layers become `StoredLinear` and the embedding `StoredEmbedding`, without a float copy of the model. A file
    whose matrices are all F16 or F32 gives an ordinary model in float32. Norms and biases are always float32.

    Args:
        kind: "float32" (an ordinary model), "bfloat16", "int8" or "int4" for every matrix. None: as the file has them.
            Q4_0, Q4_1, Q8_0 and BF16 stay as they are, F16 and F32 beside those become bfloat16, others 8 bits.

    Raises ValueError for an unknown kind, and for files that cannot be loaded: those of `gguf_config`, tensors that are
    missing, unknown or of other sizes, types that `gguf` cannot read.
    """
    if kind not in (None, *KINDS):
        raise ValueError(f"unknown weights {kind!r}; there are {', '.join(KINDS)}")
    file = open_gguf(path)
    config = configuration(file)
    with torch.device("meta"):
        model: Any = model_class(config)(config)
    modules = {
        _name(place): place for place, module in model.named_modules() if getattr(module, "weight", None) is not None
    }
    _check(file, model, modules)
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    plain = kind == "float32" or (kind is None and all(matrix.tensor_type in FLOATS for matrix in matrices))
    fill = _fill_plain if plain else _fill if library() is None else _fill_panels
    note = fill(file, model, modules, kind)
    base = model.model
    base.rotary_emb = _rotary(file, base.rotary_emb, config)
    model.generation_config = GenerationConfig(**special_ids(file))
    config.name_or_path = str(path)
    return model.eval(), note


def _name(place: str) -> str:
    """The file's name for the module at a place of the model."""
    if not place.startswith("model.layers."):
        return _NAMES[place]
    number, _, rest = place.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_LAYER[rest]}"


def _check(file: GgufFile, model: Any, modules: dict[str, str]) -> None:
    """Raises ValueError unless the file has just the tensors of the model, in its sizes."""
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
        raise file.error(f"it has a tensor {unknown[0]}, which {type(model).__name__} has not got")


def _fill(file: GgufFile, model: Any, modules: dict[str, str], kind: str | None) -> str | None:
    """Puts in weights in few bits; returns what changed."""
    matrices, config = Matrices(file, kind), model.config
    table = matrices.embedding(file.tensor(EMBEDDING))
    if isinstance(table, Blocks):
        model.model.embed_tokens = StoredEmbedding(table, torch.float32)
    else:
        model.model.embed_tokens.weight = _parameter(table)
    # The LM head first: what packing the biggest matrix takes for a while is there for the others afterwards.
    for name, place in sorted(modules.items(), key=lambda item: item[0] != "output"):
        module = model.get_submodule(place)
        if not isinstance(module, nn.Linear):
            if name != "token_embd":
                module.weight = _parameter(_vector(file, f"{name}.weight"))
            continue
        order = _order(name, config)
        tied = name == "output" and config.tie_word_embeddings
        tensor = file.tensor(EMBEDDING if tied else f"{name}.weight")
        weight = matrices.scores(tensor) if name == "output" else matrices.product(tensor, order)
        bias = None if module.bias is None else _vector(file, f"{name}.bias", order)
        model.set_submodule(place, StoredLinear(weight, module.in_features, bias))
    return matrices.note()


def _fill_panels(file: GgufFile, model: Any, modules: dict[str, str], kind: str | None) -> str | None:
    """Put in weights for the C library, with the file's own values unless a kind is asked for."""

    def rows(name: str, largest: str | None = kind) -> Rows:
        tensor = file.tensor(name)
        own = Rows(np.asarray(tensor.data).reshape(int(tensor.shape[1]), -1).view(np.uint8), tensor.tensor_type)
        if largest is None or own.type == FORMATS[largest]:
            return own
        if largest != "bfloat16":
            check_inputs(own.inputs, name)
        return Rows(
            np.concatenate([Rows.quantised(part, FORMATS[largest]).rows for part in file.floats(tensor)]),
            FORMATS[largest],
        )

    # Looked up, and not multiplied: as the file has it.
    model.model.embed_tokens = StoredEmbedding(rows(EMBEDDING, None), torch.float32)
    for name, place in modules.items():
        module = model.get_submodule(place)
        if not isinstance(module, nn.Linear):
            if name != "token_embd":
                module.weight = _parameter(_vector(file, f"{name}.weight"))
            continue
        order, is_head = _order(name, model.config), name == "output"
        tied = is_head and model.config.tie_word_embeddings
        own = rows(EMBEDDING if tied else f"{name}.weight", "int8" if is_head and kind == "int4" else kind)
        try:
            weight = Panels(own if order is None else own.chosen(order.tolist()))
        except ValueError as error:
            raise file.error(f"{name}.weight: {error}") from None
        bias = None if module.bias is None else _vector(file, f"{name}.bias", order)
        model.set_submodule(place, StoredLinear(weight, module.in_features, bias))
    return None


def _fill_plain(file: GgufFile, model: Any, modules: dict[str, str], kind: str | None) -> None:
    """Puts in float32 weights, as the file has them."""
    matrices = Matrices(file, kind)
    for name, place in modules.items():
        module, order = model.get_submodule(place), _order(name, model.config)
        if name == "output" and model.config.tie_word_embeddings:
            module.weight = model.model.embed_tokens.weight
        else:
            weight = matrices.whole(file.tensor(f"{name}.weight")).view(module.weight.shape)
            module.weight = nn.Parameter(weight if order is None else weight[order])
        if getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(_vector(file, f"{name}.bias", order))


def _order(name: str, config: PreTrainedConfig) -> Tensor | None:
    """Which output of queries or keys stands where: files have the halves of a head that turn together in turns."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.rpartition(".")[2])
    if heads is None or config.model_type not in _TURNED:
        return None
    return torch.arange(heads * config.head_dim).view(heads, -1, 2).transpose(1, 2).flatten()


def _vector(file: GgufFile, name: str, order: Tensor | None = None) -> Tensor:
    (values,) = file.floats(file.tensor(name))
    return values[0] if order is None else values[0][order]


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _rotary(file: GgufFile, meta: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """The rotation with its frequencies in numbers, divided by the file's factors where it has some (Llama 3.1)."""
    rotary: Any = type(meta)(config)
    if "rope_freqs.weight" in file.tensors:
        factors = _vector(file, "rope_freqs.weight")
        if not bool((factors > 0).all()):
            raise file.error("rope_freqs.weight must be above 0")
        rotary.inv_freq = rotary.inv_freq / factors
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return rotary
