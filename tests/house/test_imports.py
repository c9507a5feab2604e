"""The direction of imports, and that what must be quick to import needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forerun

ROOT = Path(forerun.__file__).parent
# Folders and the files in the package's root, lowest first. Each may import what stands before it.
ORDER = [
    *("failures", "files", "garbage", "heap", "kinds", "control_groups", "csrc"),
    *("sampling", "text", "engine", "planning", "model", "zoo", "heads", "backends"),
    *("methods", "drafters", "api"),
    *("train", "bench", "server", "scale", "integrations", "cli"),
    *("__init__", "__main__"),
]


def imported(path: Path) -> set[str]:
    """Return the parts of forerun that a file imports, also in functions and for types only."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            # `from forerun import x` imports the part x.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("forerun.")}
    return parts - {"__version__"}


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_go_one_way(path: Path) -> None:
    # The file's folder, or its name if it lies in the package's root.
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in ORDER, f"say in this test where {part} stands"
    assert imported(path) <= set(ORDER[: ORDER.index(part) + 1])


def test_the_loop_and_the_methods_do_not_know_each_other() -> None:
    assert "methods" not in imported(ROOT / "engine" / "engine.py")
    for path in [*(ROOT / "methods").glob("*.py"), *(ROOT / "drafters").glob("*.py")]:
        assert "forerun.engine.engine" not in path.read_text()


def test_settings_reach_what_runs_in_one_place() -> None:
    """It is imported by name when the first drafter is built, because it imports torch."""
    late = [
        path.name
        for path in (ROOT / "methods").glob("*.py")
        if 'import_module("forerun.' in path.read_text()
    ]
    assert late == ["base.py"]


@pytest.mark.parametrize(
    "module", ["forerun", "forerun.methods", "forerun.sampling.params", "forerun.api.choose"]
)
def test_quick_imports_need_no_torch(module: str) -> None:
    heavy = ("torch", "transformers", "numpy")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        forerun.nonsense  # noqa: B018
