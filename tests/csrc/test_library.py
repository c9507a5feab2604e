"""The C library's file: how it is built and put in place, and which one a process takes."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.csrc import build as builder
from forerun.csrc import library as loader
from forerun.csrc.build import HERE, LIBRARY, build, build_of, install, sources, sources_id
from forerun.csrc.library import VARIABLE, build_id, library, variant, variants
from tests.support.toys import refuses

# A linker of macOS refuses what is not there.
WITHOUT_VARIANTS = ("-Wl,-undefined,dynamic_lookup",) if sys.platform == "darwin" else ()


@pytest.fixture
def unasked() -> Iterator[None]:
    """The process has its library, and knows no value of FORERUN_KERNELS yet."""
    library()
    loader._library.cache_clear()
    yield
    loader._library.cache_clear()


@pytest.fixture
def unloaded() -> Iterator[None]:
    """The process has chosen a variant, and loads the library anew."""
    library()
    loader._loaded.cache_clear()
    yield
    loader._loaded.cache_clear()


@pytest.mark.slow
def test_the_same_sources_and_flags_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variants, which take a compiler ten times as long as all other files."""
    few = {name: flags for name, flags in sources("").items() if not name.startswith("variant_")}
    monkeypatch.setattr(builder, "sources", lambda machine: few)
    first = tmp_path / "first.so"
    second = tmp_path / "second.so"
    other = tmp_path / "other.so"
    flags = ("-O0", *WITHOUT_VARIANTS)
    build(first, extra=flags)
    build(second, extra=flags)
    build(other, extra=(*flags, "-g0"))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.so", "other.so", "second.so"]
    origins = {build_of(path.read_bytes()).partition("-")[0] for path in (first, other)}
    assert origins == {sources_id()}
    assert build_of(first.read_bytes()) != build_of(other.read_bytes())


def test_a_file_is_put_in_place_without_a_write_to_the_old_one(tmp_path: Path) -> None:
    built, target = tmp_path / "built", tmp_path / LIBRARY
    target.write_bytes(b"old" * 4096)
    with target.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        built.write_bytes(b"new" * 4096)
        install(built, target)
        assert target.read_bytes() == b"new" * 4096
        assert mapped[:] == b"old" * 4096
    assert not built.exists()


def test_a_loaded_library_of_windows_gets_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses to replace it, but not to rename it."""
    built = tmp_path / "built"
    target = tmp_path / LIBRARY
    built.write_bytes(b"new")
    target.write_bytes(b"old")
    replace = Path.replace

    def refuse(self: Path, to: Path) -> Path:
        if to.exists():
            raise PermissionError
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", refuse)
    install(built, target)
    (other,) = (path for path in tmp_path.iterdir() if path != target)
    assert (target.read_bytes(), other.read_bytes()) == (b"new", b"old")


def test_the_loaded_library_says_what_it_was_built_from() -> None:
    assert build_id() == build_of((HERE / LIBRARY).read_bytes())
    assert build_id().partition("-")[0] == sources_id()


def test_folders_without_sources_have_no_hash_and_other_sources_another(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text("FLAGS = []\n")
    assert sources_id(tmp_path) is None
    (tmp_path / "select.c").write_text("int chosen;\n")
    before = sources_id(tmp_path)
    (tmp_path / "build.py").write_text("FLAGS = ['-O3']\n")
    assert sources_id(tmp_path) not in (None, before)


def test_other_bytes_have_no_build() -> None:
    assert build_of(b"no library of ours") is None


@pytest.mark.parametrize(("origin", "lines"), [("0123456789abcdef", 1), (None, 0)])
def test_a_library_of_other_sources_is_named_in_one_line_and_used(
    origin: str | None,
    lines: int,
    unloaded: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loader, "sources_id", lambda: origin)
    with caplog.at_level(logging.WARNING, "forerun"):
        functions, why = loader._loaded()
    assert functions is not None and not why
    said = [f"{LIBRARY} was built from other sources: install forerun again"] * lines
    assert [each.getMessage() for each in caplog.records] == said


def test_a_process_runs_one_variant(unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = variant()
    monkeypatch.setenv(VARIABLE, chosen)
    assert library() is not None
    other = next((name for name in variants() if name != chosen), None)
    if other is None:
        pytest.skip("this machine runs one variant alone")
    monkeypatch.setenv(VARIABLE, other)
    message = f"FORERUN_KERNELS is '{other}', but this process runs '{chosen}' already"
    refuses(message, library)
    assert variant_after(monkeypatch) == chosen


def variant_after(monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return the variant that runs, whatever FORERUN_KERNELS says."""
    monkeypatch.delenv(VARIABLE)
    return variant()


def test_a_replaced_library_is_named(unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "build_of", lambda library: "0123-4567")
    message = f"{LIBRARY} is build 0123-4567 by now, but this process runs {loaded()}: start it"
    refuses(message, library)


def loaded() -> str:
    """Return the identity of the loaded library, without `library`."""
    functions, _ = loader._loaded()
    return str(functions.fr_build().decode())
