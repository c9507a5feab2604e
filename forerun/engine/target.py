"""The protocol of a model, as the engine and its drafters use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forerun.engine.draft import Draft

# Hidden states that a forward returns: none, the LM head's inputs, or the states after each of
# these numbers of layers, side by side. 0 stands for the embeddings. The states after all layers
# are taken before the last norm.
Capture = Literal["", "head"] | tuple[int, ...]


# How many tokens a chunk of a prompt has at most. A function is asked before each chunk.
ChunkSize = int | Callable[[], int]


@dataclass(frozen=True)
class EngineChunks:
    """The chunk size of an engine, which also knows who waits for its steps.

    Attributes:
        size: says how many tokens the next chunk has at most.
        is_alone: says whether there is one request alone, so that no other waits for its steps.
    """

    size: Callable[[], int]
    is_alone: Callable[[], bool]

    def __call__(self) -> int:
        """Return how many tokens the next chunk has at most."""
        return self.size()


class Output(NamedTuple):
    """What a forward returns, by sequence."""

    logits: list[Tensor]  # [N_r, V] each
    hidden: list[Tensor] | None  # [N_r, d] each; None if none are captured


@dataclass(frozen=True)
class Memory:
    """The memory of keys and values, and what it has saved.

    Attributes:
        used: bytes in use.
        allocated: bytes allocated.
        hits: prompt tokens that did not run, because their keys and values were known.
        read: the part of `hits` that came from the prompt folder.
        disk: bytes of the prompt folder.
        kept: bytes of the prefix store.
        kept_limit: most bytes of the prefix store.
    """

    used: int
    allocated: int
    hits: int
    read: int = 0
    disk: int = 0
    kept: int = 0
    kept_limit: int = 0


class Target(Protocol):
    """A model with its cache, as `forerun.model.causal_lm.CausalLM` implements it.

    A prompt is run alone, and then joins the other sequences as a row.

    Attributes:
        device: where the model is.
        context: the most tokens of a sequence; None for no limit.
    """

    device: torch.device
    context: int | None

    @property
    def position_bytes(self) -> int:
        """Return the bytes of keys and values of one position of a row."""

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether it has a prefix store."""

    @property
    def prompt_read(self) -> int:
        """Return how many tokens of the last prompt are read, with those of a known prefix."""

    @property
    def prompt_hidden(self) -> Tensor | None:
        """Return the hidden states [n, d] of the last prompt's last n positions, or None."""

    def clock(self) -> float:
        """Return a time in seconds."""

    def memory(self) -> Memory:
        """Return the memory of keys and values."""

    def fits(self, rows: int, reserve: int, budget: int) -> bool:
        """Return whether `budget` bytes hold `rows` rows and one more of `reserve` positions."""

    def prefill(
        self,
        tokens: Sequence[int],
        chunk: ChunkSize,
        cache_salt: str = "",
        capture: Capture = "",
        on_logits: Callable[[Tensor], None] | None = None,
        reads: int | None = None,
    ) -> Iterator[int]:
        """Run a prompt in chunks of at most `chunk` tokens, and yield the number in each.

        A 0 is yielded after another piece of work on the prompt.

        `on_logits` is called with the logits [n, V] of each chunk. Only the last captured states
        are kept, as many as a head needs that reads `reads` positions (`RecentStates`).

        Prompts may be read in turns. The last prompt is the one whose iterator has gone on last.
        """

    def join(self, id: int, reserve: int = 0) -> None:
        """Add a row for a sequence, with the last prompt and memory for `reserve` positions."""

    def save_prefix(
        self,
        id: int,
        tokens: Sequence[int],
        hidden: Tensor | None = None,
        cache_salt: str = "",
        capture: Capture = "",
    ) -> None:
        """Save a row's committed positions in the prefix store, if any, right before `drop`.

        `hidden` [n, d] are the states at the last n of these positions.
        """

    def forget_prompt(self) -> None:
        """Empty the cache of the last prompt, unless that is still being read."""

    def forward(self, ids: Sequence[int], drafts: Sequence[Draft], capture: Capture = "") -> Output:
        """Run the drafts of rows. Their keys and values are provisional until `commit`."""

    def commit(self, ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of the nodes on these paths of the last forward."""

    def drop(self, id: int) -> None:
        """Remove a row, if it exists."""

    def reset(self) -> None:
        """Remove all rows, and the last prompt."""


def next_size(chunk: ChunkSize) -> int:
    """Return the number of tokens that the next chunk has at most."""
    return chunk if isinstance(chunk, int) else chunk()


def is_alone(chunk: ChunkSize) -> bool:
    """Return whether an engine says that its chunks are those of the only request."""
    return isinstance(chunk, EngineChunks) and chunk.is_alone()
