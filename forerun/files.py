"""Reading and writing text files. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the file's text.

    Raises ValueError, which names the file, if it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, because a reader must not see a half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def home() -> Path:
    """Return the folder where forerun keeps files: $FORERUN_HOME, else ~/.cache/forerun."""
    path = Path(os.environ.get("FORERUN_HOME") or "~/.cache/forerun")
    try:
        return path.expanduser()
    except RuntimeError:  # no home folder is known, for example in a container without accounts
        return path


def private_folder(path: Path) -> Path:
    """Make a folder that only the user can write in, if there is none, and return it.

    Raises ValueError for a folder that belongs to another user, that others may write in, or that
    cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ValueError(f"cannot make the folder {path}: {error.strerror}") from None
    if status.st_uid != os.geteuid():
        raise ValueError(f"the folder {path} belongs to another user: name one of your own")
    if status.st_mode & 0o022:
        raise ValueError(
            f"others may write in the folder {path}: name one that only you can, or `chmod go-w` it"
        )
    return path
