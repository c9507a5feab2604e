"""The C library of `forerun/csrc`: its structures, its functions and its choice of instruction set.

It is built when forerun is installed. It runs the best instruction set of the machine unless FORERUN_KERNELS names
another ("plain", "avx2", "avxvnni", "avx512vnni", "neon"). With "none", torch does the work, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from threading import Lock
from typing import Any

from forerun.csrc.build import HERE, LIBRARY, build_of, sources_id

ABI, VARIABLE = 6, "FORERUN_KERNELS"
_LOG = logging.getLogger("forerun")
_LOCK = Lock()  # of the choice below
_CHOSEN: list[str] = []  # the variant of this process, once it is chosen
VARIANTS = ("plain", "avx2", "avxvnni", "avx512vnni", "neon")
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class MatrixArgument(ctypes.Structure):
    """`fr_matrix`."""

    _fields_ = (*((name, _I) for name in ("layout", "outputs", "inputs")), ("panels", _P))


class LayerArgument(ctypes.Structure):
    """`fr_layer`."""

    _fields_ = (
        *((name, MatrixArgument) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(
            (name, _P)
            for name in ("first", "second", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
        ),
        *((name, _I) for name in ("window", "turned")),
    )


class ModelArgument(ctypes.Structure):
    """`fr_model`."""

    _fields_ = (
        *(
            (name, _I)
            for name in (
                "d",
                "heads",
                "groups",
                "size",
                "layers",
                "positions",
                "vocabulary",
                "embed_format",
            )
        ),
        *((name, _P) for name in ("layer", "norm", "cos", "sin", "embed")),
        ("embed_row", _L),
        *((name, MatrixArgument) for name in ("head", "fuse", "alone")),
        ("eps", _F),
    )


class CacheArgument(ctypes.Structure):
    """`fr_cache`."""

    _fields_ = (
        *(("keys", _P), ("values", _P), ("row", _L), ("group", _L)),
        *((name, _I) for name in ("rows", "capacity", "wide")),
    )


class BatchArgument(ctypes.Structure):
    """`fr_batch`."""

    _fields_ = (
        *((name, _I) for name in ("n", "path")),
        *(
            (name, _P)
            for name in ("tokens", "states", "row", "slot", "position", "length", "seen", "paths")
        ),
        *(
            (name, _P)
            for name in ("normed", "asked", "head", "extra", "logits", "after", "captured")
        ),
        *((name, _I) for name in ("asks", "extras", "captures")),
    )


class ChainArgument(ctypes.Structure):
    """`fr_chain_request`."""

    _fields_ = (
        *((name, _I) for name in ("row", "length", "count", "most")),
        *(
            (name, _P)
            for name in (
                "pending",
                "head",
                "names",
                "places",
                "extra",
                "ends",
                "numbers",
                "keys",
                "probs",
            )
        ),
        *((name, _P) for name in ("drafted", "probabilities")),
        *((name, _I) for name in ("extras", "ended", "among")),
        *((name, _F) for name in ("least", "product", "turn", "top_p")),
    )


class GrowthArgument(ctypes.Structure):
    """`fr_growth`."""

    _fields_ = (
        *((name, _I) for name in ("rows", "n", "start", "most", "width", "nodes", "context")),
        *(
            (name, _P)
            for name in (
                "row",
                "length",
                "count",
                "limit",
                "pending",
                "features",
                "states",
                "head",
                "names",
            )
        ),
        *(
            (name, _P)
            for name in (
                "logits",
                "information",
                "token_states",
                "old",
                "olds",
                "curves",
                "beams",
                "values",
            )
        ),
        *((name, _P) for name in ("tokens", "parents", "found")),
    )


# In the order of `fr_sizes`; None: the library alone has it.
_STRUCTURES = (
    *(
        MatrixArgument,
        None,
        LayerArgument,
        ModelArgument,
        CacheArgument,
        BatchArgument,
        ChainArgument,
    ),
    GrowthArgument,
)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fr_select": (_I, (ctypes.c_char_p,)),
    "fr_find": (_I, (ctypes.c_char_p,)),
    "fr_variant": (ctypes.c_char_p, ()),
    "fr_build": (ctypes.c_char_p, ()),
    "fr_panel_bytes": (ctypes.c_size_t, (_I, _I, _I, _P)),
    "fr_pack_all": (_I, (_I, _P, ctypes.c_size_t, _I, _I, _P)),
    "fr_unpack": (_I, (_P, _I, _P)),
    "fr_values": (_I, (_I, _P, ctypes.c_size_t, _I, _P)),
    "fr_threads": (_I, (_I,)),
    "fr_active_threads": (_I, ()),
    "fr_multiply": (_I, (_P, _P, _I, _P)),
    "fr_forward": (_I, (_P, _P, _P)),
    "fr_chain": (_I, (_P, _P, _P)),
    "fr_grow": (_I, (_P, _P, _P)),
}


def library() -> Any | None:
    """Return the library's functions, or None if it was not built, is of another version, or is turned off.

    The first call chooses the instruction set of this process. Raises ValueError if
    FORERUN_KERNELS names one that is unknown, that this machine lacks, or that is not the one
    that the process runs already; and if FORERUN_KERNELS has changed and another build of the
    library was installed meanwhile.
    """
    return _library(os.environ.get(VARIABLE, ""))[0]


def missing() -> str:
    """Return why the library is missing."""
    return _library(os.environ.get(VARIABLE, ""))[1]


def variant() -> str | None:
    """Return the name of the instruction set in use, or None without the library."""
    found = library()
    return None if found is None else str(found.fr_variant().decode())


def variants() -> list[str]:
    """Return the instruction sets that this machine can run, or none without the library."""
    found = library()
    return [] if found is None else _variants(found)


def build_id() -> str | None:
    """Return what identifies the loaded library, or None without it.

    Libraries of one identity compute the same bits (`forerun.csrc.build.build_id`).
    """
    found = library()
    return None if found is None else str(found.fr_build().decode())


def run(function: str, *arguments: Any) -> int:
    """Call a function of the library with torch's number of threads; return its result. Raises as `checked`."""
    import torch  # late: `forerun info` names the kernel without torch

    found = library()
    assert found is not None
    found.fr_threads(torch.get_num_threads())
    return checked(getattr(found, function)(*arguments))


def checked(code: int) -> int:
    """Return the result of a function of the library. Raises MemoryError, or RuntimeError for sizes that it refused."""
    if code == -2:
        raise MemoryError("no memory for a forward")
    if code < 0:
        raise RuntimeError("the C library refused sizes that do not fit together")
    return code


@cache
def _library(wanted: str) -> tuple[Any | None, str]:
    if wanted == "none":
        return None, f"{VARIABLE} is none"
    with _LOCK:
        found, why = _loaded()
        if found is None:
            return None, why
        if found.fr_find(wanted.encode()) < 0:
            allowed = f"{', '.join(_variants(found))} or none"
            raise ValueError(f"{VARIABLE} must be {allowed} on this machine, not {wanted!r}")
        if _CHOSEN:
            _check_process(found, wanted)
        else:
            found.fr_select(wanted.encode())
            _CHOSEN.append(found.fr_variant().decode())
        return found, ""


@cache
def _loaded() -> tuple[Any | None, str]:
    """Load the library, once a process, because a file that was installed later would be loaded
    beside it: a second library, with threads and a variant of its own."""
    path = HERE / LIBRARY
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return (
            None,
            "they were not built when forerun was installed: install a C compiler, then forerun again",
        )
    sizes = (_I * len(_STRUCTURES))()
    count = found.fr_sizes(sizes, len(sizes))
    fit = all(
        each is None or ctypes.sizeof(each) == size
        for each, size in zip(_STRUCTURES, sizes, strict=True)
    )
    if found.fr_abi() != ABI or count != len(sizes) or not fit:
        return None, f"{LIBRARY} is of another version: install forerun again"
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    origin = sources_id()
    if origin is not None and found.fr_build().decode().partition("-")[0] != origin:
        _LOG.warning(f"{LIBRARY} was built from other sources: install forerun again")
    return found, ""


def _check_process(found: Any, wanted: str) -> None:
    """Raise ValueError if a process that has chosen its variant is asked for another one, or if
    the library's file was replaced since it was loaded.

    Other threads are in the library by then. And what this process and a later one share, such as
    keys and values, must come from one build, because another one may round differently.
    """
    chosen = _CHOSEN[0]
    if wanted not in ("", chosen):
        running = f"this process runs {chosen!r} already"
        raise ValueError(f"{VARIABLE} is {wanted!r}, but {running}: start another one")
    path = HERE / LIBRARY
    installed = build_of(path) if path.is_file() else None
    loaded = found.fr_build().decode()
    if installed != loaded:
        running = f"this process runs {loaded}"
        raise ValueError(f"{LIBRARY} is build {installed} by now, but {running}: start it again")


def _variants(found: Any) -> list[str]:
    return [name for name in VARIANTS if found.fr_find(name.encode()) >= 0]
