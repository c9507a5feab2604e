"""The C library of `forerun/csrc`: its structures, its functions and its choice of instruction set.

It is built when forerun is installed. It runs the best instruction set of the machine unless FORERUN_KERNELS names
another ("plain", "avx2", "avxvnni", "avx512vnni", "neon"). With "none", torch does the work, more slowly.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from forerun.csrc.build import HERE, LIBRARY

ABI, VARIABLE = 5, "FORERUN_KERNELS"
VARIANTS = ("plain", "avx2", "avxvnni", "avx512vnni", "neon")
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class MatrixArgument(ctypes.Structure):
    """`fr_matrix`."""

    _fields_ = (*((name, _I) for name in ("layout", "outputs", "inputs")), ("panels", _P))


class LayerArgument(ctypes.Structure):
    """`fr_layer`."""

    _fields_ = (
        *((name, MatrixArgument) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _P) for name in ("first", "second", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")),
        *((name, _I) for name in ("window", "turned")),
    )


class ModelArgument(ctypes.Structure):
    """`fr_model`."""

    _fields_ = (
        *((name, _I) for name in ("d", "heads", "groups", "size", "layers", "positions", "vocabulary", "embed_format")),
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
        *((name, _P) for name in ("tokens", "states", "row", "slot", "position", "length", "seen", "paths")),
        *((name, _P) for name in ("normed", "asked", "head", "extra", "logits", "after", "captured")),
        *((name, _I) for name in ("asks", "extras", "captures")),
    )


class ChainArgument(ctypes.Structure):
    """`fr_chain_request`."""

    _fields_ = (
        *((name, _I) for name in ("row", "length", "count", "most")),
        *((name, _P) for name in ("pending", "head", "names", "places", "extra", "ends", "numbers", "keys", "probs")),
        *((name, _P) for name in ("drafted", "probabilities")),
        *((name, _I) for name in ("extras", "ended", "among")),
        *((name, _F) for name in ("least", "product", "turn", "top_p")),
    )


class GrowthArgument(ctypes.Structure):
    """`fr_growth`."""

    _fields_ = (
        *((name, _I) for name in ("rows", "n", "start", "most", "width", "nodes", "context")),
        *((name, _P) for name in ("row", "length", "count", "limit", "pending", "features", "states", "head", "names")),
        *((name, _P) for name in ("logits", "information", "token_states", "old", "olds", "curves", "beams", "values")),
        *((name, _P) for name in ("tokens", "parents", "found")),
    )


# In the order of `fr_sizes`; None: the library alone has it.
_STRUCTURES = (
    *(MatrixArgument, None, LayerArgument, ModelArgument, CacheArgument, BatchArgument, ChainArgument),
    GrowthArgument,
)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fr_select": (_I, (ctypes.c_char_p,)),
    "fr_variant": (ctypes.c_char_p, ()),
    "fr_panel_bytes": (ctypes.c_size_t, (_I, _I, _I, _P)),
    "fr_pack_all": (_I, (_I, _P, ctypes.c_size_t, _I, _I, _P)),
    "fr_unpack": (_I, (_P, _I, _P)),
    "fr_values": (_I, (_I, _P, ctypes.c_size_t, _I, _P)),
    "fr_threads": (_I, (_I,)),
    "fr_multiply": (_I, (_P, _P, _I, _P)),
    "fr_forward": (_I, (_P, _P, _P)),
    "fr_chain": (_I, (_P, _P, _P)),
    "fr_grow": (_I, (_P, _P, _P)),
}


def library() -> Any | None:
    """Return the library's functions, or None if it was not built, is of another version, or is turned off.

    Raises ValueError if FORERUN_KERNELS names an instruction set that is unknown or that this machine lacks.
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
    try:
        found = ctypes.CDLL(str(HERE / LIBRARY))
    except OSError:
        return None, "they were not built when forerun was installed: install a C compiler, then forerun again"
    sizes = (_I * len(_STRUCTURES))()
    count = found.fr_sizes(sizes, len(sizes))
    fit = all(each is None or ctypes.sizeof(each) == size for each, size in zip(_STRUCTURES, sizes, strict=True))
    if found.fr_abi() != ABI or count != len(sizes) or not fit:
        return None, f"{LIBRARY} is of another version: install forerun again"
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    if found.fr_select(wanted.encode()) < 0:
        raise ValueError(f"{VARIABLE} must be {', '.join(_variants(found))} or none on this machine, not {wanted!r}")
    return found, ""


def _variants(found: Any) -> list[str]:
    here = [name for name in VARIANTS if found.fr_select(name.encode()) >= 0]
    found.fr_select(os.environ.get(VARIABLE, "").encode())
    return here
