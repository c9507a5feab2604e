"""What forerun keeps in its folder (`forerun.files.home`), with sizes: to list, and to remove.

Only what forerun itself put there is looked at, because FORERUN_HOME may name a folder that holds
other things too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forerun.files import home, take_lock
from forerun.zoo.known import MODELS, cached

COSTS = "costs"  # what forwards cost on this machine, a small file for each pair of models
LOCK_NAME = ".lock"  # held while a model is downloaded


@dataclass(frozen=True)
class Entry:
    """A model, or the measured costs, in forerun's folder.

    Attributes:
        name: by which it is removed.
        path: its folder.
        bytes: the size of its files.
        is_whole: whether it can be used. A model that was downloaded in part can not.
    """

    name: str
    path: Path
    bytes: int
    is_whole: bool

    @property
    def note(self) -> str:
        """What it is, in a few words."""
        if self.name == COSTS:
            return "measured on this machine"
        if self.is_whole:
            return MODELS[self.name].file
        return f"{self.bytes / MODELS[self.name].size:.0%} downloaded"

    @property
    def advice(self) -> str:
        """What to do about it; "" if nothing."""
        return "" if self.is_whole else f"`forerun fetch {self.name}` continues"


def entries() -> list[Entry]:
    """Return what is in the folder: models in the order of MODELS, then the costs."""
    folders = {name: cached(name).parent for name in MODELS} | {COSTS: home() / COSTS}
    listed = []
    for name, folder in folders.items():
        size = _bytes_of(folder)
        if size:
            is_whole = name == COSTS or _is_whole(name)
            listed.append(Entry(name, folder, size, is_whole))
    return listed


def _is_whole(name: str) -> bool:
    """Return whether a model's file is here with its size. Its hash is left to `fetch`."""
    file = cached(name)
    return file.is_file() and file.stat().st_size == MODELS[name].size


def _bytes_of(folder: Path) -> int:
    """Return the size of all files under a folder, 0 if there is no folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may have removed it
                total += (Path(place) / name).stat().st_size
    return total


def remove(names: Sequence[str]) -> list[Entry]:
    """Remove models, or the costs, by their names, and return what was removed.

    Raises ValueError, before anything is removed, for a name that nothing in the folder has, and
    for a model that another process is downloading.
    """
    present = {entry.name: entry for entry in entries()}
    for name in names:
        if name not in present:
            there_is = ", ".join(present) or "nothing"
            raise ValueError(f"there is no {name!r} in {home()}; there is {there_is}")
    removed = [present[name] for name in dict.fromkeys(names)]
    for entry in removed:
        _check_not_downloading(entry)
    for entry in removed:
        _remove_folder(entry.path)
    return removed


def _remove_folder(folder: Path) -> None:
    """Remove a folder, or a link to one, whose files then stay."""
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise ValueError(f"cannot remove {folder}: {error.strerror}") from None


def _check_not_downloading(entry: Entry) -> None:
    """Raise ValueError if another process is downloading a model.

    The lock is given back at once, because Windows removes no file that is open. A download that
    begins while its folder is being removed fails, as it would after waiting for the lock.
    """
    lock = entry.path / LOCK_NAME
    if not lock.is_file():
        return
    is_free = True
    with lock.open("w") as file, suppress(OSError):  # a file system without locks
        is_free = take_lock(file.fileno())
    if not is_free:
        raise ValueError(f"another process is downloading {entry.name}: wait until it ends")
