"""The prompt folder: keys, values and hidden states of texts on disk, for processes to come.

Files are written by a thread of their own, soon after a text is parked, under a lock that processes
share. Reading takes no lock, because a file appears whole by a rename. What has gone meanwhile is
run again by the model.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Thread
from weakref import WeakSet

from torch import Tensor

from forerun.engine.target import Capture
from forerun.files import private_folder
from forerun.model.segments import NAME, Layout, contents
from forerun.model.shelf import Job, Shelf

_LOG = logging.getLogger("forerun")

WAITING = 2**30  # bytes that may wait to be written; of a text that is longer the beginning is kept
FLUSH = 5.0  # seconds that the end of the process waits for what is not written yet
LOCK = "lock"
TEMPORARY = ".tmp"
SHELF = re.compile(r"[0-9a-f]{32}")


class PromptFolder:
    """A folder of the user's own with the texts of any number of models, in at most `limit` bytes,
    without those least recently used. Several processes may share it.

    Attributes:
        bytes: size of its files, when they were last looked at.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """Make the folder if need be. Raises ValueError for one that is not the user's alone to
        write."""
        self.path, self.limit = private_folder(path), limit
        self._jobs: deque[Job] = deque()
        self._thread: Thread | None = None
        self._changed = Condition()
        self._said: set[str] = set()
        self.bytes = sum(size for size, _ in self._files().values())
        _OPEN.add(self)

    def shelf(self, model: str, layout: Layout, no_states: Callable[[Capture], Tensor]) -> Shelf:
        """Return the part of it that holds the texts of one model.

        Args:
            model: a digest, 32 hexadecimal digits, of what decides the bits of its keys, values
                and states.
            layout: of its keys and values.
            no_states: returns hidden states [0, d] as a capture gives them.
        """
        return Shelf(self, model, layout, no_states)

    def say(self, line: str) -> None:
        """Log a line once."""
        if line not in self._said:
            self._said.add(line)
            _LOG.warning("%s", line)

    # Writing.

    def room(self) -> int:
        """Return how many bytes may be copied to wait until they are written: what the folder
        holds at most, because more would push out its own beginning."""
        with self._changed:
            waiting = sum(job.bytes for job in self._jobs)
        return min(WAITING, self.limit) - waiting

    def submit(self, job: Job) -> None:
        """Write the files of a text soon, in another thread."""
        with self._changed:
            if self._thread is None:
                # It ends when it has nothing to do. It is no daemon, because Python then waits at
                # its end for what is not written yet.
                thread = Thread(target=self._work, name="forerun-prompts", daemon=False)
                thread.start()  # which may fail, and waits for this block
                self._thread = thread
            job.shelf.queued.update(file.name for file in job.files)
            self._jobs.append(job)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all texts are written, or for so many seconds. Return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            try:
                with self._locked():
                    self._write(job)
            except Exception as error:  # such as a full disk, for which no request is to fail
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                self.say(f"a text is not kept in {self.path}: {reason}")
            with self._changed:
                self._jobs.popleft()
                job.shelf.queued.difference_update(file.name for file in job.files)
                self._changed.notify_all()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # a killed process leaves no lock behind
            yield
        finally:
            os.close(file)

    def _write(self, job: Job) -> None:
        files, kept = self._files(clean=True), {job.shelf.path / name for name in job.names}
        total = sum(size for size, _ in files.values())
        oldest = deque(sorted(files.keys() - kept, key=lambda path: files[path][1]))
        for new in job.files:
            path = job.shelf.path / new.name
            if path in files and new.name not in job.shelf.damaged:
                continue
            data = contents(new.segment.tokens, new.tensors)
            total -= files.pop(path, (0, 0))[0]
            while oldest and total + len(data) > self.limit:
                total -= _remove(oldest.popleft(), files)
            if total + len(data) > self.limit:
                break  # the text alone is larger than the folder may be: its beginning is kept
            _write_file(path, data)
            total += len(data)
            job.shelf.damaged.discard(new.name)
            for shorter in job.shelf.replaced_by(new, files):
                total -= _remove(shorter, files)
        self.bytes = total
        job.shelf.touch(job.names)

    def _files(self, clean: bool = False) -> dict[Path, tuple[int, int]]:
        """Return {file: (bytes, ns of its last use)}. With `clean`, under the lock, remove what
        killed writers left."""
        found: dict[Path, tuple[int, int]] = {}
        for shelf in _entries(self.path):
            if shelf.name == LOCK:
                continue
            if not (SHELF.fullmatch(shelf.name) and shelf.is_dir()):
                self.say(f"{shelf.path} is not of the prompt cache and is ignored")
                continue
            for entry in _entries(shelf):
                with suppress(OSError):  # another process may have removed it
                    if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found[Path(entry.path)] = status.st_size, status.st_mtime_ns
                    elif not entry.name.endswith(TEMPORARY):
                        self.say(f"{entry.path} is not of the prompt cache and is ignored")
                    elif clean:
                        os.unlink(entry.path)
        return found


_OPEN: WeakSet[PromptFolder] = WeakSet()


@atexit.register
def _flush() -> None:
    """Write what is not written yet: a server ends its process without waiting for threads."""
    for folder in list(_OPEN):
        folder.wait(FLUSH)


def _entries(path: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, for the user alone."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _remove(path: Path, files: dict[Path, tuple[int, int]]) -> int:
    """Remove a file; return its size."""
    with suppress(OSError):
        path.unlink()
    return files.pop(path, (0, 0))[0]
