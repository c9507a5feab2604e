"""The C library of `forerun/csrc`: its structures, its functions and its choice of instruction set.

The library is built when forerun is installed. It runs the best instruction set of the machine,
unless FORERUN_KERNELS names another one ("plain", "avx2", "avxvnni", "avx512vnni", "neon" or
"i8mm"). If it is "none", torch does the work, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from threading import Lock
from typing import Any

from forerun.csrc.build import HERE, LIBRARY, build_of, sources_id
from forerun.csrc.cores import memory_nodes

ABI = 9  # FORERUN_ABI of forerun.h, for which the structures below are written
VARIABLE = "FORERUN_KERNELS"  # the environment variable that names the instruction set
VARIANTS = ("plain", "avx2", "avxvnni", "avx512vnni", "neon", "i8mm")
_LOG = logging.getLogger("forerun")
_LOCK = Lock()  # guards `_CHOSEN`
_CHOSEN: list[str] = []  # the variant of this process, once it is chosen
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_SIZE = ctypes.c_size_t
_FLOAT = ctypes.c_float
_DOUBLE = ctypes.c_double
_TEXT = ctypes.c_char_p
_NO_MEMORY = -2  # FR_NO_MEMORY of forward.h


def _fields(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    """Return fields of one type for a structure."""
    return tuple((name, kind) for name in names)


# The structures have the order and the types of those in forerun.h, forward.h, chains.h and
# trees.h, which say what the fields mean. A pointer of None is NULL.


class MatrixArgument(ctypes.Structure):
    """A packed matrix (`fr_matrix`)."""

    _fields_ = (*_fields(_INT, "layout", "outputs", "inputs"), ("panels", _POINTER))


class NormArgument(ctypes.Structure):
    """A norm (`fr_norm`)."""

    _fields_ = _fields(_POINTER, "gain", "bias")


class RotationArgument(ctypes.Structure):
    """A rotation of queries and keys (`fr_rotation`)."""

    _fields_ = (*_fields(_POINTER, "cos", "sin", "scale"), *_fields(_INT, "dims", "is_interleaved"))


class ExpertsArgument(ctypes.Structure):
    """The experts of a layer (`fr_experts`)."""

    _fields_ = (
        *_fields(MatrixArgument, "router", "shared_gate"),
        *_fields(_POINTER, "gate", "up", "down", "router_bias", "choice_bias"),
        *_fields(_POINTER, "gate_bias", "up_bias", "down_bias"),
        *_fields(_INT, "count", "chosen", "scoring", "norms_weights"),
        ("factor", _FLOAT),
    )


class LayerArgument(ctypes.Structure):
    """A decoder layer (`fr_layer`)."""

    _fields_ = (
        *_fields(MatrixArgument, "q", "k", "v", "o", "gate", "up", "down"),
        *_fields(NormArgument, "attention_norm", "mlp_norm", "attention_after", "mlp_after"),
        *_fields(_POINTER, "q_bias", "o_bias", "k_bias", "v_bias"),
        *_fields(_POINTER, "gate_bias", "up_bias", "down_bias"),
        *_fields(_POINTER, "q_norm", "k_norm", "sinks", "experts"),
        *_fields(_INT, "window", "rotation", "activation"),
        *_fields(_INT, "norms_heads_together", "norms_heads_rotated", "is_parallel"),
    )


class ModelArgument(ctypes.Structure):
    """A model's layers, embedding and head (`fr_model`)."""

    _fields_ = (
        *_fields(_INT, "d", "heads", "groups", "size"),
        *_fields(_INT, "layers", "positions", "rotations", "vocabulary", "embed_format"),
        ("norms_by_mean", _INT),
        *_fields(_POINTER, "layer", "rotation"),
        ("norm", NormArgument),
        ("embed", _POINTER),
        ("embed_row", _LONG),
        *_fields(MatrixArgument, "head", "fuse", "alone"),
        *_fields(_FLOAT, "eps", "attention_scale", "score_cap", "logit_cap"),
        *_fields(_FLOAT, "embedding_factor", "residual_factor", "logit_factor"),
    )


class CacheArgument(ctypes.Structure):
    """The keys and values of one layer (`fr_cache`)."""

    _fields_ = (
        *_fields(_POINTER, "keys", "values"),
        *_fields(_LONG, "row", "group"),
        *_fields(_INT, "rows", "capacity", "is_float32"),
    )


class BatchArgument(ctypes.Structure):
    """The new entries of a forward (`fr_batch`)."""

    _fields_ = (
        *_fields(_INT, "n", "path"),
        *_fields(_POINTER, "tokens", "states", "row", "slot", "position", "length"),
        *_fields(_POINTER, "seen", "paths", "normed", "asked", "head", "extra", "logits"),
        *_fields(_POINTER, "after", "captured"),
        *_fields(_INT, "asks", "extras", "captures"),
    )


class ChainArgument(ctypes.Structure):
    """A fused draft of one row (`fr_chain_request`)."""

    _fields_ = (
        *_fields(_INT, "row", "length", "count", "max_tokens"),
        *_fields(_POINTER, "pending", "head", "names", "places", "extra", "ends"),
        *_fields(_POINTER, "numbers", "keys", "probs", "drafted", "probabilities"),
        *_fields(_INT, "extras", "ended", "sampler_vocabulary"),
        *_fields(_FLOAT, "min_probability", "min_product", "inverse_temperature", "top_p"),
    )


class GrowthArgument(ctypes.Structure):
    """Drafts of several rows by a head over hidden states (`fr_growth`)."""

    _fields_ = (
        *_fields(_INT, "rows", "n", "start", "depth", "width", "nodes", "context"),
        *_fields(_POINTER, "row", "length", "count", "limit", "pending", "features", "states"),
        *_fields(_POINTER, "head", "names", "logits", "information", "token_states"),
        *_fields(_POINTER, "old", "olds", "curves", "beams", "values"),
        *_fields(_POINTER, "tokens", "parents", "found"),
    )


# In the order of `fr_sizes`. None stands for a structure that only C uses (`fr_record`).
_STRUCTURES = (
    MatrixArgument,
    None,
    LayerArgument,
    ModelArgument,
    CacheArgument,
    BatchArgument,
    ChainArgument,
    GrowthArgument,
)
# {name: (type of the result, types of the arguments)}.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fr_select": (_INT, (_TEXT,)),
    "fr_find": (_INT, (_TEXT,)),
    "fr_variant": (_TEXT, ()),
    "fr_build": (_TEXT, ()),
    "fr_panel_bytes": (_SIZE, (_INT, _INT, _INT, _POINTER)),
    "fr_pack_all": (_INT, (_INT, _POINTER, _SIZE, _INT, _INT, _POINTER)),
    "fr_unpack": (_INT, (_POINTER, _INT, _POINTER)),
    "fr_values": (_INT, (_INT, _POINTER, _SIZE, _INT, _POINTER)),
    "fr_threads": (_INT, (_INT,)),
    "fr_active_threads": (_INT, ()),
    "fr_nodes": (_INT, (_POINTER, _POINTER, _INT)),
    "fr_multiply": (_INT, (_POINTER, _POINTER, _INT, _POINTER)),
    "fr_forward": (_INT, (_POINTER, _POINTER, _POINTER)),
    "fr_chain": (_INT, (_POINTER, _POINTER, _POINTER)),
    "fr_grow": (_INT, (_POINTER, _POINTER, _POINTER)),
    "fr_exp": (_DOUBLE, (_DOUBLE,)),
    "fr_log": (_DOUBLE, (_DOUBLE,)),
    "fr_log1p": (_DOUBLE, (_DOUBLE,)),
}


def library() -> Any | None:
    """Return the library's functions, or None without the library (`missing` says why).

    The first call chooses the instruction set of this process.

    Raises:
        ValueError: FORERUN_KERNELS names an instruction set that is unknown, that this machine
            lacks, or that is not the one that the process runs already. Or FORERUN_KERNELS has
            changed, and another build of the library was installed in the meantime.
    """
    return _library(os.environ.get(VARIABLE, ""))[0]


def missing() -> str:
    """Return why `library` returns None: not built, of another version, or turned off."""
    return _library(os.environ.get(VARIABLE, ""))[1]


def variant() -> str | None:
    """Return the name of the instruction set in use, or None without the library."""
    functions = library()
    return None if functions is None else str(functions.fr_variant().decode())


def variants() -> list[str]:
    """Return the instruction sets that this machine can run, or none without the library."""
    functions = library()
    return [] if functions is None else _variants(functions)


def build_id() -> str | None:
    """Return what identifies the loaded library, or None without it.

    Libraries of one identity compute the same bits (`forerun.csrc.build.build_id`).
    """
    functions = library()
    return None if functions is None else str(functions.fr_build().decode())


def run(function: str, *arguments: Any) -> int:
    """Call a function of the library with torch's number of threads; return its result.

    It raises what `checked` raises.
    """
    import torch  # here, because `forerun info` names the kernel without torch

    functions = library()
    assert functions is not None
    functions.fr_threads(torch.get_num_threads())
    return checked(getattr(functions, function)(*arguments))


def checked(code: int) -> int:
    """Return the result of a function of the library.

    Raises:
        MemoryError: the library got no memory.
        RuntimeError: the library refused sizes that do not fit together.
    """
    if code == _NO_MEMORY:
        raise MemoryError("no memory for a forward")
    if code < 0:
        raise RuntimeError("the C library refused sizes that do not fit together")
    return code


@cache
def _library(wanted: str) -> tuple[Any | None, str]:
    """Return the library's functions for a value of FORERUN_KERNELS, or None and the reason."""
    if wanted == "none":
        return None, f"{VARIABLE} is none"
    with _LOCK:
        functions, why = _loaded()
        if functions is None:
            return None, why
        if functions.fr_find(wanted.encode()) < 0:
            allowed = f"{', '.join(_variants(functions))} or none"
            raise ValueError(f"{VARIABLE} must be {allowed} on this machine, not {wanted!r}")
        if _CHOSEN:
            _check_process(functions, wanted)
        else:
            functions.fr_select(wanted.encode())
            spread(functions, memory_nodes())
            _CHOSEN.append(functions.fr_variant().decode())
        return functions, ""


def spread(functions: Any, nodes: Sequence[Iterable[int]]) -> None:
    """Spread the library's threads over nodes of memory, given as the cores of each.

    Weights then lie where the threads are that read them, because these pack them. With fewer than
    two nodes nothing changes.
    """
    if len(nodes) < 2:
        return
    cores = [core for node in nodes for core in sorted(node)]
    numbers = [number for number, node in enumerate(nodes) for _ in node]
    functions.fr_nodes((_INT * len(cores))(*cores), (_INT * len(cores))(*numbers), len(cores))


@cache
def _loaded() -> tuple[Any | None, str]:
    """Return the library's functions, or None and the reason.

    A process loads the library once. If a file that was installed later were loaded too, it would
    be a second library, with its own threads and its own variant.
    """
    try:
        functions = ctypes.CDLL(str(HERE / LIBRARY))
    except OSError:
        return None, (
            "they were not built when forerun was installed: "
            "install one of its wheels, or a C compiler and then forerun again"
        )
    if not _has_our_structures(functions):
        return None, f"{LIBRARY} is of another version: install forerun again"
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype = result
        function.argtypes = arguments
    origin = sources_id()
    if origin is not None and functions.fr_build().decode().partition("-")[0] != origin:
        _LOG.warning(f"{LIBRARY} was built from other sources: install forerun again")
    return functions, ""


def _has_our_structures(functions: Any) -> bool:
    """Return whether the library has this file's version, and structures of the same sizes."""
    sizes = (_INT * len(_STRUCTURES))()
    count = functions.fr_sizes(sizes, len(sizes))
    if functions.fr_abi() != ABI or count != len(sizes):
        return False
    return all(
        structure is None or ctypes.sizeof(structure) == size
        for structure, size in zip(_STRUCTURES, sizes, strict=True)
    )


def _check_process(functions: Any, wanted: str) -> None:
    """Check that the variant that this process has chosen may serve another value of the variable.

    Other threads may be inside the library already. And what this process shares with a later one,
    such as keys and values, must come from one build, because another build may round differently.

    Raises:
        ValueError: another variant is wanted, or the library's file was replaced after it was
            loaded.
    """
    chosen = _CHOSEN[0]
    if wanted not in ("", chosen):
        running = f"this process runs {chosen!r} already"
        raise ValueError(f"{VARIABLE} is {wanted!r}, but {running}: start another one")
    path = HERE / LIBRARY
    installed = build_of(path.read_bytes()) if path.is_file() else None
    loaded = functions.fr_build().decode()
    if installed != loaded:
        running = f"this process runs {loaded}"
        raise ValueError(f"{LIBRARY} is build {installed} by now, but {running}: start it again")


def _variants(functions: Any) -> list[str]:
    return [name for name in VARIANTS if functions.fr_find(name.encode()) >= 0]
