"""What decides the bits of a model's keys, values and hidden states, as a digest."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
import transformers
from torch import Tensor

from forerun.backends import has_foreign_layers
from forerun.backends.facts import processor
from forerun.backends.stored import StoredEmbedding, StoredLinear
from forerun.csrc.library import build_id
from forerun.model.causal_lm import CausalLM
from forerun.model.segments import bytes_of

_UNUSED = ("_name_or_path", "transformers_version")  # of a configuration


def identity(model: CausalLM) -> str | None:
    """Return a digest of a model's weights, all of them, of its configuration, and of what runs it.

    None if these do not decide the bits: layers of other packages, such as adapters, code of the
    checkpoint, and modules that are hooked, patched or on no device may do anything.
    """
    if not _is_known(model):
        return None
    config = model.model.config.to_dict()
    for name in _UNUSED:
        config.pop(name, None)
    what: list[Any] = [type(model.model).__name__, config, _engine(model), list(_weights(model))]
    text = json.dumps(what, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _is_known(model: CausalLM) -> bool:
    if any(type(each.data) is not Tensor for each in model.model.parameters()):
        return False
    return not has_foreign_layers(model.model) and not any(
        each._forward_hooks
        or each._forward_pre_hooks
        or "forward" in vars(each)
        or type(each).__module__.split(".")[0] == "transformers_modules"
        or any(part.is_meta for part in each.parameters(recurse=False))
        for each in model.model.modules()
    )


def _engine(model: CausalLM) -> list[Any]:
    """Return what runs a model. In C the bits are the same with any number of threads, on every
    instruction set, but any build may change the order of additions."""
    backend = model.backend
    what: list[Any] = [type(backend).__name__, str(backend.dtype), build_id(), torch.__version__]
    what += [transformers.__version__, torch.backends.cpu.get_cpu_capability()]
    if model.exact == "rounding":
        is_gpu = model.device.type == "cuda"
        device = torch.cuda.get_device_name(model.device) if is_gpu else processor()
        what += [
            model.model.config._attn_implementation,
            str(model.device),
            device,
            torch.get_num_threads(),
        ]
    return what


def _weights(model: CausalLM) -> Iterator[tuple[Any, ...]]:
    """Yield (name, kind, shape, CRC-32) of all weights and buffers."""
    for name, module in model.model.named_modules():
        if isinstance(module, StoredLinear | StoredEmbedding):
            stored = module.stored
            yield (
                name,
                stored.type.name,
                (stored.out, stored.inputs),
                zlib.crc32(stored.content.data),
            )
    for name, tensor in [*model.model.named_parameters(), *model.model.named_buffers()]:
        yield (
            name,
            str(tensor.dtype),
            tuple(tensor.shape),
            zlib.crc32(bytes_of(tensor.cpu().contiguous())),
        )
