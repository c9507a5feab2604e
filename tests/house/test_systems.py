"""What differs between systems: modules of POSIX are missing, locks are others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forerun import files
from forerun.csrc.build import PLATFORMS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_of_it_is_imported_and_used_without_posix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.without_posix", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "private" / "text").read_text() == "whole"
    assert list((tmp_path / "private" / "prompts").glob("*/*"))  # a text was kept


class Locks:
    """The module msvcrt, as far as one process has it: a lock of a byte is for one open file."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.holder: int | None = None
        self.trials = 0

    def locking(self, file: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        assert os.lseek(file, 0, os.SEEK_CUR) == 0
        self.trials += 1
        if self.holder not in (None, file):
            if self.trials == 3:
                self.holder = None  # the other process has ended
            raise PermissionError
        self.holder = file


def test_locks_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()
    monkeypatch.setitem(sys.modules, "msvcrt", locks)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(files, "LOCK_PAUSE", 0)
    with (tmp_path / "one").open("a") as one, (tmp_path / "other").open("a") as other:
        one.write("the position is not 0")
        one.flush()
        assert files.take_lock(one.fileno())
        assert not files.take_lock(other.fileno())
        files.wait_for_lock(other.fileno())
        assert locks.holder == other.fileno()
        assert locks.trials == 4


def test_locks_of_posix(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as one, (tmp_path / "lock").open("a") as other:
        assert files.take_lock(one.fileno())
        assert not files.take_lock(other.fileno())
        one.close()
        files.wait_for_lock(other.fileno())
        assert files.take_lock(other.fileno())


def test_a_reader_of_windows_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "new"
    refusals = [PermissionError(), PermissionError()]

    def refuse(self: Path, target: Path) -> None:
        if refusals:
            raise refusals.pop()
        os.replace(self, target)  # noqa: PTH105

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(files, "REPLACE_PAUSE", 0)
    monkeypatch.setattr(files, "os", SimpleNamespace(name="nt"))
    new.write_text("new")
    files.replace(new, tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    refusals += [PermissionError()] * files.REPLACE_TRIALS
    with pytest.raises(PermissionError):
        files.replace(tmp_path / "old", new)
    monkeypatch.setattr(files, "os", SimpleNamespace(name="posix"))
    refusals[:] = [PermissionError()]
    with pytest.raises(PermissionError):  # here it says that the folder is another user's
        files.replace(tmp_path / "old", new)


def test_the_workflow_names_wheels_and_tests_that_there_are() -> None:
    text = (ROOT / ".github" / "workflows" / "systems.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]["systems"]["strategy"]["matrix"]["include"]
    assert {job["wheel"] for job in jobs} <= PLATFORMS.keys()
    assert {PLATFORMS[job["wheel"]].system for job in jobs} == {"linux", "darwin", "win32"}
    for job in jobs:
        assert all((ROOT / folder).is_dir() for folder in job["tests"].split())
