"""What forerun keeps in its folder (`forerun.files.home`), with sizes: to list, and to remove.

Only what forerun itself put there is looked at, because FORERUN_HOME may name a folder that holds
other things too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.files import home
from forerun.zoo.known import MODELS, cached

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        share = self.bytes / MODELS[self.name].size
        return f"{share:.0%} downloaded; `forerun fetch {self.name}` continues"


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
        with _not_downloading(entry):
            pass
    for entry in removed:
        with _not_downloading(entry):
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


@contextmanager
def _not_downloading(entry: Entry) -> Iterator[None]:
    """Hold the lock of a model's download. Raises ValueError if another process holds it."""
    lock = entry.path / LOCK_NAME
    if not lock.is_file():
        yield
        return
    with lock.open("w") as file:
        with suppress(ImportError):  # a system without such locks
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is downloading {entry.name}: wait until it ends"
                ) from None
        yield
