"""What a GGUF file says of its model, and the bytes of its tensors.

`gguf.GGUFReader` looks at each string of a vocabulary by itself, which takes seconds. Arrays are one piece here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import time
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, dequantize
from gguf.gguf_reader import ReaderField, ReaderTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
_CHUNK = 1 << 22  # numbers that are de-quantised at a time


def find(source: str | Path) -> Path | None:
    """Return the GGUF file that a user's name for a model stands for, None for other models.

    It is a path that ends in .gguf, or a folder with one such file and no config.json. Raises ValueError for a path
    that is no file, and for a folder with several.
    """
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {str(source)!r}")
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(
        file for file in path.glob("*") if file.suffix.lower() == ".gguf" and file.is_file()
    )
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{str(source)!r} holds several GGUF files; give one of {names}")
    return files[0] if files else None


class _CutShortError(Exception):
    pass


class _Reader(GGUFReader):
    """Reads an array in one piece. Strings stay as they stand in the file, each behind its length."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise _CutShortError
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, count, start = (
            self._get(orig_offs, np.uint32),
            self._get(orig_offs + 4, np.uint64),
            orig_offs + 12,
        )
        kind = GGUFValueType(int(item[0]))
        if kind == GGUFValueType.STRING:
            end, view = start, self.data.data
            for _ in range(int(count[0])):
                end += 8 + struct.unpack_from("<Q", view, end)[0]
            area = self._get(start, np.uint8, end - start)
        elif kind == GGUFValueType.ARRAY:
            raise ValueError("its metadata have arrays of arrays")
        else:
            area = self._get(start, self.gguf_scalar_to_np[kind], count[0])
        return 12 + area.nbytes, [item, count, area], [2], [GGUFValueType.ARRAY, kind]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header has been read."""

    path: Path
    fields: dict[str, ReaderField]
    tensors: dict[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        return self.value("general.architecture", str)

    def error(self, reason: str) -> ValueError:
        """One line that names the file."""
        return ValueError(f"cannot load {str(self.path)!r}: {reason}")

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """A metadata value, `default` where the file has none. Raises ValueError for one that is not of this kind."""
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            found = (
                _strings(field) if field.types[1:] == [GGUFValueType.STRING] else field.contents()
            )
        except UnicodeDecodeError:
            raise self.error(f"its metadata are damaged: {key} is no text") from None
        if isinstance(found, int) and not isinstance(found, bool) and kind is float:
            found = float(found)
        if type(found) is not kind:
            raise self.error(f"{key} is {_short(found)}, which is no {kind.__name__}")
        return found

    def own(self, key: str, kind: type, default: Any = None) -> Any:
        """As `value`, of a number under the architecture's name. Raises ValueError for one that is missing where there
        is no default, for numbers that are not finite, and for any that are not above 0."""
        name = f"{self.architecture}.{key}"
        found = self.value(name, kind, default)
        if found is None:
            raise self.error(f"its metadata have no {name}")
        if not 0 < found < math.inf:
            raise self.error(f"{name} is {found}; it must be above 0")
        return found

    def has_tokenizer_of(self, other: GgufFile) -> bool:
        """Whether both files describe the same tokenizer, but for which tokens begin and end a text, byte by byte."""

        def described(file: GgufFile) -> dict[str, Any]:
            fields = {
                key: field
                for key, field in file.fields.items()
                if key.startswith("tokenizer.ggml.")
            }
            return {
                key: field.parts[-1]
                for key, field in fields.items()
                if not key.endswith("_token_id")
            }

        ours, theirs = described(self), described(other)
        return ours.keys() == theirs.keys() and all(
            np.array_equal(ours[key], theirs[key]) for key in ours
        )

    def tensor(self, name: str) -> ReaderTensor:
        """Raises ValueError where there is none of this name."""
        if name not in self.tensors:
            raise self.error(f"it has no tensor {name}")
        return self.tensors[name]

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of all tensors by ggml's names of their types, most first."""
        found: Counter[str] = Counter()
        for tensor in self.tensors.values():
            found[tensor.tensor_type.name] += int(tensor.n_bytes)
        return dict(found.most_common())

    @property
    def weights(self) -> int:
        """The number of weights."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    @property
    def is_float(self) -> bool:
        """Whether all matrices are F32 or F16, which gives a model in float32."""
        return all(
            each.tensor_type.name in ("F32", "F16")
            for each in self.tensors.values()
            if len(each.shape) > 1
        )

    @property
    def memory(self) -> int:
        """Bytes that the weights take as the file has them; Q2_K and Q3_K take more than this."""
        return 4 * self.weights if self.is_float else sum(self.bytes_by_type.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token, in float16, or in a model in float32."""
        heads = self.own("attention.head_count", int)
        size = self.own("attention.key_length", int, self.own("embedding_length", int) // heads)
        numbers = (
            2
            * size
            * self.own("block_count", int)
            * self.own("attention.head_count_kv", int, heads)
        )
        return numbers * (4 if self.is_float else 2)

    def rows(self, tensor: ReaderTensor) -> Iterator[np.ndarray]:
        """Yield the bytes of a matrix, some rows [n, bytes] uint8 at a time.

        They are read anew, so that no page of the file stays in memory.
        """
        rows = math.prod(tensor.shape[1:].tolist())
        width, step = tensor.n_bytes // rows, max(1, _CHUNK // int(tensor.shape[0]))
        for start in range(0, rows, step):
            count, offset = min(step, rows - start) * width, tensor.data_offset + start * width
            yield np.fromfile(self.path, np.uint8, count, offset=offset).reshape(-1, width)

    def forget_pages(self, tensor: ReaderTensor) -> None:
        """Let the system take back the pages of a tensor: what has been packed is not read again."""
        data: Any = tensor.data
        while isinstance(data, np.ndarray | memoryview):
            data = data.base if isinstance(data, np.ndarray) else data.obj
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = int(tensor.data_offset) // mmap.PAGESIZE * mmap.PAGESIZE
            data.madvise(
                mmap.MADV_DONTNEED, start, int(tensor.data_offset + tensor.n_bytes) - start
            )

    def floats(self, tensor: ReaderTensor) -> Iterator[np.ndarray]:
        """Yield the matrix in float32, some rows [n, in] at a time. Raises ValueError for types without floats."""
        for rows in self.rows(tensor):
            try:
                values = dequantize(rows, tensor.tensor_type)
            except NotImplementedError:
                raise self.error(
                    f"{tensor.name} is of the type {tensor.tensor_type.name}, which is not known"
                ) from None
            yield np.ascontiguousarray(values, np.float32).reshape(-1, int(tensor.shape[0]))


def _strings(field: ReaderField) -> list[str]:
    area, place, found = field.parts[-1].tobytes(), 0, []
    while place < len(area):
        (size,) = struct.unpack_from("<Q", area, place)
        found.append(area[place + 8 : place + 8 + size].decode())
        place += 8 + size
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."


def open_gguf(path: str | Path) -> GgufFile:
    """Reads the header.

    Raises ValueError for a file that is no GGUF, is damaged, cut short, big-endian or one of several shards, and for an
    architecture that is not in ARCHITECTURES.
    """
    path = Path(path)
    try:
        facts = path.stat()
    except OSError as error:
        raise GgufFile(path, {}, {}).error(error.strerror or str(error)) from None
    is_new = time() - facts.st_ctime < 2  # it may change again without a trace in its times
    return (_read.__wrapped__ if is_new else _read)(
        path, (facts.st_ino, facts.st_ctime_ns, facts.st_size)
    )


@lru_cache(maxsize=2)
def _read(path: Path, version: tuple[int, ...]) -> GgufFile:
    """As `open_gguf`. `version` differs between files of one name."""
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
    try:
        reader = _Reader(path)
    except (_CutShortError, IndexError, struct.error):
        raise file.error("it is cut short or damaged") from None
    except Exception as error:  # what damaged bytes bring about
        raise file.error(f"it is damaged: {(str(error) or repr(error)).splitlines()[0]}") from None
    file = GgufFile(path, reader.fields, {tensor.name: tensor for tensor in reader.tensors})
    for tensor in reader.tensors:
        if 0 in tensor.shape or not len(tensor.shape):
            raise file.error(f"it is damaged: {tensor.name} is empty")
    shards = file.value("split.count", int, 1)
    if shards > 1:
        raise file.error(
            f"it is one of {shards} shards; join them with llama.cpp's gguf-split --merge"
        )
    if file.architecture not in ARCHITECTURES:
        raise file.error(
            f"its architecture is {file.architecture!r}; known are {', '.join(ARCHITECTURES)}"
        )
    return file
