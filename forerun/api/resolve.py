"""`resolve`: which method, companions and costs a target and what is named beside it stand for. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import methods
from forerun.files import read_text
from forerun.methods import METHODS, Method, Pacer
from forerun.planning.cost_model import Costs, costs_of
from forerun.zoo import FOLDERS, companion, is_eagle3, own_draft, settings_of

if TYPE_CHECKING:
    from forerun.api.options import ModelOptions


def shipped(target: object, draft: object) -> dict[str, Any]:
    """Return what comes with forerun for a target and its own draft, chosen on one machine and validation prompts; {}
    for other models.

    It has {"greedy" or "sampling": {method: {setting: value}}}; "default": the method of each of the two; and "costs"
    of forwards, with which the pair's methods do the same things everywhere.
    """
    is_own = isinstance(target, str) and draft in (None, own_draft(target))
    folder = FOLDERS.get(str(target)) if is_own else None
    path = folder / "tuned.json" if folder is not None else None
    return dict(json.loads(read_text(path))) if path is not None and path.is_file() else {}


@dataclass(frozen=True)
class Resolved:
    """What decodes. Draft, layer and head are folders, names or objects, as they were given or found.

    Attributes:
        draft: None unless a method drafts with a model.
        method: for greedy decoding, and for sampling as well unless `sampling_method` is given.
        pre_verifier, head: None if none was given and no method needs one.
        costs: of forwards, if they are known.
    """

    draft: Any
    method: Method
    sampling_method: Method | None
    pre_verifier: Any
    head: Any
    costs: Costs | None


def resolve(
    target: Any,
    draft: Any = None,
    method: str | Method | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    *,
    pre_verifier: Any = None,
    head: Any = None,
    models: ModelOptions | None = None,
) -> Resolved:
    """Decide what a target is decoded with. Loads no weights.

    A draft, layer or head that is not given is the one that comes with forerun for a target of that name. A method that
    is not named, nor by one of its settings, is that which comes with the target. Otherwise it is "pacer" with a draft
    and its pre-verifier, "sd" with a draft, and "suffix" without; with a head that none of these uses, or whose method
    has the settings, the method of its kind.

    Args:
        target, draft: hub ids, folders, files, or models. Nothing comes with models.
        settings: of the method, by name, or as the command line has them: NAME=VALUE.
        models: how models are loaded. None: what comes with the target is not looked at.

    Raises:
        ValueError: an unknown method or setting; a method without the draft, layer or head that it needs.
    """
    own = own_draft(target)
    draft = own if draft is None else draft
    is_own = isinstance(draft, str) and draft == own
    comes = "lyanna" if draft is None and companion(target, "lyanna") is not None else None
    given = kind_of(head)
    has_layer = pre_verifier is not None or (is_own and companion(target, Pacer.layer) is not None)
    has = draft is not None, has_layer, given or comes
    names = (
        settings if isinstance(settings, Mapping) else [each.partition("=")[0] for each in settings]
    )
    of_head = (
        given if given and names and {*names} <= {*methods.settings_of(METHODS[given])} else None
    )
    name = method or of_head or methods.default_method(*has[:2], names)
    values = settings if isinstance(settings, Mapping) else _parse(name, settings)
    chosen = methods.method(name, **values).resolve_defaults(*has)
    is_named = method is not None or bool(settings)
    sampling: Method | None = None
    costs: Costs | None = None
    ours = shipped(target, draft) if models is not None and models.are_usual else {}
    if ours and (not is_named or chosen.needs_costs):
        costs = costs_of(ours["costs"]) if "costs" in ours else None
        if not is_named and pre_verifier is None and head is None:
            chosen, sampling = (
                _default(ours, mode, chosen).resolve_defaults(*has)
                for mode in ("greedy", "sampling")
            )
    both = [chosen] if sampling is None else [chosen, sampling]
    if given is not None and not is_named and all(each.head is None for each in both):
        both = [methods.method(given)]
    if pre_verifier is None and is_own:
        pre_verifier = companion(target, next((each.layer for each in both if each.layer), None))
    if head is None:
        head = companion(target, next((each.head for each in both if each.head), None))
    if not any(each.needs_draft for each in both):
        draft = None
    for each in both:
        _check(each, draft, pre_verifier, head)
    return Resolved(draft, both[0], both[1] if len(both) > 1 else None, pre_verifier, head, costs)


def _default(ours: Mapping[str, Any], mode: str, other: Method) -> Method:
    name = ours.get("default", {}).get(mode)
    return methods.method(name, **ours.get(mode, {}).get(name, {})) if name is not None else other


def _parse(name: str | Method, texts: Sequence[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in texts]
    for text, (key, equals, _) in zip(texts, pairs, strict=True):
        if not equals or not key:
            raise ValueError(f"--method-arg takes NAME=VALUE, not {text!r}")
    return {key: methods.parse_value(str(name), key, value) for key, _, value in pairs}


def _check(method: Method, draft: Any, pre_verifier: Any, head: Any) -> None:
    if method.needs_draft and draft is None:
        raise ValueError(f"method {method.name!r} needs a draft model: give a draft")
    if method.layer is not None and pre_verifier is None:
        raise ValueError(
            f"method {method.name!r} needs a pre-verifier: train one with `forerun train pre-verifier`"
        )
    if method.head is not None and head is None:
        command = "forerun train lyanna" + (
            "" if method.head == "lyanna" else f" --kind {method.head}"
        )
        raise ValueError(
            f"method {method.name!r} needs a head: give one, or train one with `{command}`"
        )


def kind_of(head: Any) -> str | None:
    """Return the kind of a head. One in a folder that cannot be read is taken for Lyanna's until it is loaded. Raises
    ValueError for a folder of a drafter that is not supported (`forerun.zoo.is_eagle3`)."""
    if head is None:
        return None
    if not isinstance(head, str | Path):
        from forerun.heads.heads import HiddenDrafter

        return str(head.config.kind if isinstance(head, HiddenDrafter) else head.kind)
    if is_eagle3(Path(head)):
        return "eagle"
    kind = settings_of(Path(head)).get("kind")
    return kind if kind in {each.head for each in METHODS.values()} - {None} else "lyanna"
