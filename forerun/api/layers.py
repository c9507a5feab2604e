"""Trained layers from their folders, for exactly the models that they were trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

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
from forerun.zoo import ROLE_OF_TYPE, ModelSource, check_role, is_eagle3
from forerun.zoo.quantise import WEIGHTS, restore

_Layer = TypeVar("_Layer", PreVerifier, HiddenDrafter)

# Fields that configurations of earlier versions had.
_OLDER_FIELDS = {
    *("heads", "states", "target_size", "token_size", "draft_size"),
    *RETIRED_LAYER_SETTINGS,
    *heads.RETIRED_HEAD_SETTINGS,
}


def layers_for(
    methods: list[Method],
    target: CausalLM,
    draft: CausalLM | None,
    pre_verifier: str | Path | PreVerifier | ModelSource | None,
    head: str | Path | Head | HiddenLM | ModelSource | None,
) -> tuple[PreVerifier | None, HiddenLM | None]:
    """Return the layer and the head that methods need.

    A layer or head that is given as an object and not needed is kept.

    Raises ValueError for those that do not fit. A missing one is refused before
    (`forerun.api.choose`).
    """
    given_layer = _object(pre_verifier)
    given_head = _object(head)
    layer = given_layer if isinstance(given_layer, PreVerifier) else None
    hidden = given_head if isinstance(given_head, HiddenLM) else None
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


def _object(given: Any) -> Any:
    """Return the object that is given, also as a source."""
    return given.given if isinstance(given, ModelSource) else given


def load_pre_verifier(
    source: str | Path | PreVerifier | ModelSource, target: CausalLM, draft: CausalLM
) -> PreVerifier:
    """Load the trained layer of a folder, for exactly this target and draft.

    Raises ValueError for a missing folder, a file that is missing or broken, a configuration with
    unknown fields, and a layer of an older form or for another target or draft.
    """
    parsed = ModelSource.parse(source, "pre-verifier")
    if parsed.path is None:
        name = "the pre-verifier"
        layer: PreVerifier = parsed.given
    else:
        name = f"the pre-verifier {parsed.name!r}"
        layer = _load_layer(parsed.path, name, PreVerifier)
    for part, model in (("target", target), ("draft", draft)):
        if not same_model(getattr(layer.config, part), model.fingerprint):
            trained = layer.config.recipe.get(part)
            raise ValueError(
                f"{name} belongs to another {part}: it was trained for {trained!r}; "
                "train one for this pair"
            )
    return nn.Module.eval(nn.Module.to(layer, target.device))


def load_head(
    source: str | Path | Head | ModelSource, target: CausalLM, form: str | None = None
) -> Head:
    """Load the head over hidden states of a folder, for exactly this target.

    The head may be of any form (HiddenConfig.kind) unless `form` names one.

    Raises ValueError for a missing folder, a file that is missing or broken, a configuration with
    unknown fields, a head of another form, a hot set that does not fit the vocabulary, a head that
    was trained for another target, and other drafters (`forerun.zoo.is_eagle3`).
    """
    parsed = ModelSource.parse(source, "head")
    name = "the head" if parsed.path is None else f"the head {parsed.name!r}"
    head: Head = parsed.given if parsed.path is None else _read_head(parsed.path, name, target)
    if form is not None and head.config.kind != form:
        raise ValueError(f"{name} is of the kind {head.config.kind!r}; the method needs {form!r}")
    if isinstance(head, Eagle3Head):
        _check_eagle3(head, name, target)
    elif not same_model(head.config.target, target.fingerprint):
        trained = head.config.recipe.get("target")
        raise ValueError(
            f"{name} belongs to another target: it was trained for {trained!r}; "
            "train one for this model"
        )
    _check_hot_set(head, name, target)
    return nn.Module.to(head, target.device).eval()


def _read_head(folder: Path, name: str, target: CausalLM) -> Head:
    if is_eagle3(folder):
        return load_eagle3(folder, name, target)
    return _load_layer(folder, name, HiddenDrafter)


def _check_hot_set(head: Head, name: str, target: CausalLM) -> None:
    """Raise ValueError if hot tokens come twice or are not in the target's vocabulary."""
    vocab_size = target.vocab_size
    if not isinstance(head, Eagle3Head):
        vocab_size = min(head.config.vocab_size, vocab_size)
    hot = head.hot.tolist()
    if len(set(hot)) < len(hot) or not all(0 <= token < vocab_size for token in hot):
        raise ValueError(
            f"{name} has a hot set that does not fit the target's vocabulary of {target.vocab_size}"
        )


def load_eagle3(folder: Path, name: str, target: CausalLM) -> Eagle3Head:
    """Load an EAGLE-3 head that others published, for a target.

    Raises ValueError for what is missing or unsupported, and for a head of another target.
    """
    path = config_file(folder, name)
    with loading(f"{name}: config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
    with loading(name):
        weights = _eagle3_weights(folder)
        config = read_config(settings, frozenset(weights), target.config.num_hidden_layers)
        with torch.device("meta"):
            head = Eagle3Head(config)
        _check_shapes(head, {key: tuple(tensor.shape) for key, tensor in weights.items()})
        head.load_state_dict(weights, assign=True)
    if _is_copy(head.embed_tokens, target.model.get_input_embeddings()):
        head.embed_tokens = None  # the target's are used, so that there is only one copy
    return head


def _is_copy(embedding: nn.Embedding | None, of: nn.Module) -> bool:
    """Return whether embeddings have the same weights as others."""
    if embedding is None or not isinstance(of, nn.Embedding):
        return False
    return torch.equal(embedding.weight.to(of.weight), of.weight)


def _eagle3_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a head's files by our names. Raises ValueError if there is no file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("there is no model.safetensors")
    weights = {}
    for file in files:
        for stored, tensor in load_file(file).items():
            name = own_name(stored)
            if name is not None:
                weights[name] = tensor
    return weights


def _check_shapes(module: nn.Module, stored: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError if stored weights have other names or shapes than a module's."""
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
    """Raise ValueError if a head's sizes are not those of the target."""
    hidden_size = target.config.hidden_size
    layer = head.config.layer
    read_size = len(head.config.captured) * hidden_size
    if (head.width, layer.vocab_size) != (read_size, target.vocab_size):
        raise ValueError(
            f"{name} belongs to another target: it reads {head.width} numbers and has a vocabulary "
            f"of {layer.vocab_size}, where this target has {read_size} and {target.vocab_size}"
        )
    decoder_layers(target.model)  # raises if they cannot be told
    if head.embed_tokens is None and layer.hidden_size != hidden_size:
        raise ValueError(
            f"{name} has no embeddings, and this target's have {hidden_size} numbers, "
            f"not {layer.hidden_size}"
        )


def config_file(folder: Path, name: str) -> Path:
    """Return the configuration file of a trained layer. Raises ValueError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"cannot load {name}: there is no {path}")
    return path


def _load_layer(folder: Path, name: str, cls: type[_Layer]) -> _Layer:
    """Load a trained layer of ours from its folder, in float32.

    Raises ValueError for missing and broken parts.
    """
    config_class = cast(Any, cls.config_class)
    path = config_file(folder, name)
    check_role(folder, ROLE_OF_TYPE[config_class.model_type])
    with loading(f"{name}: config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        known = set(config_class().to_dict()) | {"architectures", "dtype"} | _OLDER_FIELDS
        unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(f"cannot load {name}: config.json has an unknown field {unknown[0]!r}")
    with loading(name):
        config = config_class(**settings)
        context_of(config)  # raises for too long ones
        if (folder / WEIGHTS).is_file():  # one of the layers that ship in few bits
            stored = cls(config)
            restore(stored, folder)
            return stored
        loaded: Any = cls.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    layer: _Layer = loaded[0]
    report: dict[str, Any] = loaded[1]
    misfits = [*report["missing_keys"], *report.get("unexpected_keys", ())]
    if misfits:
        raise ValueError(
            f"cannot load {name}: its weights do not fit its configuration ({min(misfits)})"
        )
    return layer
