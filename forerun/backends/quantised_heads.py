"""A head's layers and its drafts in C, with weights in 8 bits (`forerun.backends.quantised`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from torch.nn import functional

from forerun.backends.panels import (
    BLOCK_INPUTS,
    FLOAT_FORMATS,
    PackedMatrix,
    Product,
    RawMatrix,
    quantise,
)
from forerun.backends.quantised import Layers, Part, Pointers, lay_out
from forerun.backends.stored import StoredEmbedding
from forerun.backends.table import Norm, Rotation
from forerun.csrc.library import (
    GrowthArgument,
    LayerArgument,
    MatrixArgument,
    ModelArgument,
    library,
)
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache
from forerun.zoo.formats import format_number


@dataclass(frozen=True)
class Growth:
    """What `fr_grow` found at n places of the drafts of R rows.

    Attributes:
        tokens: [R, n, m] the last token of each of the m best paths at a place.
        parents: [R, n, m] which beam each path continues.
        found: [R, n, m] the values of the paths, the largest first.
        states: [n, R, d] the head's states.
        logits: [n, R, S] the logits of the states alone, before old logits and token information
            are added.
    """

    tokens: np.ndarray
    parents: np.ndarray
    found: np.ndarray
    states: Tensor
    logits: Tensor


class Beams:
    """The beams of the drafts of R rows in C, from which a call continues.

    Attributes:
        tokens: [R, w] the last token of each beam. A call replaces them.
        values: [R, w] the sum of the logs of each beam's probabilities. A call replaces them.
        start: places so far.
        ends: [R] the places that each row may have.
        nodes: the paths to find at a place.
        old: of each row, logits [o, S] that are added to those of its first o places, or None.
        curves: [R, n, 2] shift and slope of the calibration at each of the next n places, or None.
    """

    def __init__(
        self,
        roots: Sequence[int],
        width: int,
        nodes: int,
        ends: Sequence[int],
        old: Sequence[Tensor | None] = (),
    ) -> None:
        """Begin drafts of rows whose last tokens are `roots`, with `width` beams each."""
        self.tokens = np.array([[root] * width for root in roots], np.int32)
        # Only the first beam holds a path yet: that of the root.
        self.values = np.zeros((len(roots), width))
        self.values[:, 1:] = -np.inf
        self.start = 0
        self.nodes = nodes if width > 1 else 1
        self.ends = np.array(ends, np.int32)
        self.old: list[Tensor | None] = [None] * len(roots)
        if old:
            self.old = [None if logits is None else logits.contiguous() for logits in old]
        self.curves: np.ndarray | None = None


class QuantisedHead:
    """The layers of a lyanna or EAGLE-like head.

    Attributes:
        context: the number of positions.
        layers: the layers and the final norm.
    """

    def __init__(self, head: HiddenDrafter, embedding: RawMatrix, logits: PackedMatrix) -> None:
        """Pack a head.

        Args:
            head: the head, which is copied.
            embedding: the target's embedding.
            logits: the rows of the target's LM head for the hot set.
        """
        config = head.config
        layers = [layer for layer in head.layers if isinstance(layer, HeadLayer)]
        arguments = (LayerArgument * len(layers))()
        pointers = Pointers(arguments, embedding)
        for argument, layer in zip(arguments, layers, strict=True):
            _fill_layer(argument, layer, pointers)
        structure = ModelArgument(
            d=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=config.head_dim,
            layers=len(layers),
            vocabulary=min(embedding.out, config.vocab_size),
            embed_format=format_number(embedding.type),
            layer=ctypes.addressof(arguments),
            norm=pointers.norm(Norm(head.norm.weight)),
            embed=embedding.rows.ctypes.data,
            embed_row=embedding.rows.shape[1],
            fuse=_matrix(head.fuse.weight, pointers),
            eps=config.rms_norm_eps,
        )
        if config.kind == "lyanna":
            structure.alone = _matrix(head.fuse.weight[:, : config.hidden_size], pointers)
        frequencies = layers[0].frequencies(torch.device("cpu"))
        self.layers = Layers(structure, [Rotation(frequencies)], pointers)
        self.context = config.max_position_embeddings
        self._logits = logits
        self._hot = head.hot.cpu().numpy().astype(np.int32)
        self._answer: PackedMatrix | None = None
        self._states: Tensor | None = None
        if head.informed:
            # Blocks must divide the rank, which is filled up with zeros.
            fill = (0, -config.rank % BLOCK_INPUTS)
            states = head.token_states(torch.arange(config.vocab_size)).float()
            self._states = functional.pad(states, fill)
            self._answer = _packed(functional.pad(head.answer.weight, fill))

    def __call__(self, inputs: Inputs, cache: KVCache, tokens: Tensor | None) -> Tensor:
        """Return the next states [n, d] after those of `inputs`.

        `tokens` [n] are those after the given states, or None to run states alone.
        """
        batch = lay_out(inputs, cache)
        # A row at its end drafts as deep as its neighbours. What is beyond the context is not used.
        np.minimum(batch.position, self.context - 1, out=batch.position)
        ids = None if tokens is None else tokens.to(torch.int32).numpy()
        _, states = self.layers(batch, cache, tokens=ids, states=inputs.given, capture="head")
        assert states is not None
        return states

    def information(self, tokens: Tensor) -> Tensor:
        """Return the token information T [.., S] of tokens [..]."""
        assert self._answer is not None and self._states is not None
        return self._answer(self._states[tokens].flatten(0, -2)).view(*tokens.shape, -1)

    def grow(
        self,
        cache: KVCache,
        ids: Sequence[int],
        features: Tensor,
        tokens: Sequence[Sequence[int]],
        most: int,
        beams: Beams,
    ) -> Growth:
        """Draft `most` places of R rows.

        Args:
            cache: where features are kept.
            ids: the rows' sequences.
            features: [n, d] the next features of the rows, which are kept; or, to continue a draft,
                its last states [R, d]. They are overwritten.
            tokens: of each row, the tokens after its features; or, to continue, one token.
            most: the number of places.
            beams: the drafts so far.
        """
        start = beams.start
        rows = [cache.row(id) for id in ids]
        counts = [len(after) for after in tokens]
        lengths = [cache.lengths[row] for row in rows]
        if start:
            kept = lengths
            begins = [length + start - 1 for length in lengths]
        else:
            kept = [length + count for length, count in zip(lengths, counts, strict=True)]
            begins = lengths
        cache.reserve(max(rows) + 1, max(kept) + start + most - 1)
        growth = self._empty_growth(len(ids), most, beams.nodes)
        numbers: dict[str, Sequence[int] | np.ndarray] = {
            "row": rows,
            "length": begins,
            "count": counts,
            "limit": beams.ends,
            "pending": [token for after in tokens for token in after],
        }
        parts: dict[str, Part] = {
            name: np.asarray(values, np.int32) for name, values in numbers.items()
        }
        argument = GrowthArgument(
            rows=len(ids),
            n=sum(counts),
            start=start,
            depth=most,
            width=beams.tokens.shape[1],
            nodes=beams.nodes,
            context=self.context,
        )
        parts["features"] = features
        parts |= self._fixed_parts()
        parts |= _beam_parts(beams)
        self.layers.run("fr_grow", cache, argument, **parts, **vars(growth))
        beams.start += most
        for row, length in zip(rows, kept, strict=True):
            cache.lengths[row] = length + start + most - 1
        cache.crop_to(ids, kept)
        return growth

    def _empty_growth(self, rows: int, places: int, nodes: int) -> Growth:
        """Return memory for the library to write to."""
        return Growth(
            tokens=np.empty((rows, places, nodes), np.int32),
            parents=np.empty((rows, places, nodes), np.int32),
            found=np.empty((rows, places, nodes)),
            states=torch.empty(places, rows, self.layers.width),
            logits=torch.empty(places, rows, self._logits.out),
        )

    def _fixed_parts(self) -> dict[str, Part]:
        """Return the parts of `GrowthArgument` that are the same in each call."""
        return {
            "head": self._logits.argument,
            "names": self._hot,
            "token_states": self._states,
            "information": None if self._answer is None else self._answer.argument,
        }


def _beam_parts(beams: Beams) -> dict[str, Part]:
    """Return the parts of `GrowthArgument` that the drafts so far give."""
    curves = beams.curves
    addresses = [0 if logits is None else logits.data_ptr() for logits in beams.old]
    places = [0 if logits is None else len(logits) for logits in beams.old]
    return {
        "old": np.array(addresses, np.uint64),
        "olds": np.asarray(places, np.int32),
        "beams": beams.tokens,
        "values": beams.values,
        "curves": None if curves is None else np.ascontiguousarray(curves, np.float32),
    }


def _fill_layer(argument: LayerArgument, layer: HeadLayer, pointers: Pointers) -> None:
    """Set a layer's matrices, biases and norms in the library's structure."""
    queries = layer.heads * layer.size
    keys = layer.groups * layer.size
    sizes = queries, keys, keys
    q, k, v = layer.qkv.weight.split(sizes)
    argument.q = _matrix(q, pointers)
    argument.k = _matrix(k, pointers)
    argument.v = _matrix(v, pointers)
    if layer.qkv.bias is not None:
        q_bias, k_bias, v_bias = layer.qkv.bias.split(sizes)
        argument.q_bias = pointers.floats(q_bias)
        argument.k_bias = pointers.floats(k_bias)
        argument.v_bias = pointers.floats(v_bias)
    gate, up = layer.gate_up.weight.chunk(2)
    argument.gate = _matrix(gate, pointers)
    argument.up = _matrix(up, pointers)
    argument.o = _matrix(layer.out.weight, pointers)
    argument.down = _matrix(layer.down.weight, pointers)
    argument.attention_norm = pointers.norm(Norm(layer.before_attention.weight))
    argument.mlp_norm = pointers.norm(Norm(layer.before_mlp.weight))


def _matrix(weight: Tensor, pointers: Pointers) -> MatrixArgument:
    """Return a weight in 8 bits for the library's structures."""
    packed = _packed(weight)
    pointers.keep(packed)
    return packed.argument


def _packed(weight: Tensor) -> PackedMatrix:
    packed = quantise(weight, Type.Q8_0)
    assert isinstance(packed, PackedMatrix)
    return packed


def quantised_head(
    head: HiddenDrafter, embedding: nn.Module, logits: Product
) -> QuantisedHead | None:
    """Return a head that runs in C, or None if the library is missing or does not support it.

    Args:
        head: the head. Blocks must divide its sizes.
        embedding: the target's embedding, in a form that `embedding_rows` knows.
        logits: the rows of the target's LM head for the hot set, packed. An LM head with a bias is
            not supported.
    """
    config = head.config
    inputs = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_dim,
    )
    rows = embedding_rows(embedding)
    if library() is None or rows is None or not isinstance(logits, PackedMatrix):
        return None
    if any(size % BLOCK_INPUTS for size in inputs) or config.head_dim % 16:
        return None
    return QuantisedHead(head, rows, logits)


def embedding_rows(embedding: nn.Module) -> RawMatrix | None:
    """Return an embedding's rows, or None for an unknown form.

    A factor by which the embedding may multiply them is left out.
    """
    if isinstance(embedding, StoredEmbedding):
        return embedding.stored
    if not isinstance(embedding, nn.Embedding) or embedding._forward_hooks:
        return None
    weight = embedding.weight
    if weight.dtype not in FLOAT_FORMATS or type(weight.data) is not Tensor:
        return None
    return RawMatrix.plain(weight)
