"""Linux's control groups, which limit what a process may use. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the process's group and of those around it, whose limits hold too.

    Args:
        controller: "cpu" or "memory". In version 1 each controller has groups of its own.
        root: where /proc and /sys are mounted.
    """
    top = root / "sys/fs/cgroup"
    for line in system_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _upwards(top / path.strip("/"), top)
        elif controller in controllers.split(","):
            mounted = top / controllers
            yield from _upwards(mounted / path.strip("/"), mounted)
    # A container sees its own group here.
    yield from (top, top / controller)


def _upwards(folder: Path, top: Path) -> Iterator[Path]:
    yield from (path for path in (folder, *folder.parents) if path.is_relative_to(top))


def system_text(path: Path) -> str:
    """Return what a file of the system says, or nothing if it cannot be read.

    `forerun.files.read_text` is for a user's files, whose faults are errors.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
