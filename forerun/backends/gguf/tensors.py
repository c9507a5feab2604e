"""Matrices of a GGUF file in the forms of `forerun.backends.bits`."""

from __future__ import annotations

from collections import Counter

import torch
from gguf import GGMLQuantizationType as Type
from gguf.gguf_reader import ReaderTensor
from torch import Tensor

from forerun.backends.bits import Blocks, Dense, Packed, join, pack, quantise
from forerun.backends.gguf.reader import GgufFile
from forerun.backends.scores import Scores, scores
from forerun.backends.tiles import Tiles

EMBEDDING = "token_embd.weight"
BITS = {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q8_0: 8}  # the types that `Blocks` can have as they are
FLOATS = (Type.F32, Type.F16)
_BYTES = {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q8_0: 34}  # of a block of 32


class Matrices:
    """The matrices of a file, in the bits that were asked for.

    Attributes:
        kind: "int4", "int8", "bfloat16", or None for the file's own bits.
        changes: how many matrices were stored otherwise than in the file, by type and what became of them.
    """

    def __init__(self, file: GgufFile, kind: str | None) -> None:
        self.file, self.kind = file, kind
        self.changes: Counter[tuple[str, str]] = Counter()
        self._table: Blocks | None = None  # the embedding, which a tied LM head is packed from

    def scores(self, tensor: ReaderTensor) -> Scores:
        """The LM head, over the file's own values, or over 8 bits or bfloat16 where these were asked for."""
        type = tensor.tensor_type
        if tensor.name == EMBEDDING and self._table is not None:
            return scores(self._table)
        if type in BITS and self.kind in (None, "int4", "int8"):
            return scores(self.blocks(tensor, BITS[type]))
        if self.kind == "bfloat16" or type in (*FLOATS, Type.BF16):
            return scores(self.dense(tensor))
        return scores(self.blocks(tensor, 8))

    def product(self, tensor: ReaderTensor, order: Tensor | None = None) -> Packed | Tiles | Dense:
        """A matrix for products, its outputs in another order where one is given."""
        kind, type = self.kind, tensor.tensor_type
        if kind is None:
            kind = "bfloat16" if type in (*FLOATS, Type.BF16) else f"int{BITS.get(type, 8)}"
        if kind == "bfloat16":
            dense = self.dense(tensor)
            return Dense(dense if order is None else dense[order])
        blocks = self.blocks(tensor, int(kind.removeprefix("int")))
        return pack(blocks if order is None else blocks.rows(order))

    def embedding(self, tensor: ReaderTensor) -> Blocks | Tensor:
        """Of the tokens: in the file's own blocks wherever it has some, as it is looked up and not multiplied; else in
        8 bits, or in float32 where few bits were not asked for."""
        type = tensor.tensor_type
        few = self.kind in ("int4", "int8") or (self.kind is None and type not in (*FLOATS, Type.BF16))
        if type not in BITS and not few:
            return self.whole(tensor)
        self._table = self.blocks(tensor, BITS.get(type, 8))
        return self._table

    def blocks(self, tensor: ReaderTensor, bits: int) -> Blocks:
        """The file's own blocks if they have these bits. Others are de-quantised, some rows at a time, and quantised
        anew."""
        if tensor.name == EMBEDDING and self._table is not None and self._table.bits == bits:
            return self._table
        if BITS.get(tensor.tensor_type) == bits:
            return join([decode(rows, tensor.tensor_type) for rows in self.file.rows(tensor)])
        if tensor.shape[0] % 32:
            inputs = int(tensor.shape[0])
            raise self.file.error(
                f"{tensor.name} has {inputs} inputs, which blocks of 32 do not divide: choose bfloat16"
            )
        self.changes[tensor.tensor_type.name, f"stored anew in {bits} bits"] += 1
        return join([quantise(rows, bits) for rows in self.file.floats(tensor)])

    def dense(self, tensor: ReaderTensor) -> Tensor:
        """[out, in] bfloat16."""
        if tensor.tensor_type == Type.BF16:
            return torch.cat([rows.view(torch.bfloat16) for rows in self.file.rows(tensor)])
        self.changes[tensor.tensor_type.name, "rounded to bfloat16"] += 1
        return torch.cat([rows.bfloat16() for rows in self.file.floats(tensor)])

    def whole(self, tensor: ReaderTensor) -> Tensor:
        """[out, in] float32, as the file has it."""
        parts = list(self.file.floats(tensor))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def note(self) -> str | None:
        """What was changed, in one line."""
        parts = [
            f"{count} {type} {'matrix' if count == 1 else 'matrices'} {how}"
            for (type, how), count in sorted(self.changes.items())
        ]
        return f"{self.file.path.name}: {', '.join(parts)}" if parts else None


def decode(raw: Tensor, type: Type) -> Blocks:
    """The blocks of rows [n, bytes] as the file has them, with scales in float32 (ggml: block_q4_0, block_q4_1,
    block_q8_0)."""
    each = raw.unflatten(1, (-1, _BYTES[type]))
    scales = _halves(each[..., :2])
    if type == Type.Q8_0:
        return Blocks((each[..., 2:] ^ 128).flatten(1), scales, -128 * scales, 8)  # from -128.. to 0..
    least = -8 * scales if type == Type.Q4_0 else _halves(each[..., 2:4])
    pairs = each[..., -16:]  # numbers i and i + 16 share a byte
    return Blocks(torch.cat([pairs & 15, pairs >> 4], -1).flatten(1), scales, least, 4)


def _halves(pairs: Tensor) -> Tensor:
    """float32 of float16 in bytes [.., 2]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1).float()
