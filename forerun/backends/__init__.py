"""How a forward runs fast. Every path here stands beside transformers' own and is tested equal to it."""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.backends.packed import pack
from forerun.backends.quantised import quantised_forward
from forerun.backends.stored import is_stored
from forerun.csrc.library import library, missing
from forerun.model.causal_lm import CausalLM

_LOG = logging.getLogger("forerun")

_LIBRARIES = ("torch", "transformers", "transformers_modules")  # the last one: code of checkpoints


def is_spread(model: PreTrainedModel) -> bool:
    """Whether a device map put the model's parts on several devices (disk is one), between which hooks move things."""
    places = getattr(model, "hf_device_map", None) or {}
    return len(set(places.values())) > 1 or model.device.type == "meta"


def is_untouched(module: nn.Module) -> bool:
    """Whether a module is torch's or transformers' own (or its checkpoint's), neither hooked nor patched."""
    return _package(module) in _LIBRARIES and not (
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )


def is_as_made(model: PreTrainedModel) -> bool:
    """Whether copies of the weights give what the model gives: nothing is adapted, quantised, hooked or patched."""
    plain = all(type(parameter.data) is Tensor for parameter in model.parameters())
    return plain and all(map(is_untouched, model.modules()))


def has_foreign_layers(model: nn.Module) -> bool:
    """Whether modules of other packages are in the model, such as PEFT's adapters.

    They may answer otherwise from one call to the next without a trace in weights or modules.
    """
    return any(_package(module) not in (*_LIBRARIES, "forerun") for module in model.modules())


def _package(module: nn.Module) -> str:
    return type(module).__module__.split(".")[0]


@cache
def warn_without_kernels() -> None:
    """Log one line, once a process, why products in few bits run in torch and not in our kernels."""
    _LOG.warning(
        f"weights in few bits run on torch's kernels: {missing()}. A token takes up to 8 times as long, and drafts "
        "bring less, as verifying several tokens costs nearly as much as decoding them"
    )


def prepare(model: PreTrainedModel, fast: bool = True, in_place: bool = False) -> CausalLM:
    """Return the model with its fastest forward: that of `forerun.backends.quantised` for weights in few bits and for
    small float32 models on a CPU, else its own, in float32 on a CPU with packed weights.

    Its own without `fast`, and where it is spread over devices, adapted, quantised, hooked or patched. `in_place` packs
    the model itself, which is good for nothing else then, and so needs no second copy of its weights. Raises
    ValueError for models that cannot run drafts (see CausalLM).
    """
    plain = CausalLM(model)  # refuses what it must before anything is copied
    is_few = is_stored(model)
    if is_few:
        if library() is None:
            warn_without_kernels()
    elif is_spread(model) or not is_as_made(model):
        return plain
    forward = quantised_forward(model) if fast else None
    if forward is not None:
        return CausalLM(model, forward)
    if not fast or is_few:
        return plain
    return CausalLM(pack(model, in_place), fingerprint_=plain.fingerprint)
