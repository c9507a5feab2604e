"""Fast forwards. Each is tested equal to transformers' own."""

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

_LIBRARIES = (
    "torch",
    "transformers",
    "transformers_modules",
)  # the last holds the code of checkpoints


def is_as_made(model: PreTrainedModel) -> bool:
    """Return whether the weights alone decide the outputs: nothing is adapted, quantised, hooked or patched, and all
    modules are torch's, transformers' or the checkpoint's own."""
    return all(type(parameter.data) is Tensor for parameter in model.parameters()) and not any(
        each._forward_hooks
        or each._forward_pre_hooks
        or "forward" in vars(each)
        or _package(each) not in _LIBRARIES
        for each in model.modules()
    )


def has_foreign_layers(model: nn.Module) -> bool:
    """Return whether the model has modules of other packages, such as PEFT's adapters.

    Their output may change between calls without a change of weights or modules.
    """
    return any(_package(module) not in (*_LIBRARIES, "forerun") for module in model.modules())


def _package(module: nn.Module) -> str:
    return type(module).__module__.split(".")[0]


@cache
def warn_without_kernels() -> None:
    """Log once a process why products in few bits run in torch and not in our kernels."""
    _LOG.warning(
        f"weights in few bits run on torch's kernels: {missing()}. A token takes up to 8 times as long, and drafts "
        "bring less, as verifying several tokens costs nearly as much as decoding them"
    )


def prepare(model: PreTrainedModel, fast: bool = True) -> CausalLM:
    """Return the model with its fastest forward: that of `forerun.backends.quantised` for the Llama family on a CPU, in
    few bits or float32, else its own.

    The model's own forward runs too without `fast`, or if it is spread over devices, adapted, quantised, hooked or
    patched. Raises ValueError for models that cannot run drafts (`CausalLM`).
    """
    plain = CausalLM(model)  # refuses what it must before anything is copied
    if is_stored(model):
        if library() is None:
            warn_without_kernels()
    else:
        places = (
            getattr(model, "hf_device_map", None) or {}
        )  # several, if a device map spread the model
        if len(set(places.values())) > 1 or model.device.type == "meta" or not is_as_made(model):
            return plain
    forward = quantised_forward(model) if fast else None
    return plain if forward is None else CausalLM(model, forward)
