"""What forerun keeps in its folder, listed and removed."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from forerun import zoo
from forerun.cli.commands import app
from forerun.cli.common import shown_size
from forerun.zoo import cache
from forerun.zoo.cache import COSTS, entries, remove
from tests.support.toys import refuses

SMOLLM2 = zoo.MODELS["smollm2"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a whole model, half of another one, costs, and files of somebody else."""
    home = tmp_path / "home"
    monkeypatch.setenv("FORERUN_HOME", str(home))
    _file(home / "models" / "smollm2" / SMOLLM2.file, SMOLLM2.size)
    _file(home / "models" / "smollm2" / ".lock", 0)
    draft = zoo.MODELS["qwen-coder-draft"]
    _file(home / "models" / draft.name / "downloads" / draft.file, draft.size // 2)
    _file(home / COSTS / "a.json", 300)
    _file(home / "notes.txt", 5)
    _file(home / "models" / "mine" / "model.gguf", 7)
    return home


def _file(path: Path, size: int) -> None:
    """Make a file that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cache", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_is_whole_and_what_is_begun_is_told_apart(home: Path) -> None:
    rows = [(entry.name, entry.bytes, entry.is_whole) for entry in entries()]
    half = zoo.MODELS["qwen-coder-draft"].size // 2
    wanted = [("smollm2", SMOLLM2.size, True), ("qwen-coder-draft", half, False)]
    assert rows == [*wanted, (COSTS, 300, True)]
    shown = run("ls")
    assert "98 MB" in shown and "50% downloaded; `forerun fetch qwen-coder-draft`" in shown
    assert f"344 MB in {home};" in shown
    facts = json.loads(run("ls", "--json"))
    assert facts["folder"] == str(home)
    assert [entry["whole"] for entry in facts["entries"]] == [True, False, True]


def test_only_what_is_named_is_removed(home: Path) -> None:
    assert run("rm", "smollm2") == "removed smollm2: 98 MB\n"
    assert [entry.name for entry in entries()] == ["qwen-coder-draft", COSTS]
    run("rm", "--all")
    assert entries() == []
    left = sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    assert left == ["models/mine/model.gguf", "notes.txt"]
    assert run("rm", "--all") == "there was nothing to remove\n"
    assert "holds nothing; `forerun fetch" in run("ls")


def test_a_name_that_is_not_there_removes_nothing() -> None:
    refuses("there is no 'mine' in .*; there is smollm2, qwen-coder", remove, ["smollm2", "mine"])
    assert len(entries()) == 3
    for arguments in ([], ["--all", "smollm2"]):
        done = CliRunner().invoke(app, ["cache", "rm", *arguments])
        assert "give names as `forerun cache ls` shows them, or --all" in str(done.exception)


def test_a_model_that_is_being_downloaded_stays(home: Path) -> None:
    with (home / "models" / "smollm2" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuses("another process is downloading smollm2", remove, [COSTS, "smollm2"])
    assert len(entries()) == 3
    remove([COSTS, "smollm2"])
    assert [entry.name for entry in entries()] == ["qwen-coder-draft"]


def test_no_file_is_open_while_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because Windows would refuse to remove it."""

    def remove_folder(folder: Path) -> None:
        opened = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
        assert not [file for file in opened if Path(file).is_relative_to(folder.resolve())]
        removed.append(folder.name)

    removed: list[str] = []
    monkeypatch.setattr(cache, "_remove_folder", remove_folder)
    remove(["smollm2", COSTS])
    assert removed == ["smollm2", COSTS]


def test_without_locks_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "take_lock", mock.Mock(side_effect=OSError("no locks")))
    remove(["smollm2"])
    assert [entry.name for entry in entries()] == ["qwen-coder-draft", COSTS]


def test_of_a_linked_folder_only_the_link_goes(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (home / "models" / "smollm2").rename(elsewhere)
    (home / "models" / "smollm2").symlink_to(elsewhere)
    remove(["smollm2"])
    assert (elsewhere / SMOLLM2.file).is_file() and len(entries()) == 2


def test_sizes_have_the_unit_that_suits_them() -> None:
    sizes = [0, 999, 12_345, 98_362_432, 1_117_320_768]
    assert [shown_size(size) for size in sizes] == [
        "0 bytes",
        "999 bytes",
        "12 kB",
        "98 MB",
        "1.1 GB",
    ]
