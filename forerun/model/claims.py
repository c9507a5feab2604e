"""Compare the sizes that a folder's configuration claims with its weights, by the files' headers.

Loading allocates what a configuration claims, whatever the files hold, so the two are compared before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.model.support import context_of

QUANTISED = "model.quantised.safetensors"  # the embedded pair's weights (`forerun.zoo.quantise`)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYERS, NAMES = 10_000, ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # limit and names of a setting
RENAMED = 2  # a model with other names for weights may claim this many times the weights of its files

Shapes = dict[str, tuple[int, ...]]


def stored_shapes(folder: Path) -> Shapes | None:
    """Return {name: shape} of a folder's safetensors files by their headers, with shapes before quantisation.

    Return None for missing or broken files, which loading reports. Broken quantised files raise ValueError here, as
    they are loaded after the model is built.
    """
    if (folder / QUANTISED).is_file():
        try:
            return _read(folder / QUANTISED, packed=True)
        except Exception as error:  # broken files may raise anything
            raise ValueError(f"{QUANTISED} cannot be read: {error}") from None
    try:
        if (folder / SINGLE).is_file():
            return _read(folder / SINGLE)
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        return {name: shape for file in files for name, shape in _read(folder / file).items()}
    except Exception:  # broken files may raise anything
        return None


def check_config(folder: Path) -> None:
    """Raise ValueError if a model's config.json claims more than LAYERS layers. Call it before the configuration is
    built: some of transformers' configurations make a list with an entry a layer."""
    try:
        settings = json.loads((folder / "config.json").read_text())
        claimed = next((value for value in _claimed_layers(settings) if not value <= LAYERS), 0)
    except Exception:  # broken files may raise anything; loading reports it
        return
    if claimed:
        stored = stored_shapes(folder)
        if stored is not None:
            _check_count(claimed, stored)
        raise ValueError(f"its config.json claims {claimed} layers; at most {LAYERS} are supported")


def _claimed_layers(settings: Any) -> Iterator[int | float]:
    """Yield the numbers of layers in settings, including those of nested configurations."""
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    for name, value in settings.items():
        if isinstance(value, dict | list):
            yield from _claimed_layers(value)
        elif name in NAMES and isinstance(value, int | float):
            yield value


def check_layer(folder: Path, claimed: int, make: Callable[[], nn.Module]) -> None:
    """Raise ValueError unless a folder holds exactly the tensors of the trained layer that `make` builds. `claimed`:
    its configuration's number of blocks, as very many take memory even without weights."""
    stored = stored_shapes(folder)
    if stored is None:
        return
    _check_count(claimed, stored)
    with torch.device("meta"):
        check_shapes(make(), stored)


def check_shapes(module: nn.Module, stored: Shapes) -> None:
    """Raise ValueError unless these are exactly the tensors of a module."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in sorted(wanted.keys() & stored.keys()):
        if wanted[name] != stored[name]:
            raise ValueError(_unequal(name, wanted, stored))
    if wanted.keys() != stored.keys():
        raise ValueError(f"its weights do not fit its configuration ({min(wanted.keys() ^ stored.keys())})")


def check_model(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise ValueError if a model's configuration claims more weights than the folder's files have.

    If a checkpoint uses other names for weights than the model, only their number is compared. Models that other
    programs have quantised, or that cannot be built without weights, are not checked.
    """
    check_config(folder)
    stored = stored_shapes(folder)
    if stored is None:
        return
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        text = config.get_text_config(decoder=True)
    except Exception:  # broken files and remote code may raise anything; loading says what
        return
    context_of(text)  # raises for too many positions
    if getattr(config, "quantization_config", None) is not None:
        return
    _check_count(getattr(text, "num_hidden_layers", 0), stored)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:
        return
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    wanted = {name: tuple(each.shape) for name, each in model.state_dict().items() if name not in tied}
    for name in sorted(wanted.keys() & stored.keys()):
        if prod(wanted[name]) > prod(stored[name]):
            raise ValueError(_unequal(name, wanted, stored))
    made = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [name for name in wanted.keys() - stored.keys() if not any(re.search(each, name) for each in made)]
    if not stored.keys() - wanted.keys() - tied:  # the names are the model's
        if missing:
            raise ValueError(lacking(missing))
        return
    claimed, there = (sum(map(prod, shapes.values())) for shapes in (wanted, stored))
    if claimed > RENAMED * there:
        raise ValueError(f"its config.json claims {claimed} weights and its files have {there}")


def lacking(names: list[str]) -> str:
    """Return the message for missing weights."""
    first, *rest = sorted(names)
    return f"no weights for {first}" + f" and {len(rest)} more" * bool(rest)


def _check_count(claimed: int | float, stored: Shapes) -> None:
    if isinstance(claimed, int | float) and claimed > len(stored):
        raise ValueError(f"its config.json claims {claimed} layers and its files have {len(stored)} tensors")


def _unequal(name: str, wanted: Shapes, stored: Shapes) -> str:
    return f"by its config.json {name} is {list(wanted[name])}, and in its file {list(stored[name])}"


def _read(path: Path, packed: bool = False) -> Shapes:
    found: Shapes = {}
    with safe_open(path, "pt") as file:
        scales = {name for name in file.keys() if packed and name.endswith(".scale")}  # noqa: SIM118
        for name in file.keys():  # noqa: SIM118
            each = file.get_slice(name)
            shape = tuple(each.get_shape())
            if f"{name}.scale" in scales and each.get_dtype() == "U8":  # three bytes hold four numbers of 6 bits
                shape = (*shape[:-1], shape[-1] * 4 // 3)
            if name not in scales:
                found[name] = shape
    return found
