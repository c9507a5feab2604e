"""Writes docs/reference/methods.md from the methods, their settings and their docstrings.

python -m benchmarks.pages.methods
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

from forerun.methods import METHODS, Method, settings_of

OUT = Path(__file__).parents[2] / "docs" / "reference" / "methods.md"
FRONT = """# Methods and settings

Made from the code by `python -m benchmarks.pages.methods`. `--method NAME` chooses a method and
`--method-arg NAME=VALUE` a setting; in Python both are arguments of `forerun.load`. A default of
`auto` is found from what forwards cost on your machine.
[Choose a method](../guide/choose-a-method.md) says which to take, and
[Methods and their papers](../explain/methods.md) how each one works.
"""
TABLE = ["| method | what it does | needs |", "|---|---|---|"]
PARTS = {"pre-verifier": "Pacer's layer", "lyanna": "a head", "eagle": "an EAGLE-like head"}


def page() -> str:
    """Return the page: a table of all methods, then the settings of each."""
    rows = [
        f"| [`{name}`](#{name}) | {title(cls)} | {needs(cls)} |" for name, cls in METHODS.items()
    ]
    lines = [FRONT, *TABLE, *rows, ""]
    for name, cls in METHODS.items():
        lines += [f"## `{name}`", "", inspect.getdoc(cls) or "", "", *settings(cls), ""]
    return "\n".join(lines).rstrip() + "\n"


def title(cls: type[Method]) -> str:
    """Return the first sentence of a method's docstring."""
    return (inspect.getdoc(cls) or "").split("\n")[0].rstrip(".")


def needs(cls: type[Method]) -> str:
    """Return what a method needs beside the target."""
    parts = ["a draft model"] if cls.needs_draft else []
    parts += [PARTS[part] for part in (cls.layer, cls.head) if part is not None]
    return " and ".join(parts)


def settings(cls: type[Method]) -> list[str]:
    """Return the table of a method's settings."""
    types = settings_of(cls)
    rows = []
    for field in fields(cls):
        default = "auto" if field.default is None else field.default
        allowed = field.metadata.get("what", types[field.name])
        rows.append(f"| `{field.name}` | `{default}` | {allowed} |")
    return ["| setting | default | allowed |", "|---|---|---|", *rows] if rows else []


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
