"""Rules of style that ruff has not: `CONTRIBUTING.md` gives the reason for each.

As a command it lists what breaks them: python tests/house/test_house.py [FILE or FOLDER ...]
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "forerun"
OUTSIDE = [ROOT / name for name in ("tests", "benchmarks", "examples", "deploy")]
VAGUE = {"found", "own", "each"}
VAGUE_LINES = 2  # a vague name may live this many lines after the one that binds it
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FIELD_MAKERS = {"dataclass", "NamedTuple", "TypedDict", "Protocol", "BaseModel", "Enum"}


def files(*roots: Path) -> list[Path]:
    """Return the Python files of `roots`, which are files or folders."""
    paths = []
    for root in roots or (PACKAGE,):
        paths += sorted(root.rglob("*.py")) if root.is_dir() else [root]
    return paths


def files_outside() -> list[Path]:
    """Return the Python files beside the package: tests, benchmarks, examples and tools."""
    tools = [
        path for path in sorted((ROOT / ".ci").iterdir()) if path.is_file() and is_python(path)
    ]
    return files(*OUTSIDE) + sorted(ROOT.glob("*.py")) + tools


def is_python(path: Path) -> bool:
    """Tell a Python file by its suffix or, as tools of CI have none, by its first line."""
    return path.suffix == ".py" or "python" in path.read_text().partition("\n")[0]


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the descendants of `node`."""
    descendants = ast.walk(node)
    next(descendants)
    return descendants


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the descendants of a function that are not part of a function inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from within(child)


def tuple_assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find several assignments in one statement: three or more, or two that compute something."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        if not any(isinstance(target, ast.Tuple) for target in node.targets):
            continue
        if len(node.value.elts) >= 3:
            yield node.lineno, "a tuple assignment of three or more"
        elif any(isinstance(part, (ast.Call, ast.IfExp)) for part in inside(node.value)):
            yield node.lineno, "a tuple assignment that holds a call or a conditional"


def nested_expressions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find conditional expressions and comprehensions inside one of their own kind."""
    for kind, name in ((ast.IfExp, "conditional expression"), (COMPREHENSIONS, "comprehension")):
        for node in ast.walk(tree):
            if isinstance(node, kind) and any(isinstance(part, kind) for part in inside(node)):
                yield node.lineno, f"a nested {name}"


def self_attributes(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the attributes of `self` that a function assigns."""
    for node in within(function):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.lineno, node.attr


def declared(body: list[ast.stmt]) -> set[str]:
    """Return the names that a class body assigns or annotates."""
    names = set()
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, FUNCTIONS):
            names.add(node.name)
    return names


def late_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find attributes of `self` that neither `__init__` nor the class body makes.

    A class with a base of the same file has its attributes too; one whose bases are elsewhere
    may set what they make, so only names that are assigned nowhere in the file's classes count.
    """
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    made: dict[str, set[str]] = {}
    for name, node in classes.items():
        made[name] = declared(node.body)
        for function in node.body:
            if isinstance(function, FUNCTIONS) and function.name in {"__init__", "__post_init__"}:
                made[name] |= {attribute for _, attribute in self_attributes(function)}

    def ancestry(name: str) -> set[str]:
        known = set(made[name])
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                known |= ancestry(base.id)
        return known

    for name, node in classes.items():
        known = ancestry(name)
        for function in node.body:
            if isinstance(function, FUNCTIONS):
                for line, attribute in self_attributes(function):
                    if attribute not in known:
                        yield line, f"self.{attribute} is born outside __init__"


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find `found`, `own` and `each` that live for more than two lines."""
    for function in ast.walk(tree):
        if not isinstance(function, (*FUNCTIONS, ast.Module)):
            continue
        lines = defaultdict(list)
        stored = set()
        for node in within(function):
            if isinstance(node, ast.Name) and node.id in VAGUE:
                lines[node.id].append(node.lineno)
                if isinstance(node.ctx, ast.Store):
                    stored.add(node.id)
        if isinstance(function, FUNCTIONS):
            arguments = function.args
            for argument in (*arguments.args, *arguments.kwonlyargs):
                if argument.arg in VAGUE:
                    yield argument.lineno, f"an argument named {argument.arg!r}"
        for name in sorted(stored):
            if max(lines[name]) - min(lines[name]) > VAGUE_LINES:
                yield min(lines[name]), f"{name!r} lives for more than {VAGUE_LINES} lines"


Rule = Callable[[ast.Module], Iterator[tuple[int, str]]]
RULES: tuple[Rule, ...] = (tuple_assignments, nested_expressions, late_attributes, vague_names)


def broken(path: Path, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Return what breaks the rules in a file, a line each."""
    tree = ast.parse(path.read_text())
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [f"{shown}:{line}: {what}" for rule in rules for line, what in rule(tree)]


def vague_outside() -> list[str]:
    """Return the vague names of the Python files beside the package, a line each."""
    return [line for path in files_outside() for line in broken(path, (vague_names,))]


def constants(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the constants that a module defines, and their values as source."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.isupper() and not name.startswith("_"):
                yield name, ast.unparse(node.value)


def repeated_constants() -> list[str]:
    """Return the names of constants that two modules define, a line each."""
    homes = defaultdict(list)
    for path in files():
        for name, value in constants(path):
            homes[name].append(f"{path.relative_to(ROOT)} ({value[:40]})")
    return [f"{name}: {', '.join(places)}" for name, places in homes.items() if len(places) > 1]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_keeps_the_rules(path: Path) -> None:
    assert broken(path) == []


def test_no_name_outside_the_package_is_vague() -> None:
    outside = {str(path.relative_to(ROOT)) for path in files_outside()}
    expected = {"conftest.py", ".ci/tidy", "examples/greedy.py", "benchmarks/run.py"}
    assert expected < outside
    assert vague_outside() == []


def test_a_constant_has_one_meaning() -> None:
    assert repeated_constants() == []


BAD = """
a, b, c = 1, 2, 3
a, b = f(), 1
x = 1 if a else 2 if b else 3
y = [z for z in [w for w in a]]
class C:
    def __init__(self):
        self.a = 1
    def late(self):
        self.b = 2
def g(each):
    found = 1
    a = 2
    b = 3
    return found
"""


def test_the_rules_find_what_they_forbid() -> None:
    lines = [line for rule in RULES for line, _ in rule(ast.parse(BAD))]
    assert sorted(lines) == [2, 3, 4, 5, 10, 11, 12]


def test_the_rules_allow_a_swap_and_a_short_loop() -> None:
    good = "a, b = b, a\nfirst, second = pair\nfor each in a:\n    print(each)\n"
    assert not [line for rule in RULES for line in rule(ast.parse(good))]


if __name__ == "__main__":
    problems = [line for path in files(*map(Path, sys.argv[1:])) for line in broken(path)]
    problems += [] if sys.argv[1:] else repeated_constants() + vague_outside()
    print(*problems, sep="\n")
    sys.exit(bool(problems))
