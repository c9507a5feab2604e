"""What the forward in C knows of a model: a table of its layers, without architectures' names.

A file of `forerun.backends.architectures` fills in the table of a model of transformers' class.
`forerun.backends.quantised` hands it to the library (`fr_model` of `forerun/csrc/forward.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from forerun.backends.stored import Linear, StoredEmbedding

# In the order of the library's numbers (`forward.h`), by transformers' names. "clamped" is ours.
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu2", "clamped")
# How scores of experts become weights, in the order of the library's numbers.
SCORINGS = ("softmax", "softmax of chosen", "sigmoid")
# Other names of these.
_SAME_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
# Rotations whose frequencies do not depend on the length of a text. Those of longrope do not below
# its original context, which `forerun.model.support.context_of` makes the limit.
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn", "longrope", "ntk_alpha")


@dataclass(frozen=True)
class Norm:
    """A norm of a state.

    Attributes:
        gain: [d] what the normed numbers are multiplied with.
        bias: [d] what is added to them, or None.
    """

    gain: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries and keys by their positions.

    Attributes:
        frequencies: [r / 2] of the first r numbers of a head, which are rotated.
        scaling: what cosines and sines are multiplied with.
        kind: one of FIXED_ROTATIONS, or another one, for which there is no forward in C.
        is_interleaved: whether a number is rotated with its neighbour, and not a half with the
            other.
        query_growth, query_step: queries at position p are multiplied with
            1 + query_growth * log(1 + floor(p / query_step)); a growth of 0 is none.
    """

    frequencies: Tensor
    scaling: float = 1.0
    kind: str = "default"
    is_interleaved: bool = False
    query_growth: float = 0.0
    query_step: int = 1


@dataclass(frozen=True)
class ExpertsTable:
    """The experts of a layer, of which a token takes a few, weighted by a router.

    Attributes:
        router: [E] scores of a state.
        gate, up, down: the matrices of each expert, which have biases either all or not.
        chosen: how many experts a token takes.
        scoring: one of SCORINGS, how scores become weights.
        are_weights_normed: whether the weights of a token are divided by their sum.
        choice_bias: [E] what is added to scores for the choice alone, or None.
        factor: of the weights; 0: none.
        shared_gate: a matrix of one output, by whose sigmoid the layer's own MLP is multiplied.
    """

    router: Linear
    gate: Sequence[Linear]
    up: Sequence[Linear]
    down: Sequence[Linear]
    chosen: int
    scoring: str = "softmax"
    are_weights_normed: bool = False
    choice_bias: Tensor | None = None
    factor: float = 0.0
    shared_gate: Linear | None = None

    @property
    def linears(self) -> list[Linear]:
        """All matrices."""
        shared = [] if self.shared_gate is None else [self.shared_gate]
        return [self.router, *shared, *self.gate, *self.up, *self.down]


@dataclass(frozen=True)
class LayerTable:
    """A decoder layer. None, 0 and False stand for what a layer does not have.

    Matrices bring their own biases.

    Attributes:
        q, k, v, o: the matrices of attention. Without `k` and `v`, `q` has the outputs of all.
        gate, up, down: the matrices of the MLP, which a layer with experts may lack. Without `up`,
            `gate` has the outputs of both, or the MLP has no gate and `gate` is its first matrix.
        attention_norm, mlp_norm: the norms of what attention and the MLP read.
        attention_after, mlp_after: the norms of what they add to the state.
        q_norm, k_norm: gains of RMS norms of queries and keys: [D] for each head, or [H D] and
            [G D] for all heads of a token together.
        are_heads_normed_rotated: whether these norms come after the rotation.
        rotation: the number of the layer's rotation in `ModelTable.rotations`, or None.
        window: a token sees so many last positions, itself included; 0: all.
        experts: what is added to the MLP, or stands for it.
        sinks: [H] scores that count in the softmax of each head, without a value.
        activation: one of ACTIVATIONS.
        is_parallel: whether the MLP reads what attention reads. There is no `mlp_norm` then.
    """

    q: Linear
    o: Linear
    gate: Linear | None = None
    down: Linear | None = None
    k: Linear | None = None
    v: Linear | None = None
    up: Linear | None = None
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    attention_after: Norm | None = None
    mlp_after: Norm | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    are_heads_normed_rotated: bool = False
    rotation: int | None = 0
    window: int = 0
    sinks: Tensor | None = None
    experts: ExpertsTable | None = None
    activation: str = "silu"
    is_parallel: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether the layer has the form of Llama's, from which a head can be copied."""
        norms = (self.attention_after, self.mlp_after, self.q_norm, self.sinks, self.experts)
        matrices = (self.k, self.up, self.attention_norm, self.mlp_norm)
        return (
            all(norm is None for norm in norms)
            and all(matrix is not None for matrix in matrices)
            and self.activation == "silu"
            and not self.is_parallel
        )

    @property
    def linears(self) -> list[Linear]:
        """All matrices."""
        places = (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)
        own = [linear for linear in places if linear is not None]
        return own if self.experts is None else own + self.experts.linears


@dataclass(frozen=True)
class ModelTable:
    """A model. A factor or a limit of 0 is none.

    Attributes:
        width: the size d of a state.
        heads, groups, size: H heads of D numbers, over G groups of keys and values.
        embedding, head: the embedding and the LM head.
        layers: the decoder layers.
        norm: the norm after the last layer.
        rotations: the rotations that layers name.
        eps: of all norms.
        are_norms_by_mean: whether norms of states subtract the mean first (LayerNorm).
        attention_scale: of scores; 0: 1 / sqrt(D).
        score_cap, logit_cap: scores and logits x become cap * tanh(x / cap).
        embedding_factor, residual_factor, logit_factor: what embeddings, what attention and MLPs
            add to the state, and logits are multiplied with.
    """

    width: int
    heads: int
    groups: int
    size: int
    embedding: nn.Embedding | StoredEmbedding
    head: Linear
    layers: Sequence[LayerTable]
    norm: Norm
    rotations: Sequence[Rotation]
    eps: float
    are_norms_by_mean: bool = False
    attention_scale: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_factor: float = 0.0
    residual_factor: float = 0.0
    logit_factor: float = 0.0

    @property
    def linears(self) -> list[Linear]:
        """All matrices, the LM head first."""
        return [self.head, *(linear for layer in self.layers for linear in layer.linears)]

    @property
    def is_in_c(self) -> bool:
        """Whether the library has all that the table asks for: vectors of 8 must divide sizes."""
        if self.head.bias is not None or self.width % 8 or self.size % 8:
            return False
        for rotation in self.rotations:
            if rotation.kind not in FIXED_ROTATIONS or len(rotation.frequencies) % 8:
                return False
        if any(activation_of(layer.activation) not in ACTIVATIONS for layer in self.layers):
            return False
        return all(linear.in_features % 8 == 0 for linear in self.linears)


def activation_of(name: str) -> str:
    """Return the name of an activation in ACTIVATIONS, or the name itself if it is not there."""
    return _SAME_ACTIVATIONS.get(name, name)
