"""A Medusa-like head (arXiv 2401.10774): a block for each place ahead, none of which knows the tokens of the others.

It is read from the folder that `--method-arg folder=` names. There is no training for it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.backends.heads import head_rows
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.sequence import Sequence
from forerun.engine.step import Drafter
from forerun.methods.base import Parts
from forerun.methods.hidden import HeadDrafter, Heads
from forerun.model.causal_lm import CausalLM


@dataclass(frozen=True)
class Medusa(Heads):
    """Drafts with the head in `folder`, as deep as it was trained to be, at most."""

    folder: str = ""
    name: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.folder:
            raise ValueError("medusa needs its head: give folder=FOLDER")

    def build(self, parts: Parts) -> Drafter:
        head: MedusaHead = MedusaHead.from_pretrained(self.folder, local_files_only=True)
        if head.config.target != parts.target.fingerprint:
            raise ValueError(f"the head in {self.folder} belongs to another target")
        return MedusaDrafter(self, MedusaLM(head, parts.target))


class MedusaConfig(PreTrainedConfig):
    """Settings of a head: `states` places ahead, blocks of two matrices of `intermediate_size`."""

    model_type = "forerun-medusa"

    def __init__(
        self,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        states: int = 4,
        hot_size: int = 64,
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_size, self.intermediate_size, self.states = hidden_size, intermediate_size, states
        self.hot_size, self.target = hot_size, target or {}
        super().__init__(**kwargs)


class MedusaHead(PreTrainedModel):
    """softmax(W_o (h + D_k silu(A_k h))) k places ahead of the last feature h. `hot` [S] are its tokens."""

    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.hot: Tensor
        self.register_buffer("hot", torch.zeros(config.hot_size, dtype=torch.long))
        sizes = config.hidden_size, config.intermediate_size
        self.up, self.down = (
            nn.ModuleList([nn.Linear(*each, bias=False) for _ in range(config.states)]) for each in (sizes, sizes[::-1])
        )
        self.post_init()


class MedusaLM:
    """The head with the target's LM head for its hot set, as `HeadDrafter` takes it. It has no cache."""

    def __init__(self, head: MedusaHead, target: CausalLM) -> None:
        self.head, self.hot, self.states = head.to(target.device), head.hot.to(target.device), head.config.states
        self.width, self.vocab_size, self.dtype = head.config.hidden_size, target.vocab_size, torch.float32
        self.device = target.device
        self._scores = head_rows(target, self.hot, self.width, self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """[n, S] of states [n, d]."""
        return functional.linear(states, *self._scores)

    def ahead(self, states: Tensor, places: int) -> Tensor:
        """States [B, K, d] of the next K places after states [B, d]."""
        pairs = zip(self.head.up[:places], self.head.down[:places], strict=True)
        return torch.stack([states + down(functional.silu(up(states))) for up, down in pairs], 1)

    def prefill(self, *_: Any) -> Iterator[int]:
        return iter(())

    def drop(self, id: int) -> None:
        pass


class MedusaDrafter(HeadDrafter):
    """All places ahead at once, each without knowing the tokens of the others (arXiv 2401.10774)."""

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        return super().admit(seq, hidden if hidden is None else hidden[-1:], chunk)

    def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        head, begun = self.head, perf_counter()
        deep = min(self.depth, head.states)
        nothing = torch.zeros(1, head.width, dtype=head.dtype, device=head.device)
        features = [self.features[seq.id] for seq in seqs]
        last = torch.cat([own if len(own) else nothing for own in features])
        found = head.logits(head.ahead(last, deep).flatten(0, 1)).view(len(seqs), deep, -1)
        self.seconds, self.forwards = perf_counter() - begun, 1
        return self.grow(
            seqs,
            lambda k, tokens, at: found[:, k, None].expand(-1, tokens.shape[1], -1),
            [min(limit, deep) for limit in limits],
        )

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for seq, verdict, states in zip(seqs, verdicts, hidden, strict=True):
            self.features[seq.id] = states[verdict.path[-1]][None]
