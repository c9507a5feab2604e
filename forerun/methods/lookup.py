"""Find a method by its name, make it with its settings, and parse settings of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.methods.base import Method
from forerun.methods.model_chain import SD, Pacer
from forerun.methods.suffix import Suffix

# The methods of the package by name. `forerun.methods` fills this in, because `Hybrid`, which is
# one of them, looks others up.
METHODS: dict[str, type[Method]] = {}


def is_method(name: str) -> bool:
    """Return whether `name` is one of METHODS, or has the form "package.module:Class"."""
    return name in METHODS or ":" in name


def method(name: str | Method, /, **options: Any) -> Method:
    """Return the method with this name and these settings.

    "package.module:Class" names a method of another package, or of a file in the working folder. A
    method that is given in place of a name is returned as it is.

    Raises:
        ValueError: an unknown name, or settings that are unknown, out of range or missing.
    """
    if not isinstance(name, str):
        return _given(name, options)
    cls = method_class(name)
    known = settings_of(cls)
    for key in sorted(options):
        if key not in known:
            raise _unknown(name, key, known)
    for field in fields(cls):
        if field.name not in options and _is_required(field):
            raise ValueError(f"method {name!r} needs its setting {field.name!r}")
    return cls(**options)


def _given(given: Method, options: dict[str, Any]) -> Method:
    """Return a method that is given as an object, if it is one."""
    if options:
        raise ValueError(
            f"{given!r} already carries its settings; {sorted(options)} cannot be given beside it"
        )
    if isinstance(given, type):
        raise ValueError(
            f"a method is given with its settings, as {given.__name__}(), not as a class"
        )
    _checked(type(given), repr(given))
    return given


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def method_class(name: str) -> type[Method]:
    """Return the class of a method's name. Raises ValueError for an unknown name."""
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join(METHODS)}, "
            "and others as package.module:Class"
        )
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # the command `forerun` lacks it
        sys.path.append(here)
    try:
        attributes = vars(import_module(module))
    except (ImportError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"method {name!r}: the module {module!r} cannot be imported: {error}"
        ) from error
    if attribute not in attributes:
        raise ValueError(f"method {name!r}: the module {module!r} has no {attribute!r}")
    return _checked(attributes[attribute], repr(name))


def _checked(cls: Any, shown: str) -> type[Method]:
    """Return a class if it is a method's. Raises ValueError, which shows it as `shown`, if not."""
    is_method_class = isinstance(cls, type) and issubclass(cls, Method) and is_dataclass(cls)
    if not (is_method_class and cls.__dataclass_params__.frozen):
        raise ValueError(
            f"{shown} is no method: it must be a frozen dataclass and a subclass of "
            "forerun.methods.Method"
        )
    checked: type[Method] = cls
    return checked


def _unknown(name: str, key: str, known: Iterable[str]) -> ValueError:
    return ValueError(
        f"method {name!r} has no setting {key!r}; it has {', '.join(known) or 'none'}"
    )


def settings_of(cls: type[Method]) -> dict[str, str]:
    """Return {setting: type} of a method."""
    assert is_dataclass(cls)
    types: dict[str, str] = {}
    for field in fields(cls):
        types[field.name] = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    return types


def parse_value(name: str, key: str, value: str) -> int | float | bool | str | None:
    """Parse a setting from the command line, by the type of its field.

    Raises:
        ValueError: an unknown setting, or a value of another type.
    """
    known = settings_of(method_class(name))
    if key not in known:
        raise _unknown(name, key, known)
    wanted = known[key]
    if wanted.endswith("| None") and value.lower() in ("auto", "none"):
        return None
    try:
        if wanted.startswith("bool"):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if wanted.startswith("int"):
            return int(value)
        if wanted.startswith("float"):
            return float(value)
    except (ValueError, KeyError):
        raise ValueError(f"{name}.{key} must be of type {wanted}, not {value!r}") from None
    return value


def default_method(has_draft: bool, has_layer: bool = False, options: Iterable[str] = ()) -> str:
    """Return the name of the default method; with a layer, of one that has these settings."""
    if has_draft and has_layer and {*options} <= {*settings_of(Pacer)}:
        return Pacer.name
    return SD.name if has_draft else Suffix.name
