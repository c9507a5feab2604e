"""GGUF files of known models' shapes with random weights.

Matrices have the types that llama.cpp's Q4_K_M gives them, and gpt-oss those that it is published
in. Codes and scales of a matrix are random bytes; the scales of superblocks make its outputs about
as large as its inputs. Files have fewer layers than the models where memory asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2  # the token that ends a text
MERGES = ("Ġ t", "h e")
MERGED = ("Ġt", "he")
NORMAL, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens
# Where a block of a type has numbers in float16, and how many times 1 / sqrt(inputs) these are, so
# that weights are about 1 / sqrt(inputs). Minimums, the second numbers, make the mean zero.
FLOAT16_PLACES: dict[Type, dict[int, float]] = {
    Type.Q4_K: {0: 1 / 257, 2: 7.5 / 257},
    Type.Q5_K: {0: 1 / 530, 2: 15.5 / 530},
    Type.Q6_K: {208: 1 / 1367},
    Type.Q8_0: {0: 1 / 74},
}
MXFP4_EXPONENT = 120  # of weights of about 1 / 50
VECTOR_SIZE = 0.02  # of biases


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        architecture: llama.cpp's name.
        layers: of the file.
        model_layers: of the model.
        width, heads, groups, head, inner, vocabulary: its sizes; `inner` is that of experts, if it
            has any.
        experts: of a layer; 0 for a dense model.
        chosen: experts that a token takes.
        context: positions that the model is made for.
        keys: metadata beyond the sizes, without the architecture's name.
        tables: {tensor: numbers} of its rotation.
        is_tied: whether the embedding is the output matrix.
        is_fused: whether queries, keys and values are one matrix, and so are gate and up.
        has_head_norms: whether queries and keys are normed.
        has_post_norms: whether what attention and the MLP add is normed.
        has_biases: whether all matrices of layers have biases, and heads sinks.
        mlp_norm: the name of the norm before the MLP.
        fixed_type: the type of all matrices but experts; None for those of Q4_K_M.
        expert_type: the type of experts; None for those of Q4_K_M.
    """

    architecture: str
    layers: int
    model_layers: int
    width: int
    heads: int
    groups: int
    head: int
    inner: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    context: int = 32768
    keys: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, int] = field(default_factory=dict)
    is_tied: bool = True
    is_fused: bool = False
    has_head_norms: bool = False
    has_post_norms: bool = False
    has_biases: bool = False
    mlp_norm: str = "ffn_norm"
    fixed_type: Type | None = None
    expert_type: Type | None = None


SHAPES = {
    "Llama-3.2-3B": Shape(
        "llama",
        layers=28,
        model_layers=28,
        width=3072,
        heads=24,
        groups=8,
        head=128,
        inner=8192,
        vocabulary=128256,
        context=131072,
        keys={"rope.freq_base": 500000.0},
        tables={"rope_freqs.weight": 64},
    ),
    "Gemma-3-4B": Shape(
        "gemma3",
        layers=34,
        model_layers=34,
        width=2560,
        heads=8,
        groups=4,
        head=256,
        inner=10240,
        vocabulary=262144,
        context=131072,
        keys={
            "rope.freq_base": 1000000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 1024,
        },
        has_head_norms=True,
        has_post_norms=True,
    ),
    "Qwen3-4B": Shape(
        "qwen3",
        layers=36,
        model_layers=36,
        width=2560,
        heads=32,
        groups=8,
        head=128,
        inner=9728,
        vocabulary=151936,
        keys={"rope.freq_base": 1000000.0},
        has_head_norms=True,
    ),
    "Phi-4-mini": Shape(
        "phi3",
        layers=32,
        model_layers=32,
        width=3072,
        heads=24,
        groups=8,
        head=128,
        inner=8192,
        vocabulary=200064,
        context=131072,
        keys={
            "rope.dimension_count": 96,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.1902380,
            "attention.sliding_window": 262144,
        },
        tables={"rope_factors_long.weight": 48, "rope_factors_short.weight": 48},
        is_fused=True,
    ),
    "Qwen3-30B-A3B": Shape(
        "qwen3moe",
        layers=6,
        model_layers=48,
        width=2048,
        heads=32,
        groups=4,
        head=128,
        inner=768,
        vocabulary=151936,
        experts=128,
        chosen=8,
        keys={"rope.freq_base": 1000000.0},
        is_tied=False,
        has_head_norms=True,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        layers=4,
        model_layers=24,
        width=2880,
        heads=64,
        groups=8,
        head=64,
        inner=2880,
        vocabulary=201088,
        experts=32,
        chosen=4,
        context=131072,
        keys={
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "attention.sliding_window": 128,
        },
        is_tied=False,
        has_biases=True,
        mlp_norm="post_attention_norm",
        fixed_type=Type.Q8_0,
        expert_type=Type.MXFP4,
    ),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: its name.
        sizes: outer dimensions first.
        type: its type.
    """

    name: str
    sizes: tuple[int, ...]
    type: Type = Type.F32

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """Its sizes in the file, with bytes in place of numbers of few bits."""
        if self.type == Type.F32:
            return self.sizes
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return (*self.sizes[:-1], self.sizes[-1] // block * size)

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.stored_sizes) * (4 if self.type == Type.F32 else 1)

    def values(self, rng: np.random.Generator) -> np.ndarray:
        """Return random values, as the file has them. Gains and tables are ones."""
        if self.type != Type.F32:
            return self._blocks(rng)
        if "norm" in self.name or self.name.startswith("rope_"):
            return np.ones(self.sizes, np.float32)
        size = VECTOR_SIZE if len(self.sizes) == 1 else self.sizes[-1] ** -0.5
        return rng.standard_normal(self.sizes, np.float32) * np.float32(size)

    def _blocks(self, rng: np.random.Generator) -> np.ndarray:
        values = np.frombuffer(rng.bytes(self.nbytes), np.uint8)
        values = values.reshape(-1, gguf.GGML_QUANT_SIZES[self.type][1]).copy()
        for place, factor in FLOAT16_PLACES.get(self.type, {}).items():
            number = np.array([factor / math.sqrt(self.sizes[-1])], np.float16)
            values[:, place : place + 2] = number.view(np.uint8)
        if self.type == Type.MXFP4:
            values[:, 0] = MXFP4_EXPONENT
        return values.reshape(self.stored_sizes)


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether Q4_K_M gives a layer's values and `down` more bits (llama.cpp's rule)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def outer_tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield the tensors beside the layers."""
    sizes = shape.vocabulary, shape.width
    head_type = shape.fixed_type or Type.Q6_K
    embedding_type = head_type if shape.is_tied else shape.fixed_type or Type.Q4_K
    yield Tensor("token_embd.weight", sizes, embedding_type)
    yield Tensor("output_norm.weight", (shape.width,))
    if not shape.is_tied:
        yield Tensor("output.weight", sizes, head_type)
    for name, size in shape.tables.items():
        yield Tensor(name, (size,))


def layer_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer."""
    for tensor in (*attention_tensors(shape, layer), *mlp_tensors(shape, layer)):
        yield Tensor(f"blk.{layer}.{tensor.name}", tensor.sizes, tensor.type)


def attention_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer's attention, without its name."""
    few = shape.fixed_type or Type.Q4_K
    more = shape.fixed_type or (Type.Q6_K if has_more_bits(layer, shape.layers) else Type.Q4_K)
    queries = shape.heads * shape.head
    values = shape.groups * shape.head
    yield Tensor("attn_norm.weight", (shape.width,))
    if shape.is_fused:
        yield Tensor("attn_qkv.weight", (queries + 2 * values, shape.width), Type.Q5_K)
    else:
        for name, outputs, type in (("q", queries, few), ("k", values, few), ("v", values, more)):
            yield from matrix(shape, f"attn_{name}", (outputs, shape.width), type)
    yield from matrix(shape, "attn_output", (shape.width, queries), few)
    if shape.has_head_norms:
        yield Tensor("attn_q_norm.weight", (shape.head,))
        yield Tensor("attn_k_norm.weight", (shape.head,))
    if shape.has_post_norms:
        yield Tensor("post_attention_norm.weight", (shape.width,))
    if shape.has_biases:
        yield Tensor("attn_sinks.weight", (shape.heads,))


def mlp_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer's MLP or experts, without its name."""
    few = shape.expert_type or Type.Q4_K
    more = shape.expert_type or (Type.Q6_K if has_more_bits(layer, shape.layers) else Type.Q4_K)
    first = shape.inner, shape.width
    last = shape.width, shape.inner
    yield Tensor(f"{shape.mlp_norm}.weight", (shape.width,))
    if shape.experts:
        yield from matrix(shape, "ffn_gate_inp", (shape.experts, shape.width), Type.F32)
        for name, sizes, type in (("gate", first, few), ("up", first, few), ("down", last, more)):
            yield from matrix(shape, f"ffn_{name}_exps", (shape.experts, *sizes), type)
    elif shape.is_fused:
        yield Tensor("ffn_up.weight", (2 * shape.inner, shape.width), few)
        yield Tensor("ffn_down.weight", last, more)
    else:
        for name, sizes, type in (("gate", first, few), ("up", first, few), ("down", last, more)):
            yield Tensor(f"ffn_{name}.weight", sizes, type)
    if shape.has_post_norms:
        yield Tensor("post_ffw_norm.weight", (shape.width,))


def matrix(shape: Shape, name: str, sizes: tuple[int, ...], type: Type) -> Iterator[Tensor]:
    """Yield a matrix, or those of all experts, and their biases if the model has any."""
    yield Tensor(f"{name}.weight", sizes, type)
    if shape.has_biases:
        yield Tensor(f"{name}.bias", sizes[:-1])


def metadata_of(shape: Shape) -> dict[str, Any]:
    """Return what a file says about its shape."""
    keys: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.groups,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if shape.experts:
        keys |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.chosen,
            "expert_feed_forward_length": shape.inner,
        }
    return {f"{shape.architecture}.{key}": value for key, value in (keys | shape.keys).items()}


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Add a tokenizer of bytes and fillers, because llama.cpp opens no file without one."""
    tokens = [*SPECIAL_TOKENS, *bytes_to_unicode().values(), *MERGED]
    kinds = [CONTROL] * len(SPECIAL_TOKENS) + [NORMAL] * (len(tokens) - len(SPECIAL_TOKENS))
    kinds += [UNUSED] * (vocabulary - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)


def write_file(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write a file of a shape, tensor by tensor, so that it is never whole in memory."""
    adders = {int: "add_uint32", float: "add_float32", str: "add_string"}
    tensors = list(outer_tensors(shape))
    for layer in range(shape.layers):
        tensors += layer_tensors(shape, layer)
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in metadata_of(shape).items():
        getattr(writer, adders[type(value)])(key, value)
    add_tokenizer(writer, shape.vocabulary)
    for tensor in tensors:
        dtype = np.dtype(np.float32 if tensor.type == Type.F32 else np.uint8)
        writer.add_tensor_info(
            tensor.name, tensor.stored_sizes, dtype, tensor.nbytes, raw_dtype=tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for tensor in tensors:
        writer.write_tensor_data(tensor.values(rng))
    writer.close()
