"""What tests of heads over hidden states share."""

from __future__ import annotations

from collections import abc
from typing import Any

import torch
from torch import Tensor

from forerun.engine.sequence import Request, Sequence
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import capture_hidden_states

# Sizes of a head that the C library can run.
OF_C: dict[str, Any] = {"head_dim": 32, "intermediate_size": 64, "hot": 16, "rank": 32}


def features_of(target: CausalLM, tokens: list[int]) -> Tensor:
    with torch.no_grad(), capture_hidden_states(target.model) as captured:
        target.model(input_ids=torch.tensor([tokens]))
    return captured[0][0]


def sequence(tokens: abc.Sequence[int], id: int = 0, new: int = 30, **request: Any) -> Sequence:
    return Sequence(Request(list(tokens), new, **request), id)
