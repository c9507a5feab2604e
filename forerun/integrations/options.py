"""What users may set of the proposer for vLLM, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from forerun import methods
from forerun.kinds import check_kind
from forerun.methods import Method

DRAFTLESS = ("suffix",)
WITH_DRAFT = ("sd", "confidence", "cumulative", "ouroboros")
WITH_LAYER = ("pacer", "pacer-ouroboros")
PARTS = ("method", "draft", "pre_verifier", "draft_weights", "device")


@dataclass(frozen=True)
class Options:
    """What a proposer drafts by. `draft` is a folder, hub id or GGUF file, `pre_verifier` a folder."""

    method: Method
    draft: str | None = None
    pre_verifier: str | None = None
    draft_weights: str | None = "auto"
    device: str | None = None


def read(given: Any) -> Options:
    """The options of a mapping: those in PARTS, and settings of the method.

    The default method is "suffix" without a draft, "cumulative" with one, and "pacer" with a pre-verifier beside it.
    Raises ValueError, naming what is unknown, missing or out of range.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config['forerun'] must be an object of settings, not {given!r}")
    settings = {key: value for key, value in given.items() if key not in PARTS}
    parts: dict[str, Any] = {key: given[key] for key in PARTS[1:] if given.get(key) is not None}
    for key, value in parts.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a name, not {value!r}")
    check_kind(parts.get("draft_weights"))
    drafting, layered = "draft" in parts, "pre_verifier" in parts
    name = given.get("method") or ("pacer" if layered else "cumulative" if drafting else "suffix")
    known = (*DRAFTLESS, *WITH_DRAFT, *WITH_LAYER)
    if name not in known:
        raise ValueError(
            f"method {name!r} is not for vLLM, which verifies chains of tokens; there are {', '.join(known)}"
        )
    if drafting != (name not in DRAFTLESS):
        raise ValueError(f"method {name!r} " + ("takes no draft" if drafting else "needs a draft: give draft=FOLDER"))
    if layered != (name in WITH_LAYER):
        raise ValueError(
            f"method {name!r} "
            + ("takes no pre_verifier" if layered else "needs a pre_verifier: give pre_verifier=FOLDER")
        )
    return Options(_chained(methods.method(name, **settings), settings), **parts)


def _chained(method: Method, settings: Mapping[str, Any]) -> Method:
    """The method without what needs branches, or the target's answers to tokens that it rejected."""
    for key, only in (("width", 1), ("suffixes", 0)):
        if key in settings and settings[key] != only:
            raise ValueError(f"{key} must be {only} in vLLM, which verifies chains of tokens, not {settings[key]!r}")
    if "suffixes" not in [field.name for field in fields(method)]:
        return method
    lost = sorted({"rejected", "suffixes"} & set(str(settings.get("sources", "")).split("+")))
    if lost:
        raise ValueError(f"sources must be of prompt+output in vLLM, not {lost[0]!r}")
    changes: dict[str, Any] = {"suffixes": 0, "sources": settings.get("sources", "prompt+output")}
    return replace(method, **changes)
