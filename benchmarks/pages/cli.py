"""Writes docs/reference/cli.md from the commands and their options.

python -m benchmarks.pages.cli
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import typer
from typer.main import get_command

from forerun.cli.commands import app
from forerun.cli.options import DecodeOptions, LoadOptions

OUT = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
FRONT = """# The command line

Made from the code by `python -m benchmarks.pages.cli`. `forerun COMMAND --help` says the same. A
user's mistake gives one line on stderr and the exit status 2. Options that several commands share
stand at the end: those of [loading](#loading), [decoding](#decoding) and [training](#training).
"""
Command = typer.main.TyperCommand | typer.main.TyperGroup
Option = tuple[str, str]  # its names, and what stands beside them


@dataclass(frozen=True)
class Group:
    """Options that several commands share, by the names of their parameters."""

    title: str
    options: Mapping[str, Option]


def page() -> str:
    """Return the page: each command with its own options, then those that are shared."""
    commands = dict(walk(get_command(app), "forerun"))
    serve = options(commands["forerun serve"])
    loading = {field.name for field in fields(LoadOptions)}
    decoding = {field.name for field in fields(DecodeOptions)} - loading
    trainings = [
        options(command).items()
        for name, command in commands.items()
        if name.startswith("forerun train ")
    ]
    in_all = set.intersection(*map(set, trainings))
    groups = (
        Group("Loading", {name: option for name, option in serve.items() if name in loading}),
        Group("Decoding", {name: option for name, option in serve.items() if name in decoding}),
        Group("Training", dict(pair for pair in trainings[0] if pair in in_all)),
    )
    lines = [FRONT]
    for name, command in commands.items():
        lines += section(name, command, groups)
    for group in groups:
        lines += [f"## {group.title}", "", *table(list(group.options.values())), ""]
    return "\n".join(lines).rstrip() + "\n"


def walk(command: Command, name: str) -> Iterator[tuple[str, Command]]:
    """Yield the commands with their whole names, in the order of `forerun --help`."""
    parts = getattr(command, "commands", None)
    if parts is None:
        yield name, command
        return
    for part, inner in parts.items():
        yield from walk(inner, f"{name} {part}")


def section(name: str, command: Command, groups: tuple[Group, ...]) -> list[str]:
    """Return the section of a command."""
    arguments = [
        parameter for parameter in command.params if parameter.param_type_name == "argument"
    ]
    given = " ".join(usage(parameter) for parameter in arguments)
    has = options(command)
    taken = [group for group in groups if group.options.items() <= has.items()]
    shared = {name for group in taken for name in group.options}
    own = [option for name, option in has.items() if name not in shared]
    lines = [f"## `{' '.join([name, given]).strip()}`", "", prose(command.help), ""]
    lines += [*table(own), ""] if own else []
    if taken:
        links = " and ".join(f"[{group.title.lower()}](#{group.title.lower()})" for group in taken)
        lines += [f"It also takes the options of {links}.", ""]
    return lines


def usage(argument: typer.core.TyperArgument) -> str:
    """Return an argument as a usage line shows it."""
    name = (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def options(command: Command) -> dict[str, Option]:
    """Return the options of a command by the names of their parameters, without `--help`."""
    return {
        parameter.name: (names(parameter), described(parameter))
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    }


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
