"""Segments of texts, as files in safetensors: tokens with keys and values, or with hidden states.

A text is cut every SEGMENT_LENGTH tokens. The key of a segment is a hash of its tokens and of the
key of the segment before it. So texts share the files of a common beginning, and a text that
continues another one adds files for its new tokens only.
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
from forerun.model.prefix_store import Tokens

SEGMENT_LENGTH = STATE_BLOCK  # tokens of a segment; the last one of a text may be shorter
MIN_SEGMENT = 16  # tokens of the shortest segment; fewer are not worth a file
FORMAT = "forerun segment 1"
STATES = "keys-values"  # the part of a segment with its keys and values
PART = rf"{STATES}|hidden-[0-9a-f]{{8}}"
# The name of a file: the place (`Segment.place`) and the key of its segment, and its part.
NAME = re.compile(rf"([0-9a-f]{{32}}-[0-9a-f]{{8}})-([0-9a-f]{{32}})\.({PART})\.safetensors")

# The shape and dtype that a file's tensors must have, by name.
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]


class DamagedError(ValueError):
    """A file whose content does not match its name or its checksum."""


@dataclass(frozen=True)
class Shape:
    """What the keys, or the values, [G, n, D] of one layer are, whatever n."""

    groups: int  # G
    size: int  # D
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
    """Tokens of a text, at most SEGMENT_LENGTH.

    Attributes:
        parent: the key of the segment before it; of a first segment, the root of the texts of one
            model and salt (`root_of`).
        start: the position of its first token in the text.
    """

    parent: str
    tokens: Tokens
    start: int

    @property
    def end(self) -> int:
        """Return the position after its last token in the text."""
        return self.start + len(self.tokens)

    @property
    def key(self) -> str:
        """Return its key, which stands for its tokens and all before them."""
        return key_of(self.parent, self.tokens)

    @property
    def place(self) -> str:
        """Return how the names of its files begin.

        All segments with its parent and its first MIN_SEGMENT tokens have the same place.
        """
        return f"{self.parent}-{_hash(self.tokens[:MIN_SEGMENT].tobytes(), 4)}"

    def file(self, part: str) -> str:
        """Return the name of the file with a part of it: STATES, or a `hidden_part`."""
        return file_name(self.place, self.key, part)


def file_name(place: str, key: str, part: str) -> str:
    """Return the name of a segment's file."""
    return f"{place}-{key}.{part}.safetensors"


def hidden_part(capture: Capture) -> str:
    """Return the name of the part with hidden states."""
    return f"hidden-{_hash(repr(capture).encode(), 4)}"


def root_of(model: str, cache_salt: str) -> str:
    """Return what the first segments of texts have in place of a parent.

    It is a hash, from which the salt cannot be read.
    """
    texts = f"{FORMAT} {SEGMENT_LENGTH} {model}".encode()
    return _hash(texts + b"\0" + cache_salt.encode("utf-8", "surrogatepass"))


def key_of(parent: str, tokens: Tokens) -> str:
    """Return the key of a segment."""
    return _hash(parent.encode() + tokens.astype("<i8").tobytes())


def _hash(data: bytes, size: int = 16) -> str:
    return blake2b(data, digest_size=size).hexdigest()


def split(root: str, tokens: Sequence[int] | Tokens) -> list[Segment]:
    """Cut a text into segments. A last one of fewer than MIN_SEGMENT tokens is left out."""
    whole = np.asarray(tokens, dtype=np.int64)
    segments: list[Segment] = []
    parent = root
    for start in range(0, len(whole) - MIN_SEGMENT + 1, SEGMENT_LENGTH):
        segments.append(Segment(parent, whole[start : start + SEGMENT_LENGTH], start))
        parent = segments[-1].key
    return segments


# Files.


def tensors_of(stored: Stored, start: int, end: int) -> dict[str, Tensor]:
    """Return copies on the CPU of the keys and values of positions `start` to `end`, by name."""
    named: dict[str, Tensor] = {}
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
    stored: Stored = []
    for layer, shapes in enumerate(layout):
        if shapes is None:
            stored.append(None)
        else:
            keys = named[f"{layer}.keys"].to(shapes[0].device)
            values = named[f"{layer}.values"].to(shapes[1].device)
            stored.append((keys, values))
    return stored


def expected_states(layout: Layout, count: int) -> Expected:
    """Return what a file with keys and values of `count` tokens holds."""
    expected: Expected = {}
    for layer, shapes in enumerate(layout):
        if shapes is not None:
            for name, shape in zip(("keys", "values"), shapes, strict=True):
                expected[f"{layer}.{name}"] = (shape.groups, count, shape.size), shape.dtype
    return expected


def contents(tokens: Tokens, named: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a file."""
    whole = {"tokens": torch.from_numpy(tokens.astype(np.int64)), **named}
    return save(whole, _metadata(whole))


def _metadata(named: Mapping[str, Tensor]) -> dict[str, str]:
    return {"format": FORMAT, "checksum": str(checksum(named))}


def checksum(named: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of all tensors' bytes, in the order of their names."""
    value = 0
    for name in sorted(named):
        value = zlib.crc32(bytes_of(named[name]), value)
    return value


def bytes_of(part: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, not copied."""
    return part.detach().reshape(-1).view(torch.uint8).numpy().data


def read_tokens(path: Path, parent: str, key: str) -> Tokens:
    """Return the tokens [n] of a file.

    Raises DamagedError unless `key` is their key, and FileNotFoundError without a file.
    """
    stored = _opened(path, ("tokens",))[0]["tokens"]
    is_segment = stored.dtype == torch.int64 and stored.dim() == 1
    if not is_segment or not MIN_SEGMENT <= len(stored) <= SEGMENT_LENGTH:
        raise DamagedError("its tokens are not those of a segment")
    tokens = stored.numpy().copy()
    if key_of(parent, tokens) != key:
        raise DamagedError("its tokens do not match its name")
    return tokens


def read(path: Path, tokens: Tokens, expected: Expected) -> dict[str, Tensor]:
    """Return the tensors of a file except its tokens, mapped into memory.

    Raises DamagedError unless names, shapes, dtypes, tokens and the checksum are as they were
    written. Raises FileNotFoundError without a file.
    """
    named, metadata = _opened(path)
    wanted = {"tokens": ((len(tokens),), torch.int64), **expected}
    if {name: (tuple(part.shape), part.dtype) for name, part in named.items()} != wanted:
        raise DamagedError("its names, shapes or dtypes are not those of the model")
    if metadata != _metadata(named):
        raise DamagedError("its checksum is wrong")
    if not np.array_equal(named.pop("tokens").numpy(), tokens):
        raise DamagedError("its tokens are not those of the text")
    return named


def _opened(path: Path, names: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of these names, or all without `names`, and the metadata of a file."""
    try:
        with safe_open(path, "pt") as file:
            chosen = names or list(file.keys())
            return {name: file.get_tensor(name) for name in chosen}, file.metadata() or {}
    except (FileNotFoundError, *UNATTRIBUTABLE):
        raise
    except BaseException as error:  # a damaged file may raise anything, even a panic of Rust
        raise DamagedError(str(error)) from None
