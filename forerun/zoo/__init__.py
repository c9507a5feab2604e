"""The embedded pair: a small target and draft, trained on the standard library's source, with their tokenizer."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"
FOLDER = Path(__file__).parent / "weights"


def bundled_head(target: object, form: str | None) -> Path | None:
    """The folder of the embedded target's head of that form. None where there is none and for other targets."""
    folder = FOLDER / (form or "")
    return folder if form and target == EMBEDDED and (folder / "config.json").is_file() else None


def resolve(source: str | Path, part: str) -> str | Path:
    """The folder, GGUF file or hub id that a user's name for a target or draft (`part`) stands for.

    Raises ValueError for what can only be a path and is not there: no hub is asked for it.
    """
    if source == EMBEDDED:
        return FOLDER / part
    path = Path(source).expanduser()
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return path
    name = str(source)
    local = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists() or path.suffix.lower() == ".gguf"
    if local or isinstance(source, Path):
        kind = "GGUF file" if path.suffix.lower() == ".gguf" else "model folder"
        raise ValueError(f"no {kind} {name!r} for the {part}")
    return name
