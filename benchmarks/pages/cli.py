"""Writes docs/reference/cli.md from the commands and their options.

python -m benchmarks.pages.cli
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.main import get_command

from forerun.cli.commands import app

OUT = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
SHARED_BY = 3  # commands from which on an option is described once, at the page's end
FRONT = """# The command line

Made from the code by `python -m benchmarks.pages.cli`. `forerun COMMAND --help` says the same. A
user's mistake gives one line on stderr and the exit status 2. Options that several commands share
stand at [the end](#shared-options).
"""
Command = typer.main.TyperCommand | typer.main.TyperGroup
Option = tuple[str, str]  # its names, and what stands beside them


def page() -> str:
    """Return the page: each command with its own options, then those that are shared."""
    commands = dict(walk(get_command(app), "forerun"))
    uses = Counter(option for command in commands.values() for option in options(command))
    shared = [option for option, count in uses.items() if count >= SHARED_BY]
    lines = [FRONT]
    for name, command in commands.items():
        lines += section(name, command, set(shared))
    lines += ["## Shared options", "", *table(shared)]
    return "\n".join(lines).rstrip() + "\n"


def walk(command: Command, name: str) -> Iterator[tuple[str, Command]]:
    """Yield the commands with their whole names, in the order of `forerun --help`."""
    parts = getattr(command, "commands", None)
    if parts is None:
        yield name, command
        return
    for part, inner in parts.items():
        yield from walk(inner, f"{name} {part}")


def section(name: str, command: Command, shared: set[Option]) -> list[str]:
    """Return the section of a command."""
    arguments = [
        parameter for parameter in command.params if parameter.param_type_name == "argument"
    ]
    given = " ".join(usage(parameter) for parameter in arguments)
    own = [option for option in options(command) if option not in shared]
    common = [names for names, _ in options(command) if (names, _) in shared]
    lines = [f"## `{' '.join([name, given]).strip()}`", "", prose(command.help), ""]
    lines += [*table(own), ""] if own else []
    if common:
        lines += [f"It also takes {', '.join(common)}.", ""]
    return lines


def usage(argument: typer.core.TyperArgument) -> str:
    """Return an argument as a usage line shows it."""
    name = (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def options(command: Command) -> list[Option]:
    """Return the options of a command, without `--help`."""
    return [
        (names(parameter), described(parameter))
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]


def names(parameter: typer.core.TyperOption) -> str:
    """Return the names of an option."""
    given = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in given)


def described(parameter: typer.core.TyperOption) -> str:
    """Return the help of an option, with its default where it has one that says something."""
    text = prose(parameter.help)
    default = parameter.default
    says_default = "default" in text.lower() or default in (None, False, True, "", ())
    if says_default or callable(default) or parameter.required:
        return text
    return f"{text} Default: `{default}`."


def prose(text: str | None) -> str:
    """Return a help text in one line that Markdown leaves as it is."""
    line = " ".join((text or "").replace("\f", " ").split())
    return line.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def table(rows: list[Option]) -> list[str]:
    """Return the table of options."""
    return ["| option | what it does |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
