"""Fast forwards. Each is tested to equal transformers' own forward."""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.backends.quantised import quantised_forward
from forerun.backends.stored import is_stored
from forerun.csrc.library import library, missing
from forerun.model.causal_lm import CausalLM

_LOG = logging.getLogger("forerun")

# Packages of modules that compute what their weights say. The last one holds the code of
# checkpoints.
_LIBRARIES = ("torch", "transformers", "transformers_modules")


def is_as_made(model: PreTrainedModel) -> bool:
    """Return whether the weights alone decide the outputs.

    This is so if nothing is adapted, quantised, hooked or patched, and all modules are torch's,
    transformers' or those of the checkpoint's own code.
    """
    if any(type(parameter.data) is not Tensor for parameter in model.parameters()):
        return False
    return not any(
        is_hooked(module) or _package(module) not in _LIBRARIES for module in model.modules()
    )


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a forward that was patched in place."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def has_foreign_layers(model: nn.Module) -> bool:
    """Return whether the model has modules of other packages, such as PEFT's adapters.

    Their output may change between calls although neither weights nor modules change.
    """
    return any(_package(module) not in (*_LIBRARIES, "forerun") for module in model.modules())


def _package(module: nn.Module) -> str:
    return type(module).__module__.split(".")[0]


@cache
def warn_without_kernels() -> None:
    """Log once per process why products in few bits run in torch and not in our kernels."""
    _LOG.warning(
        f"weights in few bits run on torch's kernels: {missing()}. A token takes up to 8 times "
        "as long, and drafts bring less, as verifying several tokens costs nearly as much as "
        "decoding them"
    )


def prepare(model: PreTrainedModel, fast: bool = True) -> CausalLM:
    """Return the model with its fastest forward.

    This is the one of `forerun.backends.quantised` for models of the Llama family on a CPU, in few
    bits or float32. All other models run their own forward. A model also runs its own forward
    without `fast`, or if it is spread over devices, adapted, quantised, hooked or patched.

    Raises:
        ValueError: the model cannot run drafts (`CausalLM`).
    """
    plain = CausalLM(model)  # refuses such models before anything is copied
    if is_stored(model):
        if library() is None:
            warn_without_kernels()
    elif _is_spread(model) or model.device.type == "meta" or not is_as_made(model):
        return plain
    forward = quantised_forward(model) if fast else None
    return plain if forward is None else CausalLM(model, forward)


def _is_spread(model: PreTrainedModel) -> bool:
    """Return whether a device map has put parts of the model in several places."""
    places = getattr(model, "hf_device_map", None) or {}  # only some models have this attribute
    return len(set(places.values())) > 1
