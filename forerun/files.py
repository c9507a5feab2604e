"""Files on every system: text, locks, and names that change at once. Needs no torch."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

# Flags of `os.open` that only some systems have: children do not inherit the file, and Windows
# writes bytes as they are.
OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# On Windows nobody else can have the file open whose name is taken. Readers close it soon.
REPLACE_TRIALS = 20
REPLACE_PAUSE = 0.05  # seconds
LOCK_PAUSE = 0.05  # seconds between two trials, where a system cannot wait for a lock


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
    try:
        temporary.write_text(text, encoding="utf-8")
        replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # else it takes the last bytes of a full disk
        raise


def replace(new: Path, path: Path) -> None:
    """Give a file the name of another one, which it replaces at once.

    Raises OSError, on Windows also if others keep the old file open for a second.
    """
    for trial in range(REPLACE_TRIALS):
        try:
            new.replace(path)
            return
        except PermissionError:
            if os.name != "nt" or trial == REPLACE_TRIALS - 1:
                raise
            time.sleep(REPLACE_PAUSE)


def take_lock(file: int) -> bool:
    """Take the lock of an open file; return False if another process has it.

    The lock is given back when the file is closed or the process ends, even if it is killed. On a
    system without such locks every process gets it.

    Raises OSError if the file system has no locks.
    """
    windows = _module("msvcrt")
    posix = _module("fcntl")
    try:
        if windows is not None:
            os.lseek(file, 0, os.SEEK_SET)  # it locks bytes from here on, which may not exist
            windows.locking(file, windows.LK_NBLCK, 1)
        elif posix is not None:
            posix.flock(file, posix.LOCK_EX | posix.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def wait_for_lock(file: int) -> None:
    """Wait until this process has the lock of an open file. Raises what `take_lock` raises."""
    posix = _module("fcntl")
    if posix is not None:
        posix.flock(file, posix.LOCK_EX)
        return
    while not take_lock(file):
        time.sleep(LOCK_PAUSE)


def _module(name: str) -> Any | None:
    """Return a module that only some systems have, or None."""
    try:
        return import_module(name)
    except ImportError:
        return None


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
    if not hasattr(os, "geteuid"):  # on Windows rights come from the folder around it
        return path
    if status.st_uid != os.geteuid():
        raise ValueError(f"the folder {path} belongs to another user: name one of your own")
    if status.st_mode & 0o022:
        raise ValueError(
            f"others may write in the folder {path}: name one that only you can, or `chmod go-w` it"
        )
    return path
