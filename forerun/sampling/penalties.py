"""OpenAI's penalties and biases as logits processors. They depend on their arguments alone, so that drafts may be
judged with them: they are part of the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Takes from the scores of each token `frequency` for every time that it stands in the output, and `presence` if it
    stands there at all. The prompt does not count."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        output = input_ids[:, self.prompt_length :]
        if not output.shape[1]:
            return scores
        inside = output < scores.shape[-1]  # a draft's vocabulary may have less padding
        counts = torch.zeros_like(scores).scatter_add_(1, output * inside, inside.to(scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class LogitBias(LogitsProcessor):
    """Adds a number to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids, self.values = torch.tensor(list(bias)), torch.tensor([float(each) for each in bias.values()])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        inside = self.ids < scores.shape[-1]
        ids, values = self.ids[inside].to(scores.device), self.values[inside].to(scores.device, scores.dtype)
        return scores.index_add(1, ids, values.expand(len(scores), -1))
