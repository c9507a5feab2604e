"""GGUF files with a fault are refused in one line that names it, before a weight is read."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.backends import prepare
from forerun.backends.gguf import model as gguf_model
from forerun.backends.gguf.model import load_gguf
from forerun.backends.gguf.tokenizer import gguf_tokenizer
from forerun.zoo.gguf_file import open_gguf
from forerun.zoo.source import gguf_in
from tests.support import ggufs
from tests.support.toys import refused_file

IDS = torch.randint(ggufs.VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))
# Without these a file is another model, and a right one.
OPTIONAL = ("output.weight",)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model cannot be filled with weights."""
    for name in ("_fill", "_fill_plain"):
        monkeypatch.setattr(gguf_model, name, None)


def place_of(whole: bytes, name: str) -> int:
    """Return where a tensor's name begins in the table of tensors."""
    return whole.index(struct.pack("<Q", len(name)) + name.encode()) + 8


def renamed(whole: bytes, name: str) -> bytes:
    """Return a file in which a tensor has another name."""
    place = place_of(whole, name)
    return whole[:place] + name.upper().encode() + whole[place + len(name) :]


def reshaped(whole: bytes, name: str) -> bytes:
    """Return a file in which a tensor's last two sizes have changed places; a vector is shorter."""
    place = place_of(whole, name) + len(name)
    (count,) = struct.unpack_from("<I", whole, place)
    sizes = list(struct.unpack_from(f"<{count}Q", whole, place + 4))
    changed = [sizes[0] - 1] if count == 1 else [*sizes[1::-1], *sizes[2:]]
    if changed == sizes:
        changed[-1] //= 2
    end = place + 4 + 8 * count
    return whole[: place + 4] + struct.pack(f"<{count}Q", *changed) + whole[end:]


def tensors_of_a_layer(path: Path) -> list[str]:
    """Return the tensors of the last layer, and those beside the layers."""
    file = open_gguf(path)
    last = max(int(name.split(".")[1]) for name in file.tensors if name.startswith("blk."))
    return [
        name
        for name in file.tensors
        if name.startswith(f"blk.{last}.") or not name.startswith("blk.")
    ]


@pytest.mark.parametrize("kind", ggufs.KINDS)
@pytest.mark.usefixtures("unread")
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.gguf"
    ggufs.write_kind(path, kind)
    whole = path.read_bytes()
    # By turns, because there are many.
    for number, name in enumerate(tensors_of_a_layer(path)):
        if number % 2 == 0 and name not in OPTIONAL:
            path.write_bytes(renamed(whole, name))
            assert f"it has no tensor {name}" in refused_file(path)
        else:
            path.write_bytes(reshaped(whole, name))
            assert f"{name} " in refused_file(path)


@pytest.mark.parametrize("kind", ggufs.KINDS)
@pytest.mark.usefixtures("unread")
def test_a_key_that_nobody_reads_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.gguf"
    architecture = ggufs.architecture_of(ggufs.small(kind))
    beginning = ("rope.", "attention.", "expert_")[list(ggufs.KINDS).index(kind) % 3]
    key = f"{architecture}.{beginning}unheard_of"
    ggufs.write_kind(path, kind, metadata={key: 2.0})
    assert f"it has {key}, which is not supported" in refused_file(path)


def in_pieces(folder: Path, count: int, kind: str = "llama") -> list[Path]:
    """Write a model in so many pieces, as `gguf-split` does. Return the pieces."""
    folder.mkdir(exist_ok=True)
    names = [f"a-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    model = ggufs.write_kind(folder / "whole.gguf", kind, "Q8_0")
    architecture = ggufs.architecture_of(model)
    tensors = list(open_gguf(folder / "whole.gguf").tensors.values())
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(folder / name, architecture)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        if not number:
            keys = ggufs.KINDS[kind].keys(model.config)
            metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
            metadata |= ggufs.metadata_of(model)
            metadata |= ggufs.tokenizer_metadata(writer, ggufs.VOCAB, "smollm")
            ggufs.add_metadata(writer, metadata)
        for tensor in tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (folder / "whole.gguf").unlink()
    return [folder / name for name in names]


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_any_piece_stands_for_the_whole_file(tmp_path: Path, kind: str) -> None:
    ggufs.write_kind(tmp_path / "b.gguf", kind, "Q8_0")
    expected = logits(load_gguf(tmp_path / "b.gguf")[0])
    pieces = in_pieces(tmp_path / "pieces", 3, kind)
    assert gguf_in(tmp_path / "pieces") in pieces
    for piece in pieces:
        for weights in (None, "int4"):
            model = load_gguf(piece, weights)[0]
            assert weights == "int4" or torch.equal(logits(model), expected)
    assert gguf_tokenizer(pieces[1])("the")["input_ids"]


@pytest.mark.usefixtures("unread")
def test_pieces_that_are_missing_or_mixed_up_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    pieces = in_pieces(folder, 3)
    whole = [piece.read_bytes() for piece in pieces]
    for piece, content in zip(pieces, whole, strict=True):
        piece.write_bytes(content[:-40])
        for opened in pieces:
            assert f"{piece}': it is cut short or damaged" in refused_file(opened)
        piece.write_bytes(content)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        pieces[first].write_bytes(whole[second])
        pieces[second].write_bytes(whole[first])
        words = (
            f"its name says that it is piece {first + 1} of 3, and its metadata say {second + 1}"
        )
        assert words in refused_file(pieces[2])
        pieces[first].write_bytes(whole[first])
        pieces[second].write_bytes(whole[second])
    other = in_pieces(tmp_path / "other", 3, "qwen3")
    shutil.copy(other[2], pieces[2])
    assert "its pieces have 17 tensors, and should have 20" in refused_file(pieces[0])
    pieces[2].unlink()
    assert gguf_in(folder) in pieces
    assert "its piece a-00003-of-00003.gguf is missing" in refused_file(pieces[1])
    pieces[0].rename(folder / "c.gguf")
    assert "one of 3 pieces, and its name does not say so" in refused_file(folder / "c.gguf")
    pieces[1].rename(folder / "d.gguf")
    assert "one of 3 pieces, and its name does not say so" in refused_file(folder / "d.gguf")


def test_files_that_are_cut_short_or_no_gguf_are_refused(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(num_hidden_layers=1))
    whole = path.read_bytes()
    data = min(tensor.data_offset for tensor in open_gguf(path).tensors.values())
    for size in (4, 7, 23, 60, 1000, data - 300, data, data + 1, len(whole) - 33):
        path.write_bytes(whole[:size])
        assert "cut short" in refused_file(path)
    for content in (b"", b"GG", b"PK\3\4" + whole):
        path.write_bytes(content)
        assert "no GGUF file" in refused_file(path)
    path.write_bytes(whole[:4] + b"\x09" + whole[5:])
    assert "version 9" in refused_file(path)
    ggufs.write(path, ggufs.small(num_hidden_layers=1), "F32", endianess=gguf.GGUFEndian.BIG)
    assert "big-endian" in refused_file(path)


HOSTILE = [0, 1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Damageable:
    """A file, or a piece of one, that is going to be damaged.

    Attributes:
        path: where the file lies.
        whole: its bytes as they are right.
        header: how many of them come before the weights.
    """

    path: Path
    whole: bytes
    header: int

    @classmethod
    def of(cls, path: Path) -> Damageable:
        """Read a file."""
        whole = path.read_bytes()
        # Weights come last, and pieces have some of the file's.
        own = [t for t in open_gguf(path).tensors.values() if t.name.encode() in whole]
        return cls(path, whole, min(int(tensor.data_offset) for tensor in own))


def damaged(file: Damageable, generator: np.random.Generator) -> bytes:
    """A file cut short, or with other numbers in its header, its table of tensors or a weight."""
    whole = file.whole
    if generator.random() < 0.1:
        return whole[: int(generator.integers(len(whole)))]
    changed = bytearray(whole)
    table = max(0, file.header - 1500)
    places = np.r_[0 : min(800, table), table : file.header]
    chosen = generator.choice(places, int(generator.integers(1, 4))).tolist()
    if generator.random() < 0.3:
        chosen.append(int(generator.integers(file.header, len(whole) - 8)))
    for place in chosen:
        width = int(generator.choice([1, 4, 8]))
        number = HOSTILE[int(generator.integers(len(HOSTILE)))] % 2 ** (8 * width)
        changed[place : place + width] = number.to_bytes(width, "little")
    return bytes(changed)


def damageable(folder: Path) -> Iterator[Damageable]:
    """Yield files of all readers: blocks of each size, tokenizers, experts, pieces."""
    folder.mkdir()
    wide = ggufs.small("qwen2", hidden_size=256, intermediate_size=256)
    yield Damageable.of(
        ggufs.write(folder / "a.gguf", ggufs.small(num_hidden_layers=1), "Q4_1", tokenizer=False)
    )
    yield Damageable.of(ggufs.write(folder / "b.gguf", wide, "Q6_K"))
    untied = ggufs.small("qwen3", tie_word_embeddings=False)
    yield Damageable.of(ggufs.write(folder / "c.gguf", untied, "Q8_0", pre="pieces"))
    for kind, type in (("qwen3moe", "Q8_0"), ("gpt-oss", "MXFP4"), ("qwen2moe", "F32")):
        ggufs.write_kind(folder / f"{kind}.gguf", kind, type)
        yield Damageable.of(folder / f"{kind}.gguf")
    for kind, type in (("gemma3", "Q8_0"), ("phi3", "IQ4_NL"), ("olmo3", "Q4_0")):
        ggufs.write_kind(folder / f"{kind}.gguf", kind, type)
        yield Damageable.of(folder / f"{kind}.gguf")
    yield from map(Damageable.of, in_pieces(folder / "pieces", 2, "granitemoe"))


def runs(source: Any, read: Any) -> bool:
    """Return whether a file gives a model, and run that."""
    made = read(source)
    if not isinstance(made, PreTrainedModel):
        return False
    model = prepare(made)
    model.add(0, 4)
    assert len(model.extend([0], [[0, 0]])[0]) == 2
    return True


@torch.inference_mode()
def test_damaged_files_are_refused_or_run(tmp_path: Path) -> None:
    """Each file is refused in one line, or loads and runs.

    `make sanitize` tries such files for FORERUN_FUZZ seconds.
    """
    files = list(damageable(tmp_path / "files"))
    generator = np.random.default_rng(int(os.environ.get("FORERUN_FUZZ_SEED", 0)))
    refused = set()
    ran = set()
    end = time.monotonic() + float(os.environ.get("FORERUN_FUZZ", 0))
    for number in itertools.count():
        if number >= 220 and time.monotonic() > end:
            break
        file = files[number % len(files)]
        file.path.write_bytes(damaged(file, generator))
        for read in (gguf_tokenizer, lambda path: load_gguf(path)[0]):
            try:
                if runs(file.path, read):
                    ran.add(file.path)
            except ValueError as error:
                assert f"'{file.path.parent}" in str(error) and "\n" not in str(error)
                refused.add(str(error))
        file.path.write_bytes(file.whole)
    assert len(refused) > 20 and len(ran) > 6
