"""How a forward runs fast. Every path here stands beside transformers' own and is tested equal to it."""

from __future__ import annotations

from transformers import PreTrainedModel

from forerun.model import CausalLM
from forerun.runtime.lean import lean_forward
from forerun.runtime.packed import pack


def is_spread(model: PreTrainedModel) -> bool:
    """Whether a device map put the model's parts on several devices (disk is one), between which hooks move things."""
    places = getattr(model, "hf_device_map", None) or {}
    return len(set(places.values())) > 1 or model.device.type == "meta"


def prepare(model: PreTrainedModel, fast: bool = True, in_place: bool = False) -> CausalLM:
    """The model with the fastest forward there is for it: the lean one, else its own with packed weights, else its own.

    Its own without `fast`, and where it is spread over devices. `in_place` packs the model itself, which is good for
    nothing else then, and so needs no second copy of its weights. Raises ValueError for models that cannot run drafts
    (see CausalLM).
    """
    plain = CausalLM(model)  # refuses what it must before anything is copied
    if not fast or is_spread(model):  # packed copies would lose the hooks that move things
        return plain
    forward = lean_forward(model)
    if forward is not None:
        return CausalLM(model, forward)
    packed = pack(model, in_place)
    return CausalLM(packed) if packed is not model else plain
