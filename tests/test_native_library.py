"""What C was compiled to is loaded only from where nobody else can have written it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.backends import native

pytestmark = pytest.mark.skipif(
    native.library() is None or not hasattr(os, "getuid"), reason="no C compiler, or a system without users"
)


def writable_folder(path: Path) -> None:
    path.parent.chmod(0o770)


def writable_file(path: Path) -> None:
    path.chmod(0o602)


def linked_file(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def linked_folder(path: Path) -> None:
    elsewhere = path.parent.with_name("elsewhere")
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a folder of ours."""
    monkeypatch.setenv("FORERUN_CFLAGS", "-O0")  # soon built
    folder = tmp_path / "native"
    assert native._library.__wrapped__(folder) is not None
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is loaded, in its place a module."""
    found: list[Path] = []
    monkeypatch.setattr(native, "_opened", lambda path: found.append(path) or native)
    return found


def test_the_folder_is_the_users_alone(planted: Path) -> None:
    old = os.umask(0)
    try:
        other = planted.parent.with_name("other")
        assert native._library.__wrapped__(other) is not None
    finally:
        os.umask(old)
    assert other.stat().st_mode & 0o777 == 0o700
    (kept,) = other.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_what_is_kept_is_loaded(planted: Path, opened: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    assert native._library.__wrapped__(planted.parent) is native
    assert opened == [planted] and not caplog.records


@pytest.mark.parametrize("plant", [writable_folder, writable_file, linked_file, linked_folder])
def test_what_others_may_write_is_not_loaded(
    plant: Callable[[Path], None], planted: Path, opened: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    plant(planted)
    before = planted.read_bytes(), sorted(planted.parent.iterdir())
    with caplog.at_level(logging.WARNING, "forerun"):
        assert native._library.__wrapped__(planted.parent) is native
    assert len(opened) == 1 and opened[0].name != planted.name and not opened[0].exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "native" in caplog.messages[0]
    assert before == (planted.read_bytes(), sorted(planted.parent.iterdir()))


def test_what_belongs_to_another_user_is_not_loaded(
    planted: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert native._library.__wrapped__(planted.parent) is native
    assert len(opened) == 1 and opened[0] != planted and "belongs to another user" in caplog.text


def test_nothing_is_written_through_a_link(planted: Path, opened: list[Path]) -> None:
    """A link in the place of the folder, to one that is empty."""
    goal = planted.parent.with_name("goal")
    goal.mkdir(mode=0o700)
    shutil.rmtree(planted.parent)
    planted.parent.symlink_to(goal)
    assert native._library.__wrapped__(planted.parent) is native
    assert not list(goal.iterdir()) and planted not in opened
