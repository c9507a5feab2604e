"""The methods, one file each: settings, stop rule and drafter. METHODS has them by name.

Importing this does not import torch, so that the command line refuses a bad setting at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

from forerun.methods.ar import AR
from forerun.methods.base import Method, Parts
from forerun.methods.chain import SD
from forerun.methods.confidence import Confidence, Cumulative
from forerun.methods.eagle import Eagle, PacerEagle
from forerun.methods.hybrid import Hybrid
from forerun.methods.lyanna import Lyanna, PacerLyanna
from forerun.methods.ouroboros import Ouroboros, PacerOuroboros
from forerun.methods.pacer import Pacer
from forerun.methods.suffix import Suffix

__all__ = ["METHODS", "Method", "Parts", "method"]

_OWN: tuple[type[Method], ...] = (AR, SD, Pacer, Suffix, Hybrid, Ouroboros, PacerOuroboros)
_OWN += (Lyanna, PacerLyanna, Eagle, PacerEagle, Confidence, Cumulative)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in _OWN}


def is_method(name: str) -> bool:
    """Return whether `name` is one of METHODS, or another package's method as "package.module:Class"."""
    return name in METHODS or ":" in name


def method(name: str | Method, /, **options: Any) -> Method:
    """Return the method with this name and these settings. "package.module:Class" names one of another package, or of a
    file in the working folder.

    Raises ValueError for an unknown name, and for settings that are unknown, out of range or missing.
    """
    if not isinstance(name, str):
        if options:
            raise ValueError(
                f"{name!r} already carries its settings; {sorted(options)} cannot be given beside it"
            )
        if isinstance(name, type):
            raise ValueError(
                f"a method is given with its settings, as {name.__name__}(), not as a class"
            )
        _check(type(name), repr(name))
        return name
    cls = method_class(name)
    known = settings_of(cls)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise _unknown(name, unknown[0], known)
    for field in fields(cls):
        if (
            field.name not in options
            and field.default is MISSING
            and field.default_factory is MISSING
        ):
            raise ValueError(f"method {name!r} needs its setting {field.name!r}")
    return cls(**options)


def method_class(name: str) -> type[Method]:
    """Return the class of a method's name. Raises ValueError for an unknown name."""
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join(METHODS)}, and others as package.module:Class"
        )
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # the command `forerun` lacks it
        sys.path.append(os.getcwd())
    try:
        found = vars(import_module(module))
    except (ImportError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"method {name!r}: the module {module!r} cannot be imported: {error}"
        ) from error
    if attribute not in found:
        raise ValueError(f"method {name!r}: the module {module!r} has no {attribute!r}")
    return _check(found[attribute], repr(name))


def _check(cls: Any, shown: str) -> type[Method]:
    is_method_class = isinstance(cls, type) and issubclass(cls, Method) and is_dataclass(cls)
    if not (is_method_class and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ValueError(
            f"{shown} is no method: it must be a frozen dataclass and a subclass of forerun.methods.Method"
        )
    return cls


def _unknown(name: str, key: str, known: Iterable[str]) -> ValueError:
    return ValueError(
        f"method {name!r} has no setting {key!r}; it has {', '.join(known) or 'none'}"
    )


def settings_of(cls: type[Method]) -> dict[str, str]:
    """Return {setting: type} of a method."""
    assert is_dataclass(cls)
    return {
        field.name: field.type.__name__ if isinstance(field.type, type) else str(field.type)
        for field in fields(cls)
    }


def parse_value(name: str, key: str, value: str) -> int | float | bool | str | None:
    """Parse a setting from the command line, by the type of its field."""
    known = settings_of(method_class(name))
    if key not in known:
        raise _unknown(name, key, known)
    wanted = known[key]
    if wanted.endswith("| None") and value.lower() in ("auto", "none"):
        return None
    try:
        if wanted.startswith("bool"):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return (
            int(value)
            if wanted.startswith("int")
            else float(value)
            if wanted.startswith("float")
            else value
        )
    except (ValueError, KeyError):
        raise ValueError(f"{name}.{key} must be of type {wanted}, not {value!r}") from None


def default_method(has_draft: bool, has_layer: bool = False, options: Iterable[str] = ()) -> str:
    """Return the name of the default method; with a layer, of one that has these settings."""
    if has_draft and has_layer and {*options} <= {*settings_of(Pacer)}:
        return Pacer.name
    return SD.name if has_draft else Suffix.name
