"""The snippets of README and of the guides run as they stand.

A block of `sh` is run line by line in a folder with tiny models, and so is a block of `python`, all
blocks of a page as one program. Names of models that are fetched stand for a tiny model here. A
block whose first line is a comment that begins with one of HEAVY is not run, because of what the
comment says: of a `forerun` command the test checks the options, of Python the syntax. Blocks of
`python` that need a server run against one of this process.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from forerun.cli.commands import app
from tests.support import commands, ggufs
from tests.support.serving import client_of, live
from tests.support.toys import noisy_copy, save_lines

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "explain").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAVY = ("# fetches ", "# needs ", "# takes ")
NEEDS_SERVER = "# needs a running server"
# Blocks that show a form or an output, which nobody runs.
SHOWN = {"json", "text", "yaml", "c"}
FETCHED = {"qwen-coder", "smollm2"}
LIKE_BENCH = {"benchmarks.peers.bench", "benchmarks.quality.logits"}  # take its options
OTHER_PROGRAMS = {".", "cat", "cd", "curl", "docker", "git", "hf", "npm", "pip", "split", "tar"}
OTHER_PROGRAMS |= {"claude", "nice", "open-webui", "python3"}


@dataclass(frozen=True)
class Block:
    page: Path
    number: int
    language: str
    text: str

    @property
    def is_heavy(self) -> bool:
        return self.text.startswith(HEAVY)

    def __str__(self) -> str:
        return f"{self.page.name}-{self.number}"


def blocks_of(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(page, number, *parts) for number, parts in enumerate(found)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def in_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without redirections."""
    lines = block.text.replace("\\\n", " ")
    for line in lines.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
        lexer.whitespace_split = True
        command: list[str] = []
        skips = False
        for word in lexer:
            if word in ("&&", "|", ";", "||"):
                yield command
                command = []
            elif word.startswith((">", "<")):
                skips = True
            elif skips:
                skips = False
            else:
                command.append(word)
        if command:
            yield command


@cache
def root_command() -> typer.core.TyperGroup:
    return get_command(app)


def check_forerun(arguments: list[str]) -> None:
    """Parse the arguments of `forerun` without running it. Raises for what is not allowed."""
    command = root_command()
    names = []
    while hasattr(command, "commands"):
        name = arguments[0]
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
        arguments = arguments[1:]
        names.append(name)
    command.make_context(" ".join(names), list(arguments))


def check_python(arguments: list[str]) -> None:
    """Check that a script is there, and that it knows the options it is given."""
    module, *options = arguments[1:] if arguments[0] == "-m" else arguments
    path = ROOT / (module if module.endswith(".py") else module.replace(".", "/") + ".py")
    if not path.is_file():
        path = path.with_suffix("") / "__main__.py"
    assert path.is_file(), f"no such script: {path}"
    if module in LIKE_BENCH:
        check_forerun(["bench", *options])
        return
    source = path.read_text(encoding="utf-8")
    for option in options:
        if option.startswith("--"):
            # argparse has the option's name, and typer the name of a parameter.
            name = option.partition("=")[0]
            parameter = rf"\b{name[2:].replace('-', '_')}\b *:"
            assert f'"{name}"' in source or re.search(parameter, source), f"{path} has no {name}"


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def check(command: list[str]) -> None:
    """Check a command that is not run here."""
    while re.match(r"\w+=", command[0]):  # variables before a command
        command = command[1:]
    program = Path(command[0]).name if command[0].startswith(".venv") else command[0]
    if program == "forerun":
        check_forerun(command[1:])
    elif program == "python":
        check_python(command[1:])
    elif program == "make":
        assert {word for word in command[1:] if "=" not in word} <= make_targets()
    else:
        assert program in OTHER_PROGRAMS or (ROOT / program).is_file(), f"unknown: {program}"
    if program == "pip" and "." in command[-1][:1]:
        asked = re.findall(r"\[(.*)\]", command[-1])
        assert {name for part in asked for name in part.split(",")} <= extras()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that snippets name."""
    place = tmp_path_factory.mktemp("snippets")
    model = ggufs.small(max_position_embeddings=2048)
    ggufs.write(place / "model.gguf", model, "Q8_0")
    for name, saved in (("my-model", model), ("my-small-model", noisy_copy(model, 0.02))):
        (place / name).mkdir()
        ggufs.write(place / name / "model.gguf", saved, "Q8_0")
    for name in ("prompt.txt", "letter.txt", "long.txt"):
        (place / name).write_text("the cow and the hen 123 " * 12)
    save_lines(place / "prompts.jsonl", [{"prompt": "the cow"}, {"prompt": "the hen"}])
    save_lines(place / "requests.jsonl", [{"prompt": "the", "max_tokens": 4}])
    (place / "again.py").write_text(again())
    return place


def again() -> str:
    """Return the file of "Add a method", as the guide has it."""
    blocks = blocks_of(ROOT / "docs" / "guide" / "add-a-method.md")
    return next(block.text for block in blocks if block.text.startswith("# again.py"))


def with_tiny_models(words: list[str]) -> list[str]:
    return ["./my-model" if word in FETCHED else word for word in words]


@pytest.mark.parametrize("block", in_language("sh"), ids=str)
def test_commands_are_right(block: Block) -> None:
    for command in commands_of(block):
        check(command)


@pytest.mark.parametrize(
    "block", [block for block in in_language("sh") if not block.is_heavy], ids=str
)
def test_commands_run(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for command in commands_of(block):
        if Path(command[0]).name != "forerun":
            continue
        arguments = with_tiny_models(command[1:])
        if arguments[0] in ("generate", "chat", "batch") and "--target" not in arguments:
            arguments += ["--target", "./my-model"]
        if arguments[0] == "chat" and len(arguments) < 4:
            arguments.insert(1, "the cow")  # a conversation would wait for a terminal
        done = commands.run(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)


def programs() -> dict[str, str]:
    """Return the program of each page that has one: its blocks one after the other."""
    pages: dict[str, list[str]] = {}
    for block in in_language("python"):
        if not block.is_heavy:
            pages.setdefault(block.page.name, []).append(block.text)
    return {page: "\n".join(parts) for page, parts in pages.items()}


@pytest.mark.parametrize("page", programs())
def test_python_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    program = programs()[page]
    for name in FETCHED:
        program = program.replace(f'"{name}"', '"./my-model"')
    done = commands.run(program=program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_python_is_written_well(block: Block) -> None:
    compile(block.text, str(block), "exec")
    assert max(len(line) for line in block.text.splitlines()) <= 100


def test_clients_run(folder: Path) -> None:
    blocks = [block for block in in_language("python") if block.text.startswith(NEEDS_SERVER)]
    assert blocks
    with live() as server, client_of(server) as client:
        program = "\n".join(block.text for block in blocks)
        program = program.replace('"smollm2"', '"tiny"').replace('"qwen-coder"', '"tiny"')
        program = re.sub(r"client = OpenAI\(.*\)", "", program)
        exec(compile(program, "snippets", "exec"), {"client": client})


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in SHOWN | {"sh", "python"}, textwrap.shorten(block.text, 60)
    if block.language == "json":
        for line in block.text.splitlines():
            if not line.rstrip().endswith(("...", "}, ...")) and "..." not in line:
                json.loads(line)
