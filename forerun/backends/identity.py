"""A digest of what decides the bits of a model's keys, values and hidden states."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from forerun.backends import has_foreign_layers, is_hooked
from forerun.backends.facts import processor
from forerun.backends.stored import StoredEmbedding, StoredLinear
from forerun.csrc.library import build_id
from forerun.model.causal_lm import CausalLM
from forerun.model.segments import bytes_of

_UNUSED_SETTINGS = ("_name_or_path", "transformers_version")


def identity(model: CausalLM) -> str | None:
    """Return a digest of a model's weights, all of them, of its configuration, and of what runs it.

    It is None if these do not decide the bits: layers of other packages, such as adapters, code of
    the checkpoint, and modules that are hooked, patched or on no device may do anything.
    """
    if not _is_known(model.model):
        return None
    config = model.model.config.to_dict()
    for name in _UNUSED_SETTINGS:
        config.pop(name, None)
    name = type(model.model).__name__
    described = [name, config, _engine(model), list(_weights(model.model))]
    text = json.dumps(described, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _is_known(model: nn.Module) -> bool:
    """Return whether weights and configuration decide what a model computes."""
    if any(type(parameter.data) is not Tensor for parameter in model.parameters()):
        return False
    return not has_foreign_layers(model) and all(map(_is_known_module, model.modules()))


def _is_known_module(module: nn.Module) -> bool:
    is_of_checkpoint = type(module).__module__.split(".")[0] == "transformers_modules"
    if is_of_checkpoint or is_hooked(module):
        return False
    return not any(parameter.is_meta for parameter in module.parameters(recurse=False))


def _engine(model: CausalLM) -> list[Any]:
    """Return what runs a model.

    In C the bits are the same with any number of threads and on every instruction set. But any
    build may change the order of additions.
    """
    backend = model.backend
    described: list[Any] = [
        type(backend).__name__,
        str(backend.dtype),
        build_id(),
        torch.__version__,
        transformers.__version__,
        torch.backends.cpu.get_cpu_capability(),
    ]
    if model.exact == "rounding":
        is_gpu = model.device.type == "cuda"
        described += [
            model.model.config._attn_implementation,
            str(model.device),
            torch.cuda.get_device_name(model.device) if is_gpu else processor(),
            torch.get_num_threads(),
        ]
    return described


def _weights(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield (name, kind, shape, CRC-32) of all weights and buffers."""
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear | StoredEmbedding):
            stored = module.stored
            shape = stored.out, stored.inputs
            yield name, stored.type.name, shape, zlib.crc32(stored.content.data)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        checksum = zlib.crc32(bytes_of(tensor.cpu().contiguous()))
        yield name, str(tensor.dtype), tuple(tensor.shape), checksum
