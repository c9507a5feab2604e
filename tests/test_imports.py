"""The direction of imports, and that what must be quick to import needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forerun

ROOT = Path(forerun.__file__).parent
GROUND = {
    "draft",
    "failures",
    "races",
    "sampling",
    "cache",
    "batch",
    "blocks",
    "prefix",
    "rows",
    "compat",
    "support",
    "fingerprint",
    "model",
    "generation",
    "logprobs",
    "probabilities",
}
LOOP = GROUND | {"steps", "verify", "engine", "metrics"}
METHODS = LOOP | {"costs", "nn", "methods", "params", "vocabularies"}
API = METHODS | {
    "claims",
    "chat",
    "text",
    "files",
    "kinds",
    "runtime",
    "gguf",
    "zoo",
    "loading",
    "profiles",
    "driver",
    "requests",
    "decoder",
    "api",
}
TOP = API | {"hf"}

# What each part may import beside itself. A part that is not named here fails the test: it wants a place.
ALLOWED: dict[str, set[str]] = {
    "draft": set(),
    "cache": set(),
    "failures": set(),
    "formats": set(),
    "params": {"formats"},
    "kinds": set(),
    "chat": set(),
    "text": set(),
    "files": set(),
    "probabilities": set(),
    "batch": {"cache"},
    "blocks": {"batch", "cache"},
    "prefix": {"cache"},
    "rows": {"batch", "cache"},
    "compat": set(),
    "support": {"compat"},
    "fingerprint": set(),
    "races": {"failures"},
    "sampling": {"draft", "failures", "penalties", "probabilities", "races"},
    "model": GROUND - {"model", "generation", "logprobs", "races", "blocks"},
    "generation": {"failures", "logprobs", "params", "races", "sampling"},
    "logprobs": set(),
    "penalties": set(),
    "steps": {"draft", "generation", "logprobs", "sampling"},
    "verify": {"draft", "failures", "generation", "probabilities", "sampling"},
    "engine": GROUND | {"steps", "verify"},  # no drafter, whatever the method
    "driver": {"engine", "generation"},
    "grammar": {"sampling"},
    "requests": GROUND | {"chat", "formats", "grammar", "params", "penalties", "text"},
    "metrics": {"engine"},
    "nn": GROUND,
    "costs": set(),
    "vocabularies": {"text"},
    "methods": LOOP | {"nn", "costs", "runtime", "vocabularies"},
    "runtime": GROUND | {"nn", "costs", "files", "kinds"},
    "gguf": {"runtime", "kinds"},
    "zoo": GROUND | {"nn", "files"},
    "profiles": {"methods", "costs", "files", "zoo"},
    "claims": {"support", "zoo"},
    "loading": GROUND | {"claims", "nn", "runtime", "zoo", "gguf", "kinds", "vocabularies"},
    "decoder": API - {"profiles", "api"},
    "api": API,
    "hf": API,
    "integrations": API,
    "train": API,
    "bench": TOP | {"train"},
    "server": TOP | {"grammar"},
    "scale": TOP | {"grammar", "server"},
    "cli": TOP | {"formats", "grammar", "train", "bench", "server", "scale"},
    "__init__": TOP,
    "__main__": {"cli"},
}


def part(path: Path) -> str:
    """Which part of the package a file belongs to: its folder, or its own name in the package's root."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Parts of forerun that a file imports anywhere, in functions and under TYPE_CHECKING as well."""
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


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = part(path)
    assert own in ALLOWED, f"say in this test what {own} may import"
    assert imported(path) <= ALLOWED[own] | {own}


def test_the_loop_and_the_methods_do_not_know_each_other() -> None:
    assert "methods" not in imported(ROOT / "engine.py")
    assert not any("engine" in imported(path) for path in (ROOT / "methods").glob("*.py"))


@pytest.mark.parametrize("module", ["forerun", "forerun.methods", "forerun.params", "forerun.profiles"])
def test_quick_imports_need_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        forerun.nonsense  # noqa: B018
