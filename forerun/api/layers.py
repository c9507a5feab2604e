"""Trained layers from their folders, for just the models that they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file
from torch import nn

from forerun.api.loading import loading
from forerun.backends.heads import Head, HiddenLM
from forerun.heads import heads
from forerun.heads.eagle3 import Eagle3Head, own_name, read_config
from forerun.heads.heads import HiddenDrafter
from forerun.heads.pre_verifier import RETIRED_LAYER_SETTINGS, PreVerifier
from forerun.methods import Method
from forerun.model.causal_lm import CausalLM, context_of
from forerun.model.eager import decoder_layers
from forerun.model.fingerprint import same_model
from forerun.zoo import ROLES, check_role, is_eagle3
from forerun.zoo.quantise import WEIGHTS, restore

_Layer = TypeVar("_Layer", PreVerifier, HiddenDrafter)


def layers_for(
    methods: list[Method],
    target: CausalLM,
    draft: CausalLM | None,
    pre_verifier: str | Path | PreVerifier | None,
    head: str | Path | Head | HiddenLM | None,
) -> tuple[PreVerifier | None, HiddenLM | None]:
    """Return the layer and the head that methods need. One that is given as an object and not needed is kept.

    Raises ValueError for those that do not fit. A missing one is found before (`forerun.api.resolve`).
    """
    layer = pre_verifier if isinstance(pre_verifier, PreVerifier) else None
    hidden = head if isinstance(head, HiddenLM) else None
    for method in methods:
        if method.layer is not None:
            assert draft is not None and pre_verifier is not None
            layer = load_pre_verifier(layer or pre_verifier, target, draft)
        if method.head is not None:
            if hidden is None:
                assert head is not None and not isinstance(head, HiddenLM)
                hidden = HiddenLM(load_head(head, target, method.head), target)
            if hidden.kind != method.head:
                raise ValueError(
                    f"the head is of the kind {hidden.kind!r}; the method needs {method.head!r}"
                )
    return layer, hidden


def load_pre_verifier(
    source: str | Path | PreVerifier, target: CausalLM, draft: CausalLM
) -> PreVerifier:
    """Load the trained layer of a folder, for just this target and draft.

    Raises ValueError for a missing folder, a file that is missing or broken, a configuration with unknown fields, and a
    layer of an older form or for another target or draft.
    """
    name = (
        "the pre-verifier"
        if isinstance(source, PreVerifier)
        else f"the pre-verifier {str(source)!r}"
    )
    layer = source if isinstance(source, PreVerifier) else _load_layer(source, name, PreVerifier)
    for part, model in (("target", target), ("draft", draft)):
        if not same_model(getattr(layer.config, part), model.fingerprint):
            trained = layer.config.recipe.get(part)
            raise ValueError(
                f"{name} belongs to another {part}: it was trained for {trained!r}; train one for this pair"
            )
    return nn.Module.to(layer, target.device).eval()


def load_head(source: str | Path | Head, target: CausalLM, form: str | None = None) -> Head:
    """Load the head over hidden states of a folder, for just this target; of any form if none is named.

    Raises ValueError for a missing folder, a file that is missing or broken, a configuration with unknown fields, a
    head of another `form` (HiddenConfig.kind), a hot set that does not fit the vocabulary, one that was trained for
    another target, and other drafters (`forerun.zoo.is_eagle3`).
    """
    if isinstance(source, str | Path):
        name = f"the head {str(source)!r}"
        is_theirs = is_eagle3(Path(source))
        head = (
            load_eagle3(Path(source), name, target)
            if is_theirs
            else _load_layer(source, name, HiddenDrafter)
        )
    else:
        name, head = "the head", source
    if form is not None and head.config.kind != form:
        raise ValueError(f"{name} is of the kind {head.config.kind!r}; the method needs {form!r}")
    if isinstance(head, Eagle3Head):
        _check_eagle3(head, name, target)
    elif not same_model(head.config.target, target.fingerprint):
        trained = head.config.recipe.get("target")
        raise ValueError(
            f"{name} belongs to another target: it was trained for {trained!r}; train one for this model"
        )
    known = (
        target.vocab_size
        if isinstance(head, Eagle3Head)
        else min(head.config.vocab_size, target.vocab_size)
    )
    hot = head.hot.tolist()
    if len(set(hot)) < len(hot) or not all(0 <= token < known for token in hot):
        raise ValueError(
            f"{name} has a hot set that does not fit the target's vocabulary of {target.vocab_size}"
        )
    return nn.Module.to(head, target.device).eval()


def load_eagle3(folder: Path, name: str, target: CausalLM) -> Eagle3Head:
    """Load an EAGLE-3 head that others published, for a target. Raises ValueError for what is missing or unsupported
    and for a head of another target."""
    path = config_file(folder, name)
    with loading(f"{name}: config.json"):
        settings = json.loads(path.read_text())
    with loading(name):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError("there is no model.safetensors")
        found = {
            own_name(stored): each for file in files for stored, each in load_file(file).items()
        }
        weights = {own: each for own, each in found.items() if own is not None}
        config = read_config(settings, frozenset(weights), target.config.num_hidden_layers)
        with torch.device("meta"):
            head = Eagle3Head(config)
        _check_shapes(head, {own: tuple(each.shape) for own, each in weights.items()})
        head.load_state_dict(weights, assign=True)
    own, given = head.embed_tokens, target.model.get_input_embeddings()
    if (
        own is not None
        and isinstance(given, nn.Embedding)
        and torch.equal(own.weight.to(given.weight), given.weight)
    ):
        head.embed_tokens = None  # one copy is enough
    return head


def _check_shapes(module: nn.Module, stored: dict[str, tuple[int, ...]]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in sorted(wanted.keys() & stored.keys()):
        if wanted[name] != stored[name]:
            sizes = f"{name} is {list(wanted[name])}, and in its file {list(stored[name])}"
            raise ValueError(f"by its config.json {sizes}")
    if wanted.keys() != stored.keys():
        raise ValueError(
            f"its weights do not fit its configuration ({min(wanted.keys() ^ stored.keys())})"
        )


def _check_eagle3(head: Eagle3Head, name: str, target: CausalLM) -> None:
    size, layer = target.config.hidden_size, head.config.layer
    own = len(head.config.captured) * size, target.vocab_size
    if (found := (head.width, layer.vocab_size)) != own:
        raise ValueError(
            f"{name} belongs to another target: it reads {found[0]} numbers and has a vocabulary of {found[1]}, where "
            f"this target has {own[0]} and {own[1]}"
        )
    decoder_layers(target.model)  # raises if they cannot be told
    if head.embed_tokens is None and layer.hidden_size != size:
        raise ValueError(
            f"{name} has no embeddings, and this target's have {size} numbers, not {layer.hidden_size}"
        )


def config_file(folder: Path, name: str) -> Path:
    """Return the configuration file of a trained layer's folder. Raises ValueError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"cannot load {name}: there is no {path}")
    return path


def _load_layer(source: str | Path, name: str, cls: type[_Layer]) -> _Layer:
    """Load a trained layer of ours from its folder, in float32. Raises ValueError for missing and broken parts."""
    folder, config = Path(source), cast(Any, cls.config_class)
    path = config_file(folder, name)
    check_role(folder, ROLES[config.model_type])
    with loading(f"{name}: config.json"):
        settings = json.loads(path.read_text())
        older = {"heads", "states", "target_size", "token_size", "draft_size"}
        older |= {*RETIRED_LAYER_SETTINGS, *heads.RETIRED_HEAD_SETTINGS}
        known = set(config().to_dict()) | {"architectures", "dtype"} | older
        unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(f"cannot load {name}: config.json has an unknown field {unknown[0]!r}")
    with loading(name):
        made = config(**settings)
        context_of(made)  # raises for too long ones
        if (folder / WEIGHTS).is_file():  # the embedded target's
            stored = cls(made)
            restore(stored, folder)
            return stored
        loaded: Any = cls.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    layer: _Layer = loaded[0]
    found: dict[str, Any] = loaded[1]
    if found["missing_keys"] or found.get("unexpected_keys"):
        first = sorted([*found["missing_keys"], *found["unexpected_keys"]])[0]
        raise ValueError(f"cannot load {name}: its weights do not fit its configuration ({first})")
    return layer
