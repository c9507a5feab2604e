"""Writes the table of docs/reference/architectures.md from what tiny random models do.

python -m benchmarks.pages.architectures
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from forerun.api.loading import load_model
from forerun.backends import architectures, prepare
from tests.support import ggufs

OUT = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
BEGIN = "<!-- Made by `python -m benchmarks.pages.architectures`. -->"
END = "<!-- The end of what is made. -->"
HEADER = (
    "| architecture | models | GGUF | float32 folder | int8, int4 folder |",
    "|---|---|---|---|---|",
)
# What people call the models, by llama.cpp's names of their architectures.
MODELS = {
    "llama": "Llama 2 and 3, Mistral, Ministral 8B and others",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "gemma3": "Gemma 3, texts only",
    "gemma2": "Gemma 2",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "granite": "Granite 3, dense",
    "olmo2": "OLMo 2 and OLMo 3",
    "glm4": "GLM-4-0414",
    "exaone4": "EXAONE 4",
    "cohere2": "Command R7B, Command A",
    "starcoder2": "StarCoder 2",
    "mistral3": "Ministral 3",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5, dense",
    "hunyuan-dense": "Hunyuan, dense",
    "qwen3moe": "Qwen3-30B-A3B and others",
    "qwen2moe": "Qwen1.5-MoE",
    "granitemoe": "Granite 3, with experts",
    "gpt-oss": "gpt-oss",
}
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 1}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}
LAYERS_OF_4 = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 32}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@dataclass(frozen=True)
class Other:
    """An architecture that has no file in `forerun/backends/architectures`.

    Attributes:
        models: what people call its models.
        model_class: transformers' class.
        name: llama.cpp's name of the architecture; "" if llama.cpp has none.
        settings: of the configuration, beyond SIZES.
        keys: what its files have beyond those of a Llama.
    """

    models: str
    model_class: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


OTHERS = (
    Other("Gemma 1", "GemmaForCausalLM", "gemma"),
    Other("Gemma 4", "Gemma4ForCausalLM", "gemma4", LAYERS_OF_4),
    Other(
        "Mixtral",
        "MixtralForCausalLM",
        "llama",
        {"num_local_experts": 4},
        {"llama.expert_count": 4},
    ),
    Other("DeepSeek-V3", "DeepseekV3ForCausalLM", "deepseek2", EXPERTS | LATENT),
    Other("Phi-1, Phi-2", "PhiForCausalLM", "phi2"),
    Other("StableLM", "StableLmForCausalLM", "stablelm"),
    Other("Command R", "CohereForCausalLM", "command-r"),
    Other("Falcon", "FalconForCausalLM", "falcon", {"alibi": False}),
    Other("GPT-J", "GPTJForCausalLM", "gptj", {"rotary_dim": 8}),
    Other("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", "gptneox"),
    Other("OPT", "OPTForCausalLM", "", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    Other("StarCoder 1", "GPTBigCodeForCausalLM", "starcoder"),
    Other("GPT-2", "GPT2LMHeadModel", "gpt2"),
    Other("Llama 4", "Llama4ForCausalLM", "llama4", {"num_local_experts": 1}),
    Other("Qwen3-Next", "Qwen3NextForCausalLM", "qwen3next", EXPERTS | LINEAR),
    Other("LFM2", "Lfm2ForCausalLM", "lfm2", {"layer_types": ["conv", "full_attention"]}),
    Other("Mamba", "MambaForCausalLM", "mamba"),
    Other("BLOOM", "BloomForCausalLM", "bloom", {"n_head": 4}),
    Other(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        "",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    Other("T5", "T5ForConditionalGeneration", "t5", T5),
)


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = OUT.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join([BEGIN, "", *HEADER, *rows(), "", END]) + after


def rows() -> Iterator[str]:
    """Yield the rows of the table: what has a file of its own, and then the others."""
    kinds = kinds_by_name()
    with tempfile.TemporaryDirectory() as folder:
        for name in architectures.names():
            yield row(f"`{name}`", MODELS[name], known_ways(Path(folder), kinds[name]))
        for other in OTHERS:
            shown = f"`{other.name}`" if other.name else ""
            yield row(shown, other.models, other_ways(Path(folder), other))


def row(name: str, models: str, ways: list[str]) -> str:
    """Return a row of the table."""
    return f"| {' | '.join([name, models, *ways])} |"


def kinds_by_name() -> dict[str, dict[str, PreTrainedModel]]:
    """Return a model of each kind of file, by the name of its architecture."""
    kinds: dict[str, dict[str, PreTrainedModel]] = {}
    for kind_name, kind in ggufs.KINDS.items():
        model = ggufs.small(kind_name)
        kinds.setdefault(kind.name or model.config.model_type, {})[kind_name] = model
    return kinds


def known_ways(folder: Path, kinds: Mapping[str, PreTrainedModel]) -> list[str]:
    """Return how the models of an architecture run from each kind of file, by all kinds of them."""
    path = folder / "model.gguf"
    table = []
    for kind_name, model in kinds.items():
        ggufs.write_kind(path, kind_name, "Q8_0")
        table.append([speed(path), *folder_ways(folder / kind_name, model)])
    return [together(cells) for cells in zip(*table, strict=True)]


def other_ways(folder: Path, other: Other) -> list[str]:
    """Return how the models of another architecture run from each kind of file."""
    model_class = getattr(transformers, other.model_class)
    model = model_class(model_class.config_class(**SIZES | dict(other.settings)))
    return [file_way(folder, other), *folder_ways(folder / other.model_class, model)]


def file_way(folder: Path, other: Other) -> str:
    """Return how a GGUF file of another architecture runs. Its other contents are a Llama's."""
    if not other.name:
        return "no such files"
    metadata = {"general.architecture": other.name, **other.keys}
    return speed(ggufs.write(folder / "model.gguf", ggufs.small(), "Q8_0", metadata=metadata))


def folder_ways(folder: Path, model: PreTrainedModel) -> list[str]:
    """Return how a folder with a checkpoint runs in float32, and in 8 and 4 bits."""
    model.save_pretrained(folder)
    few_bits = [speed(folder, weights) for weights in ("int8", "int4")]
    return [speed(folder, "float32"), together(few_bits)]


def speed(source: Path, weights: str | None = None) -> str:
    """Return how a model runs: in C, in transformers' own forward, or not at all."""
    try:
        model = prepare(load_model(source, "target", weights=weights, device="cpu"))
    except ValueError:
        return "refused"
    return "fast" if model.exact == "bitwise" else "slow"


def together(cells: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """Return a word for several, or all of them if they differ."""
    return " or ".join(dict.fromkeys(cells))


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
