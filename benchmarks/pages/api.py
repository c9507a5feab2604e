"""Writes docs/reference/api.md from the docstrings of all names of forerun.

python -m benchmarks.pages.api
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import forerun
from forerun.engine.stats import Stats
from forerun.engine.step import Step

OUT = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
# Names that users meet first.
FIRST = (
    "load",
    "Decoder",
    "SamplingParams",
    "ModelOptions",
    "EngineOptions",
    "Completion",
    "Chunk",
    "custom_generate",
)
# Of these few users need more than the first paragraph, or another page has the rest.
BRIEF = (
    "SamplingParams",
    "ModelOptions",
    "EngineOptions",
    "Chunk",
    "custom_generate",
    "Engine",
    "Request",
    "Stats",
    "Step",
)
FRONT = """# The Python API

Made from the docstrings by `python -m benchmarks.pages.api`. [From Python](../guide/python.md)
has examples. `help(forerun.Engine)`, and so on, tells more than stands here; options of models and
of the engine are also those of [the command line](cli.md), those of sampling are
[the server's](server.md#fields), and [Measure](../guide/measure.md) defines the figures of `Stats`.
"""
WIDTH = 90  # characters of a signature on one line
SECTION = re.compile(r"(Args|Attributes|Raises|Returns):$")
ITEM = re.compile(r"(\S[^:]*): (.*)")


def page() -> str:
    """Return the page: the names of `forerun.__all__`, then the classes that they return."""
    names = [*FIRST, *(name for name in forerun.__all__ if name not in FIRST)]
    entries = [entry(name, getattr(forerun, name)) for name in names]
    entries += [entry(cls.__name__, cls) for cls in (Stats, Step)]
    return "\n".join([FRONT, *entries]).rstrip() + "\n"


def entry(name: str, value: Any) -> str:
    """Return a function, or a class with its own public methods and properties.

    Properties that one line describes are a list of their names, because these say as much.
    """
    lines = [f"## `{name}`", "", signature(name, value), ""]
    if name in BRIEF:
        return "\n".join([*lines, text(value).partition("\n\n")[0], ""])
    lines += [text(value), ""]
    if not inspect.isclass(value):
        return "\n".join(lines)
    init = vars(value).get("__init__")
    if init is not None and init.__doc__:
        lines += [text(init), ""]
    plain: list[str] = []
    for key, member in vars(value).items():
        is_property = isinstance(member, property)
        function = member.fget if is_property else member
        if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if is_property and "\n" not in function.__doc__:
            plain.append(f"`{key}`")
            continue
        lines += [f"### `{name}.{key}`", ""]
        if not is_property:
            lines += [signature(f"{name}.{key}", function), ""]
        lines += [text(function), ""]
    if plain:
        lines += [f"Further properties: {', '.join(plain)}.", ""]
    return "\n".join(lines)


def signature(name: str, function: Any) -> str:
    """Return the name with its arguments, in a block: on one line, or an argument a line."""
    parameters = inspect.signature(function).parameters.values()
    arguments = [argument(parameter) for parameter in parameters if parameter.name != "self"]
    line = f"{name}({', '.join(arguments)})"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in arguments), ")"])
    return f"```text\n{line}\n```"


def argument(parameter: inspect.Parameter) -> str:
    """Return a parameter with its default, without its type, which the text gives."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is parameter.empty:
        return stars + parameter.name
    default = repr(parameter.default)
    return f"{stars}{parameter.name}={'...' if default.startswith('<') else default}"


def text(documented: Any) -> str:
    """Return a docstring as Markdown, whose sections are lists."""
    lines: list[str] = []
    in_section = False
    for line in (inspect.getdoc(documented) or "").splitlines():
        section = SECTION.match(line)
        item = ITEM.match(line.removeprefix("    "))
        if section:
            lines += [f"**{section[1]}**", ""]
            in_section = True
        elif not line or not in_section:
            lines.append(line)
            in_section = False
        elif item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append("  " * lines[-1].startswith(("-", " ")) + line.strip())
    return "\n".join(lines).strip()


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
