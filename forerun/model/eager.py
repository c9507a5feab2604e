"""The forward of transformers' own model, with hidden states captured by hooks.

No other module calls the model's code.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.engine.target import Capture
from forerun.model.batch import Inputs, pad
from forerun.model.compat import cache_argument
from forerun.model.kv_cache import KVCache
from forerun.model.support import window_of


class EagerForward:
    """A `forerun.model.forward.Forward` that runs the model's own forward."""

    exact: Literal["rounding"] = "rounding"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        config = model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or []
        self.window = window_of(config)
        # With layer types the model takes a mask for each type, without them one for all layers.
        self._mask_kinds = sorted(set(kinds)) if "sliding_attention" in kinds else None
        self._cache_name = cache_argument(model.forward) or ""
        can_choose = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if can_choose else {}

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run new entries; return logits [n, V], if wanted, and captured states [n, d]."""
        batch = pad(inputs, cache, self.device, self.dtype, self.window, self._mask_kinds)
        # With a capture, a hook cuts the LM head's inputs instead.
        options = {} if logits or capture else self._last_logits
        with capture_hidden_states(self.model, capture, last_only=not logits) as captured:
            output = self.model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                attention_mask=batch.mask,
                use_cache=True,
                **{self._cache_name: cache},
                **options,
            )
        chosen = inputs.unpad(output.logits) if logits else None
        states = [inputs.unpad(state.to(self.device)) for state in captured]
        if not states:
            return chosen, None
        return chosen, states[0] if len(states) == 1 else torch.cat(states, -1)


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the LM head. Raises ValueError for a model that names none."""
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no readable features: it names no LM head")
    return head


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers. Raises ValueError for a model in which they cannot be found."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no readable features: it has no list of {count} layers"
    )


@contextmanager
def capture_hidden_states(
    model: PreTrainedModel, capture: Capture = "head", last_only: bool = False
) -> Iterator[list[Tensor]]:
    """Yield a list that receives the hidden states [B, N, d] of forwards in this thread.

    Args:
        model: the model.
        capture: "head": each forward appends the LM head's inputs. Numbers of layers: the list
            holds the states of the last forward only, one item per number.
        last_only: whether the LM head runs at the last position only.
    """
    captured: list[Tensor] = []
    if not capture:
        yield captured
        return
    thread = threading.get_ident()

    # Hooks of a module run in all threads that use it.

    def at_head(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if threading.get_ident() != thread:
            return None
        if capture == "head":
            captured.append(inputs[0])
        return (inputs[0][:, -1:], *inputs[1:]) if last_only else None

    def before_layer(
        place: int, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if threading.get_ident() == thread:
            captured[place] = inputs[0] if inputs else named["hidden_states"]

    def after_last(place: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == thread:
            captured[place] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        if capture == "head" or last_only:
            hooks.callback(lm_head(model).register_forward_pre_hook(at_head).remove)
        for place, after in enumerate(() if capture == "head" else capture):
            layers = decoder_layers(model)
            captured.append(torch.empty(0))  # which a forward replaces
            if after < len(layers):
                hook = layers[after].register_forward_pre_hook(
                    partial(before_layer, place), with_kwargs=True
                )
            else:
                hook = layers[-1].register_forward_hook(partial(after_last, place))
            hooks.callback(hook.remove)
        yield captured
