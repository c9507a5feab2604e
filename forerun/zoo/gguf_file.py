"""What a GGUF file says of its model, and the bytes of its tensors.

`gguf.GGUFReader` decodes each string of a vocabulary by itself, which takes seconds. Here an array
is read in one piece.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from time import time
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    dequantize,
)
from gguf.gguf_reader import ReaderField, ReaderTensor

from forerun.zoo.formats import loaded_type, product_bytes, row_bytes
from forerun.zoo.pieces import pieces_of

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"  # missing if it is tied to the embedding
# Files that are parts of models for more than text, by their architectures.
_OTHER_KINDS = {"clip": "a projector of pictures or sound (mmproj)"}
_CHUNK = 1 << 22  # the numbers that are dequantised at a time
# A file that changed less than this many seconds ago may change again without a trace in its times,
# so what was read of it is not kept.
_SETTLED_SECONDS = 2


class _CutShortError(Exception):
    """The file ends before what its header announces."""


class _Reader(GGUFReader):
    """Reads an array in one piece. Strings stay as in the file, each after its length."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise _CutShortError
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + 12
        kind = GGUFValueType(int(item[0]))
        if kind == GGUFValueType.ARRAY:
            raise ValueError("its metadata have arrays of arrays")
        if kind == GGUFValueType.STRING:
            area = self._get(start, np.uint8, self._end_of_strings(start, int(count[0])) - start)
        else:
            area = self._get(start, self.gguf_scalar_to_np[kind], count[0])
        return 12 + area.nbytes, [item, count, area], [2], [GGUFValueType.ARRAY, kind]

    def _end_of_strings(self, start: int, count: int) -> int:
        """Return where the last of so many strings ends; each has its length before it."""
        end = start
        view = self.data.data
        for _ in range(count):
            end += 8 + struct.unpack_from("<Q", view, end)[0]
        return end


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header has been read.

    Attributes:
        path: the file, or the first of its pieces.
        fields: its metadata, by key.
        tensors: its tensors, by name.
        homes: the piece that a tensor lies in, by the tensor's name, if it is not `path`.
    """

    path: Path
    fields: dict[str, ReaderField]
    tensors: dict[str, ReaderTensor]
    homes: Mapping[str, Path] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The model's architecture, for example "llama"."""
        name: str = self.value("general.architecture", str)
        return name

    def error(self, reason: str) -> ValueError:
        """Return an error of one line that names the file."""
        return ValueError(f"cannot load {str(self.path)!r}: {reason}")

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of the metadata, or `default` if the file has none.

        Raises ValueError for a value that is not of the type `kind`.
        """
        field = self.fields.get(key)
        if field is None:
            return default
        is_text = field.types[1:] == [GGUFValueType.STRING]
        try:
            value = _strings(field) if is_text else field.contents()
        except UnicodeDecodeError:
            raise self.error(f"its metadata are damaged: {key} is no text") from None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is {_short(value)}, which is no {kind.__name__}")
        return value

    def own(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a number of the metadata that stands under the architecture's name.

        Raises ValueError if the number is missing and there is no default, and for a number that is
        not finite or not above 0.
        """
        name = f"{self.architecture}.{key}"
        number = self.value(name, kind, default)
        if number is None:
            raise self.error(f"its metadata have no {name}")
        if not 0 < number < math.inf:
            raise self.error(f"{name} is {number}; it must be above 0")
        return number

    def has_tokenizer_of(self, other: GgufFile) -> bool:
        """Return whether both files describe the same tokenizer, byte by byte.

        Which tokens begin and end a text is left out of the comparison.
        """
        ours = _tokenizer_parts(self)
        theirs = _tokenizer_parts(other)
        if ours.keys() != theirs.keys():
            return False
        return all(np.array_equal(ours[key], theirs[key]) for key in ours)

    def tensor(self, name: str) -> ReaderTensor:
        """Return a tensor by its name. Raises ValueError if there is none."""
        if name not in self.tensors:
            raise self.error(f"it has no tensor {name}")
        return self.tensors[name]

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """The bytes of all tensors by ggml's names of their types, the largest first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
        return dict(sizes.most_common())

    @property
    def weights(self) -> int:
        """The number of weights."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    @property
    def is_float(self) -> bool:
        """Whether all matrices are F32 or F16, which gives a model in float32."""
        matrices = [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]
        return all(tensor.tensor_type.name in ("F32", "F16") for tensor in matrices)

    @property
    def memory(self) -> int:
        """The bytes that the weights take in memory, in the file's formats.

        The embedding is among them. It counts twice if it is the LM head too, because a head is
        packed for products.
        """
        if self.is_float:
            return 4 * self.weights
        size = sum(_loaded_bytes(tensor) for tensor in self.tensors.values())
        if HEAD not in self.tensors and EMBEDDING in self.tensors:
            size += _matrix_bytes(self.tensors[EMBEDDING], is_head=True)
        return size

    @property
    def kv_bytes(self) -> int:
        """The bytes of a token's keys and values: in float16, or float32 in a model in float32."""
        heads = self.own("attention.head_count", int)
        head_size = self.own("embedding_length", int) // heads
        head_size = self.own("attention.key_length", int, head_size)
        kv_heads = self.own("attention.head_count_kv", int, heads)
        numbers = 2 * head_size * self.own("block_count", int) * kv_heads
        number_bytes = 4 if self.is_float else 2
        return int(numbers) * number_bytes

    def rows(self, tensor: ReaderTensor) -> Iterator[np.ndarray]:
        """Yield the bytes of a matrix, some rows [n, bytes] uint8 at a time.

        They are read from the file and not from its mapping, whose pages would stay in memory.
        """
        rows = math.prod(tensor.shape[1:].tolist())
        width = tensor.n_bytes // rows
        step = max(1, _CHUNK // int(tensor.shape[0]))
        for start in range(0, rows, step):
            count = min(step, rows - start) * width
            offset = tensor.data_offset + start * width
            home = self.homes.get(tensor.name, self.path)
            yield np.fromfile(home, np.uint8, count, offset=offset).reshape(-1, width)

    def check_type(self, name: str) -> None:
        """Raise ValueError if `gguf` cannot read a tensor's type."""
        type = self.tensor(name).tensor_type
        if not _is_readable(type):
            raise self.error(f"{name} is of the type {type.name}, which is not known")

    def forget_pages(self, tensor: ReaderTensor) -> None:
        """Let the system take back a tensor's pages, because what was packed is not read again."""
        data: Any = tensor.data
        while isinstance(data, np.ndarray | memoryview):
            data = data.base if isinstance(data, np.ndarray) else data.obj
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = int(tensor.data_offset) // mmap.PAGESIZE * mmap.PAGESIZE
            length = int(tensor.data_offset + tensor.n_bytes) - start
            data.madvise(mmap.MADV_DONTNEED, start, length)

    def floats(self, tensor: ReaderTensor) -> Iterator[np.ndarray]:
        """Yield a matrix in float32, some rows [n, in] at a time."""
        for rows in self.rows(tensor):
            values = dequantize(rows, tensor.tensor_type)
            yield np.ascontiguousarray(values, np.float32).reshape(-1, int(tensor.shape[0]))


def open_gguf(path: str | Path) -> GgufFile:
    """Read the header of a GGUF file.

    Any piece of a file in pieces (`name-00001-of-00003.gguf`) stands for the whole.

    Raises ValueError for a file that is no GGUF, is damaged, cut short, big-endian or no language
    model, and if a piece of it is missing.
    """
    pieces = pieces_of(Path(path))
    version: list[int] = []
    changed_at = 0.0
    for piece in pieces:
        try:
            facts = piece.stat()
        except FileNotFoundError as error:
            reason = f"its piece {piece.name} is missing" if len(pieces) > 1 else error.strerror
            raise GgufFile(Path(path), {}, {}).error(str(reason)) from None
        except OSError as error:
            raise GgufFile(piece, {}, {}).error(error.strerror or str(error)) from None
        version += [facts.st_ino, facts.st_ctime_ns, facts.st_size]
        changed_at = max(changed_at, facts.st_ctime)
    if time() - changed_at < _SETTLED_SECONDS:
        return _read.__wrapped__(pieces, tuple(version))
    return _read(pieces, tuple(version))


@lru_cache(maxsize=2)
def _read(pieces: tuple[Path, ...], version: tuple[int, ...]) -> GgufFile:
    """Read headers as `open_gguf` does. `version` differs between the files of one name."""
    first, *others = (_read_piece(piece) for piece in pieces)
    tensors = dict(first.tensors)
    homes: dict[str, Path] = {}
    for other in others:
        tensors |= other.tensors
        homes |= dict.fromkeys(other.tensors, other.path)
    file = replace(first, tensors=tensors, homes=homes)
    count = file.value("split.count", int, 0) or 1
    announced = file.value("split.tensors.count", int, len(tensors))
    if count != len(pieces):
        raise file.error(f"it is one of {count} pieces, and its name does not say so")
    for number, piece in enumerate([first, *others]):
        stated = piece.value("split.no", int, number)
        if stated != number:
            reason = f"its name says that it is piece {number + 1} of {len(pieces)}"
            raise piece.error(f"{reason}, and its metadata say {stated + 1}")
    if announced != len(tensors):
        raise file.error(f"its pieces have {len(tensors)} tensors, and should have {announced}")
    if file.architecture in _OTHER_KINDS:
        raise file.error(f"it is {_OTHER_KINDS[file.architecture]}, and no language model")
    return file


def _read_piece(path: Path) -> GgufFile:
    """Read the header of one file."""
    _check_magic(path)
    nameless = GgufFile(path, {}, {})
    try:
        reader = _Reader(path)
    except (_CutShortError, IndexError, struct.error):
        raise nameless.error("it is cut short or damaged") from None
    except Exception as error:  # damaged bytes may raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise nameless.error(f"it is damaged: {reason}") from None
    file = GgufFile(path, reader.fields, {tensor.name: tensor for tensor in reader.tensors})
    for tensor in reader.tensors:
        if 0 in tensor.shape or not len(tensor.shape):
            raise file.error(f"it is damaged: {tensor.name} is empty")
    return file


def _check_magic(path: Path) -> None:
    """Raise ValueError for a file that cannot be read, is no GGUF file or is big-endian."""
    file = GgufFile(path, {}, {})
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise file.error(error.strerror or str(error)) from None
    if head[:4] != b"GGUF":
        raise file.error("it is no GGUF file")
    if len(head) == 8 and head[4:6] == b"\0\0":
        raise file.error("it is a GGUF file in big-endian order")


@cache
def _is_readable(type: GGMLQuantizationType) -> bool:
    """Return whether `gguf` can dequantise a type, which only a trial shows."""
    block = np.zeros((1, GGML_QUANT_SIZES[type][1]), np.uint8)
    try:
        dequantize(block, type)
    except NotImplementedError:
        return False
    return True


def _loaded_bytes(tensor: ReaderTensor) -> int:
    """Return the bytes of a tensor in memory."""
    if len(tensor.shape) == 1 or tensor.tensor_type.name == "F32":
        return 4 * int(tensor.n_elements)
    if tensor.name == EMBEDDING:
        outputs, inputs = _sizes(tensor)
        return outputs * row_bytes(loaded_type(tensor.tensor_type), inputs)
    return _matrix_bytes(tensor, tensor.name == HEAD)


def _matrix_bytes(tensor: ReaderTensor, is_head: bool) -> int:
    outputs, inputs = _sizes(tensor)
    return product_bytes(loaded_type(tensor.tensor_type), outputs, inputs, is_head)


def _sizes(tensor: ReaderTensor) -> tuple[int, int]:
    """Return the outputs and inputs of a matrix, or of all matrices of experts together."""
    inputs, *others = tensor.shape.tolist()
    return math.prod(others), inputs


def _tokenizer_parts(file: GgufFile) -> dict[str, Any]:
    """Return the values that describe a file's tokenizer, without its special token ids."""
    return {
        key: field.parts[-1]
        for key, field in file.fields.items()
        if key.startswith("tokenizer.ggml.") and not key.endswith("_token_id")
    }


def _strings(field: ReaderField) -> list[str]:
    """Decode an array of strings from its bytes."""
    area = field.parts[-1].tobytes()
    strings = []
    place = 0
    while place < len(area):
        (size,) = struct.unpack_from("<Q", area, place)
        strings.append(area[place + 8 : place + 8 + size].decode())
        place += 8 + size
    return strings


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."
