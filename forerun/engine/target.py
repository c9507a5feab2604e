"""The protocol of a model, as the engine and its drafters use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forerun.engine.draft import Draft

# Hidden states that a forward returns: none, the LM head's inputs, or the states after each of these numbers of layers,
# side by side. 0 is for the embeddings; after all layers they are not normed.
Capture = Literal["", "head"] | tuple[int, ...]


class Output(NamedTuple):
    """Logits [N_r, V] of each sequence of a forward, and its hidden states [N_r, d] or None if none are captured."""

    logits: list[Tensor]
    hidden: list[Tensor] | None


@dataclass(frozen=True)
class Memory:
    """Bytes of keys and values, in use and allocated, and prompt tokens that were not run again.

    Attributes:
        read: those of `hits` that came from the prompt folder.
        disk: bytes of the prompt folder.
    """

    used: int
    allocated: int
    hits: int
    read: int = 0
    disk: int = 0


class Target(Protocol):
    """A model with its cache (`forerun.model.causal_lm.CausalLM`). A prompt is run alone and then joins as a row.

    Attributes:
        context: the length of the longest sequence; None for no bound.
        position_bytes: bytes of one position of a row.
        keeps_prefixes: whether it has a prefix store.
        prompt_read: number of tokens of the last prompt that were run.
        prompt_hidden: [n, d] hidden states of the last prompt; None if none were captured.
    """

    device: torch.device
    context: int | None

    @property
    def position_bytes(self) -> int: ...
    @property
    def keeps_prefixes(self) -> bool: ...
    @property
    def prompt_read(self) -> int: ...
    @property
    def prompt_hidden(self) -> Tensor | None: ...
    def clock(self) -> float: ...
    def memory(self) -> Memory: ...
    def fits(self, rows: int, reserve: int, budget: int) -> bool: ...
    def prefill(
        self,
        tokens: Sequence[int],
        chunk: int,
        salt: str = "",
        capture: Capture = "",
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Iterator[int]: ...
    def join(self, id: int, reserve: int = 0) -> None: ...
    def park(
        self,
        id: int,
        tokens: Sequence[int],
        hidden: Tensor | None = None,
        salt: str = "",
        capture: Capture = "",
    ) -> None: ...
    def forget_prompt(self) -> None: ...
    def forward(
        self, ids: Sequence[int], drafts: Sequence[Draft], capture: Capture = ""
    ) -> Output: ...
    def commit(self, ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None: ...
    def drop(self, id: int) -> None: ...
    def reset(self) -> None: ...
