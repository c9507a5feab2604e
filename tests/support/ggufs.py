"""Tiny GGUF files: random models with a tokenizer, as llama.cpp's converter writes them."""

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB = 320
CONTEXT = 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # tokens 0, 1 and 2; the last ends a text
MERGES = ("Ġ Ġ", "Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ 1", "l l", "o w")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 12


@dataclass(frozen=True)
class Kind:
    """A kind of model, and how llama.cpp's converter writes it.

    Attributes:
        model_class: transformers' class.
        settings: of its configuration.
        name: llama.cpp's name of the architecture; None: that of the configuration.
        keys: the architecture's keys beyond the sizes.
        is_turned: whether halves of queries and keys are interleaved in the file.
        gain: what is added to the gains of norms.
        epsilon: the key and the setting of the norms' epsilon.
    """

    model_class: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    keys: Callable[[Any], dict[str, Any]] = lambda config: {}
    is_turned: bool = False
    gain: float = 0.0
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


def _rope(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5000.0, **changes}


_YARN = _rope(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    attention_factor=1.138629436111989,  # 1 + log(4) / 10, which transformers takes too
    beta_fast=32.0,
    beta_slow=1.0,
)
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
_TWO_ROTATIONS = {"sliding_attention": _rope(rope_theta=300.0), "full_attention": _rope()}
_YARN_IN_SOME = {"sliding_attention": _rope(), "full_attention": _YARN}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _windows(config: Any) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    return _window(config) | {"attention.sliding_window_pattern": kinds}


def _granite_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _local_expert_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def _expert_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


_GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
_GEMMA = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}
_PARTIAL = {"head_dim": 32, "rope_parameters": _rope(partial_rotary_factor=0.5)}
_MINISTRAL_ROPE = _YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}

ARCHITECTURES: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", is_turned=True),
    "llama with biases": Kind(
        "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, is_turned=True
    ),
    "qwen2": Kind("Qwen2ForCausalLM"),
    "qwen3": Kind("Qwen3ForCausalLM", {"head_dim": 32}),
    # The fourth layer does not rotate.
    "smollm3": Kind("SmolLM3ForCausalLM", {"num_hidden_layers": 4}, is_turned=True),
}
NEW_ARCHITECTURES: dict[str, Kind] = {
    "mistral": Kind(
        "MistralForCausalLM", {"sliding_window": WINDOW}, "llama", _window, is_turned=True
    ),
    "llama with yarn": Kind(
        "LlamaForCausalLM", {"rope_parameters": _YARN}, None, lambda _: _YARN_KEYS, is_turned=True
    ),
    "gemma3": Kind(
        "Gemma3ForCausalLM",
        _GEMMA | {"num_hidden_layers": 6, "rope_parameters": _TWO_ROTATIONS},
        "gemma3",
        lambda config: _window(config) | {"rope.freq_base_swa": 300.0},
        gain=1.0,
    ),
    "gemma2": Kind(
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        None,
        lambda config: (
            _window(config)
            | {
                "attn_logit_softcapping": config.attn_logit_softcapping,
                "final_logit_softcapping": config.final_logit_softcapping,
            }
        ),
        gain=1.0,
    ),
    "phi3": Kind("Phi3ForCausalLM", {"sliding_window": WINDOW, "hidden_size": 128}, None, _window),
    "phi3 rotating in part": Kind(
        "Phi3ForCausalLM",
        {"hidden_size": 128, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    ),
    "granite": Kind("GraniteForCausalLM", _GRANITE, None, _granite_keys, is_turned=True),
    "olmo2": Kind("Olmo2ForCausalLM", {"tie_word_embeddings": False}),
    "olmo3": Kind(
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": _YARN_IN_SOME,
            "tie_word_embeddings": False,
        },
        "olmo2",
        lambda config: _windows(config) | _YARN_KEYS,
    ),
    "glm4": Kind("Glm4ForCausalLM", _PARTIAL | {"attention_bias": True}),
    "exaone4": Kind(
        "Exaone4ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": WINDOW},
        None,
        _windows,
    ),
    "exaone4 without windows": Kind(
        "Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "cohere2": Kind(
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.5},
        None,
        lambda config: _window(config) | {"logit_scale": config.logit_scale},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    ),
    "starcoder2": Kind(
        "Starcoder2ForCausalLM",
        {"use_bias": True, "sliding_window": None},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
    "mistral3": Kind(
        "Ministral3ForCausalLM",
        {"rope_parameters": _MINISTRAL_ROPE | {"attention_factor": 1.0}},
        "mistral3",
        lambda _: (
            _YARN_KEYS
            | {"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 1.0}
        ),
        is_turned=True,
    ),
    "seed_oss": Kind(
        "SeedOssForCausalLM", {"attention_bias": True, "attention_out_bias": False, "head_dim": 32}
    ),
    "ernie4_5": Kind("Ernie4_5ForCausalLM"),
    "qwen3moe": Kind(
        "Qwen3MoeForCausalLM",
        _EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
        "qwen3moe",
        _expert_keys,
    ),
    "qwen2moe": Kind(
        "Qwen2MoeForCausalLM",
        _EXPERTS
        | {
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
        "qwen2moe",
        lambda config: (
            _expert_keys(config)
            | {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
        ),
    ),
    "granitemoe": Kind(
        "GraniteMoeForCausalLM",
        _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3},
        "granitemoe",
        lambda config: _granite_keys(config) | _local_expert_keys(config),
        is_turned=True,
    ),
    "gpt-oss": Kind(
        "GptOssForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "rope_parameters": _YARN | {"truncate": False},
            "tie_word_embeddings": False,
        },
        "gpt-oss",
        lambda config: (
            _window(config)
            | _local_expert_keys(config)
            | _YARN_KEYS
            | {"expert_feed_forward_length": config.intermediate_size}
        ),
    ),
    "hunyuan-dense": Kind("HunYuanDenseV1ForCausalLM", {"head_dim": 32}, "hunyuan-dense"),
}
KINDS = ARCHITECTURES | NEW_ARCHITECTURES


def small(architecture: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model with nothing at its initial value: biases and gains are numbers too."""
    kind = KINDS[architecture]
    model_class = getattr(transformers, kind.model_class)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    sizes |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        kind.epsilon[1]: 1e-5,
    }
    sizes |= {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = model_class(model_class.config_class(**sizes | dict(kind.settings) | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.2 * noise if parameter.ndim == 1 and parameter.mean() == 1 else 0.15 * noise
            )
    return model


# Where a block has its scales in float16.
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def encode(name: str, weight: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in the bytes of a type.

    Types that `gguf` cannot make get random codes, which mean another matrix.
    """
    type = Type[kind]
    try:
        return gguf.quantize(weight, type)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[type]
        rows, count = weight.shape[0], weight.shape[1] // block
        made = np.random.default_rng(zlib.crc32(name.encode())).integers(
            0, 256, (rows, count, size), np.uint8
        )
        scale = np.array([2e-5], np.float16).view(np.uint8)
        for place in SCALES.get(kind, ()):
            made[..., place : place + 2] = scale
        if kind == "IQ1_M":  # which has a quarter of its scale in each of four words
            quarters = scale.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
            made[..., 49::2] = made[..., 49::2] & 15 | quarters << 4
        return made.reshape(rows, count * size)


def names(model: PreTrainedModel) -> dict[str, str]:
    """What the tensors of a file are called, by their names in transformers."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    number = numbers[architecture_of(model)]
    known = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    stored = {}
    for name, _ in model.named_parameters():
        if ".experts." in name:
            mark = "*" if architecture_of(model) == "gpt-oss" else ""
            stored[name] = f"blk.{name.split('.')[2]}.{mark} {name.rpartition('.')[2]}"
        elif name.endswith(".sinks"):
            stored[name] = f"{known.get_name(name)}.weight"
        else:
            old = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
            stored[name] = str(known.get_name(old, (".weight", ".bias")))
    stored["lm_head.weight"] = "output.weight"  # which the maps of tied models do not have
    return {name: stored[name] for name, _ in model.named_parameters()}


def expert_tensors(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of gate, up and down of a parameter of experts, as the converter divides it.

    Those of gpt-oss, which have biases too, are transposed, and alternate gate and up.
    """
    prefix, part = name.split(" ")
    is_gpt_oss = prefix.endswith("*")
    prefix = prefix.removesuffix("*")
    end = "bias" if part.endswith("_bias") else "weight"
    if is_gpt_oss and end == "weight":
        value = value.transpose(0, 2, 1)
    if part.startswith("down"):
        return {f"{prefix}ffn_down_exps.{end}": np.ascontiguousarray(value)}
    if is_gpt_oss:
        gate, up = value[:, ::2], value[:, 1::2]
    else:
        gate, up = np.split(value, 2, 1)
    return {
        f"{prefix}ffn_gate_exps.{end}": np.ascontiguousarray(gate),
        f"{prefix}ffn_up_exps.{end}": np.ascontiguousarray(up),
    }


@torch.no_grad()
def rounded(
    model: PreTrainedModel, kind: str, types: dict[str, str] | None = None
) -> PreTrainedModel:
    same = copy.deepcopy(model)
    for name, parameter in same.named_parameters():
        if parameter.ndim == 2:
            stored = names(model)[name]
            own = (types or {}).get(stored, kind)
            values = gguf.dequantize(encode(stored, parameter.numpy(), own), Type[own])
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return same


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys in the order in which llama.cpp rotates them.

    Numbers i and i + D / 2 of a head stand beside each other.
    """
    size = len(rows) // heads
    order = [
        head * size + i + half
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, size // 2)
    ]
    return np.ascontiguousarray(rows[order])


@dataclass(frozen=True)
class Changes:
    """What a file has other than a model's usual one.

    Attributes:
        types: types of single tensors, by their names in the file.
        tokenizer: whether the file has a tokenizer.
        pre: how the tokenizer cuts texts, or "pieces" for one of SentencePiece's kind.
        metadata: numbers and texts in place of those of the model, or in addition to them.
        tensors: tensors in place of the model's (None: left out), or in addition, in F32.
        endianess: the order of bytes.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    tokenizer: bool = True
    pre: str = "smollm"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray | None] = field(default_factory=dict)
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE


def write_kind(path: Path, name: str, type: str = "F32", **changes: Any) -> PreTrainedModel:
    """Write a small model of a kind, with all of its keys; return the model."""
    model = small(name)
    kind = KINDS[name]
    keys = kind.keys(model.config)
    own = {f"{architecture_of(model)}.{key}": value for key, value in keys.items()}
    write(path, model, type, **changes | {"metadata": own | changes.get("metadata", {})})
    return model


def write(path: Path, model: PreTrainedModel, kind: str = "Q4_1", **changes: Any) -> Path:
    """Write a model, with `changes` as in `Changes`.

    Its matrices have the type `kind`, by ggml's name. Vectors are F32.
    """
    file = Changes(**changes)
    arch = architecture_of(model)
    writer = gguf.GGUFWriter(
        path, file.metadata.get("general.architecture", arch), endianess=file.endianess
    )
    metadata = metadata_of(model)
    if file.tokenizer:
        metadata |= tokenizer_metadata(writer, model.config.vocab_size, file.pre)
    add_metadata(writer, metadata | dict(file.metadata))
    add_tensors(writer, model, kind, file)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kind_of(model: PreTrainedModel) -> Kind:
    """Return the kind of a model: of several with its class, the first one."""
    return next(kind for kind in KINDS.values() if kind.model_class == type(model).__name__)


def architecture_of(model: PreTrainedModel) -> str:
    """Return llama.cpp's name of a model's architecture."""
    return kind_of(model).name or str(model.config.model_type)


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the sizes of a model under llama.cpp's keys."""
    config = model.config
    arch = architecture_of(model)
    kind = kind_of(model)
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    sizes = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.{kind.epsilon[0]}": float(getattr(config, kind.epsilon[1])),
    }
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    sizes[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    rotated = int(head_size * rope.get("partial_rotary_factor", 1.0))
    sizes[f"{arch}.rope.dimension_count"] = rotated
    for name in ("attention.key_length", "attention.value_length"):
        sizes[f"{arch}.{name}"] = head_size
    return sizes


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add numbers and texts to a file, each by its type."""
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
    }
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            add[type(value)](key, value)


def add_tensors(writer: gguf.GGUFWriter, model: PreTrainedModel, kind: str, file: Changes) -> None:
    """Add the weights of a model and those of `file`: matrices of type `kind`, vectors in F32."""
    config = model.config
    kind_of_model = kind_of(model)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, np.ndarray | None] = {}
    for name, stored in names(model).items():
        value = model.get_parameter(name).detach().numpy().squeeze()
        tensors |= expert_tensors(stored, value) if ".experts." in name else {stored: value}
    for name, value in {**tensors, **file.tensors}.items():
        if value is None:
            continue
        is_matrix = value.ndim > 1 and name.endswith(".weight") and "ffn_gate_inp" not in name
        stored_as = file.types.get(name, kind) if is_matrix else "F32"
        data = encode(name, value, stored_as) if is_matrix else value
        part = name.split(".")[-2]
        if kind_of_model.is_turned and part in heads:
            data = turned(data, heads[part])
        if "norm" in part and name.endswith(".weight"):
            data = data + np.float32(kind_of_model.gain)
        is_float = stored_as in ("F16", "F32")
        writer.add_tensor(name, data, raw_dtype=None if is_float else Type[stored_as])


def write_vocabulary(path: Path, size: int) -> Path:
    """Write a file of a tokenizer alone: bytes, a few merges and words up to `size` tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
    tokens += [f"word{i}" for i in range(len(tokens), size)]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (size - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    add_metadata(writer, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.eos_token_id": 2})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokenizer_metadata(writer: gguf.GGUFWriter, size: int, pre: str) -> dict[str, Any]:
    """Add a tokenizer's tokens to a file, and return the rest of what describes it."""
    described = _pieces(writer, size) if pre == "pieces" else _tokenizer(writer, size, pre)
    return described | {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _tokenizer(writer: gguf.GGUFWriter, size: int, pre: str) -> dict[str, Any]:
    """Add a tokenizer of bytes, a few merges and fillers up to `size` tokens.

    Return the metadata that are not written yet.
    """
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)) + [5] * (size - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    told = {"model": "gpt2", "pre": pre, "padding_token_id": 0, "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()}


def _pieces(writer: gguf.GGUFWriter, size: int) -> dict[str, Any]:
    """Like `_tokenizer`, of SentencePiece's kind.

    It has pieces with scores, and bytes for what the pieces lack.
    """
    pieces = ["▁", *map(chr, range(97, 123)), "▁t", "he", "▁the", "ll", "ow"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [5] * (size - len(tokens))
    scores = (
        [0.0] * (len(tokens) - 5) + [-1.0, -2.0, -3.0, -4.0, -5.0] + [0.0] * (size - len(tokens))
    )
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(len(tokens), size)])
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    told = {"model": "llama", "unknown_token_id": 0, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()}
