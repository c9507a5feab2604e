"""The prompt folder: keys, values and hidden states of texts on disk, for later processes.

A thread writes files soon after a text is saved, under a lock that processes share. Reading takes
no lock, because a renaming makes a file appear whole. If a file has been removed meanwhile, the
model runs its tokens again.
"""

from __future__ import annotations

import atexit
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
from forerun.files import OPEN_FLAGS, private_folder, replace, wait_for_lock
from forerun.model.segments import NAME, Layout, contents
from forerun.model.shelf import Job, Shelf

_LOG = logging.getLogger("forerun")

# Bytes that may wait to be written. Of a text that is longer, only the beginning is kept.
WAITING = 2**30
FLUSH = 5.0  # seconds that the end of the process waits for files to be written
LOCK = "lock"
TEMPORARY = ".tmp"
SHELF = re.compile(r"[0-9a-f]{32}")  # the name of a shelf

# {file: (its bytes, ns of its last use)}
Files = dict[Path, tuple[int, int]]


class PromptFolder:
    """A private folder with the most recently used texts of any number of models.

    Several processes may share it.

    Attributes:
        path: the folder.
        limit: bytes that its files may take.
        bytes: size of its files when they were last listed.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """Open the folder, which is made if it does not exist.

        Raises ValueError if other users may write to it.
        """
        self.path = private_folder(path)
        self.limit = limit
        self._jobs: deque[Job] = deque()
        self._thread: Thread | None = None
        self._changed = Condition()
        self._said: set[str] = set()
        self.bytes = sum(size for size, _ in self._files().values())
        _OPEN.add(self)

    def shelf(self, model: str, layout: Layout, no_states: Callable[[Capture], Tensor]) -> Shelf:
        """Return the part of the folder that holds the texts of one model.

        Args:
            model: a digest, 32 hexadecimal digits, of all that decides the bits of the model's
                keys, values and states.
            layout: the layout of its keys and values.
            no_states: returns hidden states [0, d] of the width and dtype that a capture gives.
        """
        return Shelf(self, model, layout, no_states)

    def say(self, line: str) -> None:
        """Log a line once."""
        if line not in self._said:
            self._said.add(line)
            _LOG.warning("%s", line)

    # Writing.

    def room(self) -> int:
        """Return how many bytes may be copied to wait until they are written.

        They are never more than the folder's limit, because the end of a longer text would push
        out its own beginning.
        """
        with self._changed:
            waiting = sum(job.bytes for job in self._jobs)
        return min(WAITING, self.limit) - waiting

    def submit(self, job: Job) -> None:
        """Write the files of a text soon, in another thread."""
        with self._changed:
            if self._thread is None:
                # It ends when it has nothing to do. It is not a daemon, so that Python waits for
                # it before exit.
                thread = Thread(target=self._work, name="forerun-prompts", daemon=False)
                thread.start()  # may fail; if not, the thread waits until this block ends
                self._thread = thread
            job.shelf.queued.update(file.name for file in job.files)
            self._jobs.append(job)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait, at most `seconds`, until all texts are written; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, seconds)

    def _work(self) -> None:
        """Write the texts that wait, one after the other. This is what the thread runs."""
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            try:
                with self._locked():
                    self._write(job)
            except Exception as error:  # for example a full disk: requests do not need it
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                self.say(f"a text is not kept in {self.path}: {reason}")
            with self._changed:
                self._jobs.popleft()
                job.shelf.queued.difference_update(file.name for file in job.files)
                self._changed.notify_all()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that processes share."""
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
        try:
            wait_for_lock(file)
            yield
        finally:
            os.close(file)

    def _write(self, job: Job) -> None:
        """Write the files of a text, and remove the least recently used ones to make room."""
        files = self._files(clean=True)
        kept = {job.shelf.path / name for name in job.names}
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
                break  # the text alone is larger than the limit: its beginning is kept
            _write_file(path, data)
            total += len(data)
            job.shelf.damaged.discard(new.name)
            for shorter in job.shelf.replaced_by(new, files):
                total -= _remove(shorter, files)
        self.bytes = total
        job.shelf.touch(job.names)

    def _files(self, clean: bool = False) -> Files:
        """Return the files of all shelves.

        With `clean`, remove what killed writers left. The caller must then hold the lock.
        """
        files: Files = {}
        for shelf in _entries(self.path):
            if shelf.name == LOCK:
                continue
            if not (SHELF.fullmatch(shelf.name) and shelf.is_dir()):
                self.say(f"{shelf.path} does not belong to the prompt cache and is ignored")
                continue
            for entry in _entries(shelf):
                with suppress(OSError):  # another process may have removed it
                    if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        files[Path(entry.path)] = status.st_size, status.st_mtime_ns
                    elif not entry.name.endswith(TEMPORARY):
                        self.say(f"{entry.path} does not belong to the prompt cache and is ignored")
                    elif clean:
                        Path(entry.path).unlink()
        return files


_OPEN: WeakSet[PromptFolder] = WeakSet()


@atexit.register
def _flush() -> None:
    """Wait for texts to be written, because a server ends its process while threads still run."""
    for folder in list(_OPEN):
        folder.wait(FLUSH)


def _entries(path: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that only the user may read, whole or not at all."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(data)
        replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _remove(path: Path, files: Files) -> int:
    """Remove a file, also from `files`; return its size."""
    with suppress(OSError):
        path.unlink()
    return files.pop(path, (0, 0))[0]
