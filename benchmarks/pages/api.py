"""Writes docs/api.md from the docstrings of what `import forerun` gives, and of what these names return.

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

OUT = Path(__file__).parents[2] / "docs" / "api.md"
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
FRONT = """# The Python API

Made from the docstrings by `python -m benchmarks.pages.api`. [python.md](python.md) has examples.
"""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns):$")
ITEM = re.compile(r"(\S[^:]*): (.*)")


def page() -> str:
    """The page: names of `forerun.__all__`, those that users meet first before the others, then what they hold."""
    names = [*FIRST, *(name for name in forerun.__all__ if name not in FIRST)]
    parts = [entry(name, getattr(forerun, name)) for name in names]
    parts += [entry(each.__name__, each) for each in (Stats, Step)]
    return "\n".join([FRONT, *parts]).rstrip() + "\n"


def entry(name: str, each: Any) -> str:
    """A class with its own public methods and properties, or a function."""
    if not inspect.isclass(each):
        return f"## {signed(name, each)}\n\n{text(each)}\n"
    lines = [f"## {signed(name, each)}", "", text(each), ""]
    made = vars(each).get("__init__")
    if made is not None and made.__doc__:
        lines += [text(made), ""]
    for key, value in vars(each).items():
        found = value.fget if isinstance(value, property) else value
        if key.startswith("_") or not inspect.isfunction(found) or not found.__doc__:
            continue
        title = f"`{name}.{key}`" if isinstance(value, property) else signed(f"{name}.{key}", found)
        lines += [f"### {title}", "", text(found), ""]
    return "\n".join(lines)


def signed(name: str, each: Any) -> str:
    """The name with its arguments, as code."""
    return f"`{name}({', '.join(map(argument, inspect.signature(each).parameters.values()))})`".replace(
        "(self, ", "("
    ).replace("(self)", "()")


def argument(each: inspect.Parameter) -> str:
    """A parameter with its default, without its type, which the text gives."""
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    default = each.default
    shown = "..." if repr(default).startswith("<") else repr(default)
    return f"{stars}{each.name}" + ("" if default is each.empty else f"={shown}")


def text(each: Any) -> str:
    """A docstring as Markdown: its sections are lists."""
    lines, in_section = [], False
    for line in (inspect.getdoc(each) or "").splitlines():
        if found := SECTION.match(line):
            lines += [f"**{found[1]}**", ""]
            in_section = True
        elif not line or not in_section:
            lines.append(line)
            in_section = False
        elif found := ITEM.match(line.removeprefix("    ")):
            lines.append(f"- `{found[1]}`: {found[2]}")
        else:
            lines.append("  " * lines[-1].startswith(("-", " ")) + line.strip())
    return "\n".join(lines).strip()


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
