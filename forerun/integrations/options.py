"""Settings of the proposer for vLLM, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from forerun import methods
from forerun.kinds import check_kind
from forerun.methods import Method

METHODS: dict[str, tuple[str, ...]] = {  # and the models that each needs
    "suffix": (),
    **dict.fromkeys(("sd", "confidence", "cumulative", "ouroboros"), ("draft",)),
    **dict.fromkeys(("pacer", "pacer-ouroboros"), ("draft", "pre_verifier")),
}
NAMES = ("draft", "pre_verifier", "draft_weights", "device")


@dataclass(frozen=True)
class Options:
    """How a proposer drafts. `draft` is a folder, hub id or GGUF file, `pre_verifier` a folder."""

    method: Method
    draft: str | None = None
    pre_verifier: str | None = None
    draft_weights: str | None = "auto"
    device: str | None = None


def read(given: Any) -> Options:
    """Return the options of a mapping: the method's name, those in NAMES, and settings of the method.

    The default method is "suffix", with a draft "cumulative", and with a pre-verifier "pacer". Raises ValueError that
    names what is unknown, missing or out of range.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config['forerun'] must be an object of settings, not {given!r}")
    settings = {key: value for key, value in given.items() if key not in ("method", *NAMES)}
    named: dict[str, Any] = {key: given[key] for key in NAMES if given.get(key) is not None}
    for key, value in named.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a name, not {value!r}")
    check_kind(named.get("draft_weights"))
    default = "pacer" if "pre_verifier" in named else "cumulative" if "draft" in named else "suffix"
    name = given.get("method") or default
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"method {name!r} is not for vLLM, which verifies chains of tokens; there are {known}")
    for model in ("draft", "pre_verifier"):
        if model in METHODS[name] and model not in named:
            raise ValueError(f"method {name!r} needs a {model}: give {model}=FOLDER")
        if model in named and model not in METHODS[name]:
            raise ValueError(f"method {name!r} takes no {model}")
    return Options(_chain_only(methods.method(name, **settings), settings), **named)


def _chain_only(method: Method, settings: Mapping[str, Any]) -> Method:
    """Return the method without branches, and without phrases from the target's answers to rejected tokens."""
    for key, only in (("width", 1), ("suffixes", 0)):
        if settings.get(key, only) != only:
            raise ValueError(f"{key} must be {only} in vLLM, which verifies chains of tokens, not {settings[key]!r}")
    if "suffixes" not in [field.name for field in fields(method)]:
        return method
    sources = str(settings.get("sources", "prompt+output"))
    lost = sorted({"rejected", "suffixes"} & set(sources.split("+")))
    if lost:
        raise ValueError(f"sources must be of prompt+output in vLLM, not {lost[0]!r}")
    changes: dict[str, Any] = {"suffixes": 0, "sources": sources}
    return replace(method, **changes)
