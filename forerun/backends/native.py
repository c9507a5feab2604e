"""The family's forward between its products, in C, where there is a compiler.

Torch needs some sixty small operations a layer there, which take longer than products in 4 bits. `layers.c`, which has
`between.c` in it, is compiled once a machine, in a few seconds, and kept in the user's folder, from where it is loaded
only if nobody else can write there. Without a compiler, or with FORERUN_NATIVE=0, torch does it all
(`forerun.backends.family`), more slowly, and rounds otherwise.

FORERUN_NATIVE_FOLDER names another folder for what is compiled, FORERUN_CFLAGS further flags for the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.backends.machine import processor
from forerun.files import home
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache

_LOG = logging.getLogger("forerun")
SOURCES = tuple(Path(__file__).with_name(name) for name in ("layers.c", "between.c"))  # the first has the second in it
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC")
_QUIET: dict[str, Any] = {"capture_output": True, "timeout": 120}
LANES, LARGEST_HEAD = 16, 1024  # all sizes are multiples of the one, and heads no larger than the other
_P, _I, _F, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64
_OF_PRODUCTS = {
    "multiply": (_P, _P, _I, _P, _P, _I),
    "run_layers": (_P, _P),
    "score": (_P, _P, _I, _P, _P, _I),
    "draft_chain": (_P, _P, _P, _P),
    "draft_states": (_P, _P, _P, _P),
}
_ARGUMENTS = {
    "add_and_norm": (_P, _P, _P, _F, _I, _I, _P, _P),
    "gate": (_P, _I, _I, _P),
    "attend": (_P, _P, _P, _F, _P, _P, _P, _L, _L, *[_P] * 5, *[_I] * 7, _L, _P, _P),
    "has_products": (),
}


def library() -> Any | None:
    """The compiled functions; None where they cannot be had or are not wanted."""
    return None if os.environ.get("FORERUN_NATIVE") == "0" or sys.byteorder != "little" else _library(_folder())


def _folder() -> Path:
    """Where what is compiled is kept."""
    return Path(os.environ.get("FORERUN_NATIVE_FOLDER") or home() / "native")


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *os.environ.get("FORERUN_CFLAGS", "").split())


@cache
def _library(folder: Path) -> Any | None:
    compiler = _compiler()
    if not compiler:
        return None
    path, keeps = folder / f"{_made_of(compiler)}.so", True
    try:
        _check_own(folder, path)
        return _opened(path)
    except PermissionError as error:
        _LOG.warning(f"C is compiled anew, and not kept: {error}")
        keeps = False
    except (OSError, AttributeError):  # none yet, or a damaged one
        pass
    reason = ""
    # Threads are torch's: OpenMP is not linked, so that its functions are those of torch's own library. Where that is
    # another OpenMP than the compiler's, the second try does without.
    for threads in (["-fopenmp"], []):
        try:
            with tempfile.TemporaryDirectory() as work:
                part, built = Path(work) / "layers.o", Path(work) / "layers.so"
                command = [*compiler.split(), *_flags()]
                subprocess.run([*command, *threads, "-c", str(SOURCES[0]), "-o", str(part)], check=True, **_QUIET)
                subprocess.run([*command, "-shared", str(part), "-o", str(built), "-lm"], check=True, **_QUIET)
                found = _opened(built)
                if keeps:
                    _keep(built, path)
                return found
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip().split("\n")[-1] or str(error)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reason = str(error)
    _LOG.warning(f"torch does what C would do faster: {compiler} cannot build {SOURCES[0].name} ({reason})")
    return None


def _check_own(*paths: Path) -> None:
    """Raise PermissionError for what others may have written: what is loaded runs as this user."""
    if not hasattr(os, "getuid"):  # no such owners and modes there
        return
    for path in paths:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise PermissionError(f"{path} is a symbolic link; remove it")
        if found.st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user; remove it")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others may write to {path}; remove it")


def _keep(built: Path, path: Path) -> None:
    """Copy a library to where the next process looks for it. Where it cannot be kept, it is built again then."""
    with suppress(OSError):
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_own(path.parent)
        # A new file of its own first, readable by this user alone: several processes may build at once.
        number, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "wb") as file:
            file.write(built.read_bytes())
        os.replace(name, path)


@cache
def _made_of(compiler: str) -> str:
    """Differs between sources, compilers, their versions and processors."""
    version = ""
    with suppress(OSError, subprocess.SubprocessError):
        version = subprocess.run([*compiler.split(), "--version"], **_QUIET).stdout.decode(errors="replace")
    parts = [*(source.read_text() for source in SOURCES), compiler, version.partition("\n")[0], *_flags(), processor()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def build() -> str:
    """What C is built from and with, "torch" where there is none: rounding depends on it."""
    compiler = _compiler()
    return "torch" if library() is None or compiler is None else _made_of(compiler)[:8]


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _opened(path: Path) -> Any:
    found = ctypes.CDLL(str(path))
    has_products = found.has_products()
    for name, arguments in (_ARGUMENTS | (_OF_PRODUCTS if has_products else {})).items():
        function = getattr(found, name)
        function.argtypes, function.restype, function.errcheck = arguments, _I, _checked
    return found


def _checked(code: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """What a function returned. Raises RuntimeError where it refused sizes that do not fit: our own mistake."""
    if code >= 0:
        return code
    sizes: list[Any] = []
    for each in arguments:
        if isinstance(each, int | float | None):
            sizes.append(each)
            continue
        made = each._obj  # of ctypes.byref
        first = made[0] if isinstance(made, ctypes.Array) else made
        sizes.append({name: getattr(first, name) for name, kind in first._fields_ if kind is ctypes.c_int64})
    raise RuntimeError(f"{function.__name__} in C was given sizes that do not fit: {sizes}")


@dataclass(frozen=True)
class TokenBatch:
    """New entries of some rows of a cache, one behind the other, without padding: a step costs what it has tokens.

    Attributes:
        ids, positions: [n].
        row, length, slot, place: [n] int32, of each its row, that row's committed length, where its keys go, its
            position.
        paths: [n, P] int32, where the entries from the row's length to its own place stand.
        end: above all places.
    """

    ids: Tensor
    positions: Tensor
    row: Tensor
    length: Tensor
    slot: Tensor
    place: Tensor
    paths: Tensor
    end: int


def lay_out_tokens(inputs: Inputs, cache: KVCache) -> TokenBatch:
    """A batch of these entries. Tells the cache where they will go."""
    start, new = max(cache.lengths[: inputs.size]), inputs.new
    cache.begin(inputs.size, start, start + new)
    rows: list[int] = []
    lengths: list[int] = []
    slots: list[int] = []
    places: list[int] = []
    for own, depths in zip(inputs.rows, inputs.depths, strict=True):
        length, count = cache.lengths[own], len(depths)
        rows += [own] * count
        lengths += [length] * count
        slots += range(length, length + count)
        places += [length + depth for depth in depths]
    row, behind, slot, place = torch.tensor([rows, lengths, slots, places], dtype=torch.int32)
    paths = behind[:, None] + torch.arange(new, dtype=torch.int32)
    if inputs.masks is not None:
        first = 0
        for mask in inputs.masks:
            seen = mask[:, -len(mask) :].numpy()
            # A node's ancestors stand in the order of their depths, as a parent comes before its children.
            for node, before in enumerate(seen, first):
                path = np.flatnonzero(before)
                paths[node, : len(path)] = torch.from_numpy(path) + lengths[first]
            first += len(mask)
    if inputs.tokens is not None:
        ids = torch.tensor([token for tokens in inputs.tokens for token in tokens])
    else:
        assert inputs.given is not None
        ids = inputs.given
    return TokenBatch(ids, place.long(), row, behind, slot, place, paths, start + new)
