"""The methods by name: settings as frozen dataclasses, checked where they are made.

Importing this needs no torch, so that the command line can refuse a bad setting at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from forerun.methods.chains import (
    AR,
    SD,
    SVIP,
    AdaEDL,
    Confidence,
    Cumulative,
    Heuristic,
    Lookup,
    Oracle,
    Pacer,
    SeeingOracle,
    SpecDec,
)
from forerun.methods.hidden import Eagle, Lyanna, Medusa, PacerEagle, PacerLyanna
from forerun.methods.phrases import Lookahead, Ouroboros, PacerOuroboros
from forerun.methods.settings import Parts, Settings
from forerun.methods.suffix import Hybrid, Suffix

__all__ = ["Parts", "Settings"]

Method = (
    AR
    | SD
    | Pacer
    | SpecDec
    | Lookup
    | Suffix
    | Hybrid
    | Ouroboros
    | PacerOuroboros
    | Lookahead
    | Lyanna
    | PacerLyanna
    | Eagle
    | PacerEagle
    | Medusa
    | Heuristic
    | Confidence
    | Cumulative
    | SVIP
    | AdaEDL
    | Oracle
    | SeeingOracle
)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in get_args(Method)}
GONE = (("rho", 1.0),)  # settings that there were, with the values that changed nothing


def method(name: str | Method, /, **options: Any) -> Method:
    """The method of that name with these settings; raises ValueError naming what is unknown or out of range."""
    if not isinstance(name, str):
        if options:
            raise ValueError(f"{name!r} already carries its settings; {sorted(options)} cannot be given beside it")
        return name
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    known = [field.name for field in fields(METHODS[name])]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"method {name!r} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return METHODS[name](**options)


def still_there(settings: dict[str, Any]) -> dict[str, Any]:
    """A file's settings of a method, without those that are gone where these changed nothing."""
    return {key: value for key, value in settings.items() if (key, value) not in GONE}


def parse_value(name: str, key: str, value: str) -> int | float | bool | str | None:
    """A setting from the command line, by the type of its field."""
    types = [str(field.type) for field in fields(METHODS[name]) if field.name == key]
    if not types:
        method(name, **{key: value})  # raises with the settings there are
    wanted = types[0]
    if wanted.endswith("| None") and value.lower() in ("auto", "none"):
        return None
    try:
        if wanted.startswith("bool"):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return int(value) if wanted.startswith("int") else float(value) if wanted.startswith("float") else value
    except (ValueError, KeyError):
        raise ValueError(f"{name}.{key} must be of type {wanted}, not {value!r}") from None


def default_method(has_draft: bool, has_layer: bool = False, options: Iterable[str] = ()) -> str:
    """The method where none is named: one that has these settings, as `sd` and `lookup` have `gamma`."""

    def takes(method: type[Method]) -> bool:
        return {*options} <= {field.name for field in fields(method)}

    if has_draft:
        return PacerOuroboros.name if has_layer and takes(PacerOuroboros) else SD.name
    return Lookup.name if takes(Lookup) and not takes(Suffix) else Suffix.name
