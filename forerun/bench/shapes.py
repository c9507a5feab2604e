"""Small trained models in the shape of big ones: the output stays, a forward costs what the big one's does.

Width is padded with zeros, layers are added whose output projections are 0 (Net2Net, arXiv 1511.05641, has the idea;
the placing is ours). So a method meets the costs of a 7B or 70B model and the acceptance of a real trained pair.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from forerun.bench.sizes import ModelShape
from forerun.nn.heads import HiddenConfig, HiddenDrafter


@torch.no_grad()
def expand(model: PreTrainedModel, shape: ModelShape) -> PreTrainedModel:
    """A model of that shape with the given one's output: equal logits [.., V] for its V tokens, and for all others that
    of the token with the lowest mean logit.

    Weights that cannot reach the output are random, so that the arithmetic is not on zeros. Rotation stays that of the
    small model. Made on its device and in its dtype, tensor by tensor.

    Raises ValueError for architectures other than Llama and Qwen3, rotations other than the default, biases, and a
    shape that is smaller in anything, or whose heads do not hold the model's.
    """
    config = model.config
    if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM):
        raise ValueError(f"{type(model).__name__} cannot be given another shape; Llama and Qwen3 can")
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        raise ValueError(f"rotation of the type {config.rope_parameters['rope_type']!r} cannot be given another shape")
    small = ModelShape(**{name: getattr(config, name) for name in asdict(shape)})
    for name, size in asdict(small).items():
        if getattr(shape, name) < size:
            raise ValueError(f"the shape's {name} is {getattr(shape, name)}, less than the model's {size}")
    groups = [each.num_attention_heads // each.num_key_value_heads for each in (shape, small)]
    if shape.head_dim % small.head_dim or groups[0] < groups[1]:
        raise ValueError(
            f"heads of {shape.head_dim}, {groups[0]} a key/value head, do not hold heads of {small.head_dim}, "
            f"{groups[1]} a key/value head"
        )
    if config.attention_bias or getattr(config, "mlp_bias", False):
        raise ValueError("a model with biases cannot be given another shape")
    dtype, device = model.dtype, model.device
    wider = shape.hidden_size / small.hidden_size
    sizes: dict[str, Any] = config.to_dict() | asdict(shape)
    sizes |= {"tie_word_embeddings": False, "rms_norm_eps": config.rms_norm_eps / wider, "layer_types": None}
    with torch.device("meta"):
        big: Any = type(model)(type(config)(**sizes))
    nn.Module.to(big, dtype).to_empty(device=device)
    big.model.rotary_emb = type(big.model.rotary_emb)(big.config).to(device)
    old, random = dict(model.named_parameters()), torch.Generator(device).manual_seed(0)
    place = _Places(shape, small, groups, device)
    for name, parameter in big.named_parameters():
        parameter.normal_(std=0.02, generator=random)
        part = name.split(".")[-2]
        if part == "lm_head":
            head = model.get_output_embeddings().weight.to(device, dtype)
            parameter[: len(head), : head.shape[1]] = head
            parameter[len(head) :, : head.shape[1]] = head[_least_likely(model)]
            continue
        if part in ("embed_tokens", "o_proj", "down_proj"):  # what writes into the states, and so into the padding
            parameter.zero_()
        if name not in old:
            continue
        value = old[name].to(device, torch.float32)
        if part in ("q_norm", "k_norm"):
            value = value * (1 if part == "q_norm" else place.stretch**-1)
            parameter[place.within] = value.to(dtype)
        elif value.ndim == 1:
            parameter[: len(value)] = (value * wider**-0.5).to(dtype)
        elif part in ("q_proj", "k_proj", "v_proj"):
            # A norm behind queries would undo what makes up for attention's other scale; there it is in that norm.
            scale = place.stretch if part == "q_proj" and type(model) is LlamaForCausalLM else 1
            place.project(parameter, value * scale, place.queries if part == "q_proj" else place.keys)
        elif part == "o_proj":
            place.back(parameter, value)
        else:
            parameter[: value.shape[0], : value.shape[1]] = value.to(dtype)
    for name, module in big.named_modules():
        if name.endswith(("q_norm", "k_norm")):  # over a head's width, which grows by another factor
            module.variance_epsilon = config.rms_norm_eps * small.head_dim / shape.head_dim
    big.generation_config = model.generation_config
    return big.eval()


@torch.no_grad()
def expand_head(head: HiddenDrafter, model: PreTrainedModel, shape: ModelShape) -> HiddenDrafter:
    """The head over that model's states, for the model in that shape, with the same output. Its hot set is a quarter of
    the vocabulary or what it was. For a shape that `expand` takes.
    """
    config = head.config
    small = ModelShape(**{name: getattr(config, name) for name in asdict(shape)})
    # Layers of the target's shape, in which an eagle's wider MLP stays as much wider.
    inner = round(small.intermediate_size * shape.intermediate_size / model.config.intermediate_size)
    hot = max(config.hot_size, shape.vocab_size // 4)
    sizes = config.to_dict() | asdict(shape) | {"intermediate_size": inner, "hot_size": hot}
    wider = shape.hidden_size / small.hidden_size
    sizes |= {"num_hidden_layers": config.num_hidden_layers, "rms_norm_eps": config.rms_norm_eps / wider}
    big = HiddenDrafter(HiddenConfig(**sizes))
    nn.Module.to(big, head.device)
    groups = [each.num_attention_heads // each.num_key_value_heads for each in (shape, small)]
    place = _Places(shape, small, groups, head.device)
    unlikely = _least_likely(model)
    others = torch.ones(shape.vocab_size, dtype=torch.bool, device=head.device)
    others[head.hot] = False
    big.hot.copy_(torch.cat([head.hot, others.nonzero()[:, 0].flip(0)])[:hot])  # the vocabulary's padding first
    d, random = small.hidden_size, torch.Generator(head.device).manual_seed(0)
    old = dict(head.named_parameters())
    for name, parameter in big.named_parameters():
        value, part = old[name].float(), name.split(".")[-2]
        parameter.normal_(std=0.02, generator=random)
        if part in ("out", "down"):
            parameter.zero_()
        if part == "fuse":
            parameter[d:] = 0
            parameter[:d, :d] = value[:, :d]
            parameter[:d, shape.hidden_size :][:, :d] = value[:, d:] * wider**-0.5  # behind a norm over the width
        elif part == "qkv":
            into, parts = (
                whole.split([each.head_dim * n for n in (each.num_attention_heads, *[each.num_key_value_heads] * 2)])
                for each, whole in ((shape, parameter), (small, value))
            )
            place.project(into[0], parts[0] * place.stretch, place.queries)
            for wide, each in zip(into[1:], parts[1:], strict=True):
                place.project(wide, each, place.keys)
        elif part == "out":
            place.back(parameter, value)
        elif part == "gate_up":
            for into, half in zip(parameter.chunk(2), value.chunk(2), strict=True):
                into[: len(half), :d] = half
        elif part == "answer":
            place_of = (head.hot == unlikely).nonzero()
            parameter[:] = value[place_of[0, 0]] if len(place_of) else 0
            parameter[: len(value)] = value
        elif value.ndim == 1:
            parameter[:d] = value * wider**-0.5
        else:
            parameter[: value.shape[0], : value.shape[1]] = value
    return big.eval()


class _Places:
    """Where the heads of a small model, and the dimensions within one, are in a big one."""

    def __init__(self, shape: ModelShape, small: ModelShape, groups: list[int], device: torch.device) -> None:
        step, half = shape.head_dim // small.head_dim, torch.arange(small.head_dim // 2, device=device)
        self.within = torch.cat([half * step, shape.head_dim // 2 + half * step])  # the same frequencies of rotation
        self.keys = torch.arange(small.num_key_value_heads, device=device)
        queries = torch.arange(small.num_attention_heads, device=device)
        self.queries = queries // groups[1] * groups[0] + queries % groups[1]
        self.stretch = step**0.5  # by which attention's own scale is smaller
        self.size = shape.head_dim

    def project(self, parameter: Tensor, value: Tensor, heads: Tensor) -> None:
        """Into queries, keys or values [H D, d] of these heads."""
        parts = parameter.view(-1, self.size, parameter.shape[1])
        parts[heads] = 0
        inner = value.view(len(heads), -1, value.shape[1])
        parts[heads[:, None], self.within, : value.shape[1]] = inner.to(parameter.dtype)

    def back(self, parameter: Tensor, value: Tensor) -> None:
        """Into the way out of the heads [d, H D], which is zero."""
        parts = parameter.view(len(parameter), -1, self.size)
        inner = value.view(len(value), len(self.queries), -1)
        parts[: len(value), self.queries[:, None], self.within] = inner.to(parameter.dtype)


def _least_likely(model: PreTrainedModel) -> int:
    """The token with the lowest logit on the mean, so that a copy of it is never the best."""
    ids = torch.arange(min(model.config.vocab_size, 256), device=model.device)[None]
    return int(model(input_ids=ids).logits[0].float().mean(0).argmin())


@torch.no_grad()
def difference(model: PreTrainedModel, big: PreTrainedModel) -> float:
    """The largest distance of their logits on some tokens, as a share of the largest logit."""
    ids = torch.arange(min(model.config.vocab_size, 64), device=model.device)[None]
    wanted = model(input_ids=ids).logits.float()
    found = big(input_ids=ids.to(big.device)).logits[..., : wanted.shape[-1]].float().to(wanted.device)
    return float((found - wanted).abs().max() / wanted.abs().max())
