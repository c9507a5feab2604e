"""Segments of texts, as files in safetensors: tokens with keys and values, or with hidden states.

A text is cut every LENGTH tokens. The key of a segment is a hash of its tokens and of the key of
the segment before it. So texts share the files of a common beginning, and a text that goes on adds
files for its new tokens alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from forerun.engine.recent_states import STATE_BLOCK
from forerun.engine.target import Capture
from forerun.failures import UNATTRIBUTABLE
from forerun.model.kv_cache import Stored

LENGTH = STATE_BLOCK  # tokens of a segment; the last one of a text may be shorter
LEAST = 16  # tokens of the shortest segment: with fewer, a file is not worth its name
FORMAT = "forerun segment 1"
STATES = "keys-values"  # the part of a segment with its keys and values
PART = rf"{STATES}|hidden-[0-9a-f]{{8}}"
# Of a file: its place (`Segment.place`), its key, its part.
NAME = re.compile(rf"([0-9a-f]{{32}}-[0-9a-f]{{8}})-([0-9a-f]{{32}})\.({PART})\.safetensors")

# Shapes and dtype of tensors by name, for n tokens.
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]


class DamagedError(ValueError):
    """A file is not what its name says."""


@dataclass(frozen=True)
class Shape:
    """Of the keys, or values, [G, n, D] of one layer."""

    groups: int
    size: int
    dtype: torch.dtype
    device: torch.device


# Keys and values of each layer; None for layers without buffers.
Layout = tuple[tuple[Shape, Shape] | None, ...]


def layout_of(stored: Stored) -> Layout:
    """Return the layout of keys and values."""

    def shape(part: Tensor) -> Shape:
        return Shape(part.shape[0], part.shape[2], part.dtype, part.device)

    return tuple(None if pair is None else (shape(pair[0]), shape(pair[1])) for pair in stored)


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens of a text, at most LENGTH.

    Attributes:
        parent: the key of the segment before it, or the root of the texts of one model and salt.
        start: the position of its first token in the text.
    """

    parent: str
    tokens: np.ndarray  # [n] int64
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def key(self) -> str:
        return key_of(self.parent, self.tokens)

    @property
    def place(self) -> str:
        """Return the beginning of the names of all segments with its parent and first LEAST
        tokens."""
        return f"{self.parent}-{_hash(self.tokens[:LEAST].tobytes(), 4)}"

    def file(self, part: str) -> str:
        """Return the name of the file with a part of it: STATES, or `hidden_part`."""
        return file_name(self.place, self.key, part)


def file_name(place: str, key: str, part: str) -> str:
    """Return the name of a segment's file."""
    return f"{place}-{key}.{part}.safetensors"


def hidden_part(capture: Capture) -> str:
    """Return the name of the part with hidden states."""
    return f"hidden-{_hash(repr(capture).encode(), 4)}"


def root_of(model: str, salt: str) -> str:
    """Return what the first segments of texts have in place of a parent. No salt can be read
    from it."""
    texts = f"{FORMAT} {LENGTH} {model}".encode()
    return _hash(texts + b"\0" + salt.encode("utf-8", "surrogatepass"))


def key_of(parent: str, tokens: np.ndarray) -> str:
    """Return the key of a segment."""
    return _hash(parent.encode() + tokens.astype("<i8").tobytes())


def _hash(data: bytes, size: int = 16) -> str:
    return blake2b(data, digest_size=size).hexdigest()


def split(root: str, tokens: Sequence[int] | np.ndarray) -> list[Segment]:
    """Cut a text into segments. A rest of fewer than LEAST tokens is left out."""
    whole = np.asarray(tokens, dtype=np.int64)
    segments: list[Segment] = []
    parent = root
    for start in range(0, len(whole) - LEAST + 1, LENGTH):
        segments.append(Segment(parent, whole[start : start + LENGTH], start))
        parent = segments[-1].key
    return segments


# Files.


def tensors_of(stored: Stored, start: int, end: int) -> dict[str, Tensor]:
    """Return copies on the CPU of keys and values of these positions, by name."""
    named = {}
    for layer, pair in enumerate(stored):
        if pair is not None:
            for name, part in zip(("keys", "values"), pair, strict=True):
                named[f"{layer}.{name}"] = copied(part[:, start:end])
    return named


def copied(part: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU."""
    return part.to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()


def stored_of(named: Mapping[str, Tensor], layout: Layout) -> Stored:
    """Return keys and values as `KVCache.view` has them, on their devices."""
    return [
        None
        if shapes is None
        else (
            named[f"{layer}.keys"].to(shapes[0].device),
            named[f"{layer}.values"].to(shapes[1].device),
        )
        for layer, shapes in enumerate(layout)
    ]


def expected_states(layout: Layout, count: int) -> Expected:
    """Return what a file with keys and values of `count` tokens holds."""
    return {
        f"{layer}.{name}": ((shape.groups, count, shape.size), shape.dtype)
        for layer, shapes in enumerate(layout)
        if shapes is not None
        for name, shape in zip(("keys", "values"), shapes, strict=True)
    }


def contents(tokens: np.ndarray, named: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a file."""
    whole = {"tokens": torch.from_numpy(tokens.astype(np.int64)), **named}
    return save(whole, _metadata(whole))


def _metadata(named: Mapping[str, Tensor]) -> dict[str, str]:
    return {"format": FORMAT, "checksum": str(checksum(named))}


def checksum(named: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of all tensors' bytes, in the order of their names."""
    found = 0
    for name in sorted(named):
        found = zlib.crc32(bytes_of(named[name]), found)
    return found


def bytes_of(part: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, not copied."""
    return part.detach().reshape(-1).view(torch.uint8).numpy().data


def read_tokens(path: Path, parent: str, key: str) -> np.ndarray:
    """Return the tokens [n] of a file. Raises DamagedError unless the key is theirs, and
    FileNotFoundError without a file."""
    tokens = _opened(path, ("tokens",))[0]["tokens"]
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or not LEAST <= len(tokens) <= LENGTH:
        raise DamagedError("its tokens are not those of a segment")
    found = tokens.numpy().copy()
    if key_of(parent, found) != key:
        raise DamagedError("its tokens are not those of its name")
    return found


def read(path: Path, tokens: np.ndarray, expected: Expected) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped, without the tokens.

    Raises DamagedError unless all of it is as it was written: names, shapes, dtypes, tokens, and
    the checksum. Raises FileNotFoundError without a file.
    """
    named, metadata = _opened(path)
    wanted = {"tokens": ((len(tokens),), torch.int64), **expected}
    if {name: (tuple(part.shape), part.dtype) for name, part in named.items()} != wanted:
        raise DamagedError("its names, shapes or dtypes are not those of the model")
    if metadata != _metadata(named):
        raise DamagedError("its checksum is another")
    if not np.array_equal(named.pop("tokens").numpy(), tokens):
        raise DamagedError("its tokens are others")
    return named


def _opened(path: Path, names: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors of a file, all of them without `names`, and its metadata."""
    try:
        with safe_open(path, "pt") as file:
            chosen = names or list(file.keys())
            return {name: file.get_tensor(name) for name in chosen}, file.metadata() or {}
    except (FileNotFoundError, *UNATTRIBUTABLE):
        raise
    except BaseException as error:  # the library may raise anything then, even a panic of Rust
        raise DamagedError(str(error)) from None
