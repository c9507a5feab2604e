"""What the frozen target says about texts to train on. Its states are those that were kept while it wrote them, or are
computed once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forerun.model import CausalLM, same_model
from forerun.train.texts import Texts

REMEMBERED = 5 * 2**30  # bytes of features, those of 4 million tokens of states of 640 numbers


class Known(NamedTuple):
    """What the target says about texts.

    Attributes:
        features: [B, T, d] what a head takes: the LM head's inputs, or the states below the last layer.
        states: [B, T, d] the LM head's inputs, which a head predicts.
        logits: of places [n], which are numbered as if all texts were one, their logits [n, V].
    """

    features: Tensor
    states: Tensor
    logits: Callable[[Tensor], Tensor]


Recall = Callable[
    [Tensor], Known
]  # `features_of` of some texts by their indices [B], no wider than the longest of them


@torch.no_grad()
def features_of(judge: CausalLM, tokens: Tensor, feature: str = "head") -> Known:
    """What the target says about tokens [B, T]. For `feature` see `HiddenConfig`."""
    with judge.hearing() as heard, judge.hearing("below" if feature == "below" else "") as below:
        logits = judge.model(input_ids=tokens, use_cache=False).logits
    states, flat = heard[0].float(), logits.flatten(0, 1)
    return Known(below[0].float() if below else states, states, lambda at: flat[at].float())


def judged(judge: CausalLM, texts: Texts, feature: str = "head") -> Recall:
    """What the target says about these texts. Each goes through it once, as far as REMEMBERED bytes hold what comes of
    it, and not at all where its states were kept while this target wrote it."""
    head = copy.deepcopy(judge.head).bfloat16()  # autocast would round it anew for each product

    @torch.no_grad()
    def logits(states: Tensor) -> Tensor:
        return head(states.bfloat16()).float()

    first = features_of(judge, texts.take(torch.arange(1)).tokens, feature)
    states = first.states.flatten(0, 1)
    # Some models cap or scale their head's logits.
    whole = first.logits(torch.arange(len(states), device=states.device))
    by_head = torch.allclose(judge.head(states.to(judge.dtype)).float(), whole, atol=1e-2, rtol=1e-2)
    kept = feature == "head" and texts.target is not None and same_model(texts.target, judge.fingerprint)
    store: dict[int, Tensor] = {}  # [ends, d] by row
    left = REMEMBERED

    def recall(rows: Tensor) -> Known:
        nonlocal left
        if not by_head:
            return features_of(judge, texts.take(rows).tokens, feature)
        own = {row: store.get(row) for row in rows.tolist()}
        if kept:
            own = {row: texts.states(row) if found is None else found for row, found in own.items()}
        new = [row for row, found in own.items() if found is None]
        if new:
            known = features_of(judge, texts.take(torch.tensor(new, device=rows.device)).tokens, feature)
            # Both are stored where they differ.
            both = torch.cat([known.features, known.states], -1) if feature == "below" else known.states
            for row, each in zip(new, both.bfloat16(), strict=True):
                found = own[row] = each[: int(texts.ends[row])].clone()
                left -= found.nbytes
                if left >= 0:
                    store[row] = found
        parts = [found.to(judge.device) for row in rows.tolist() if (found := own[row]) is not None]
        whole = pad_sequence(parts, batch_first=True).float()
        features, states = whole.chunk(2, -1) if feature == "below" else (whole, whole)
        return Known(features, states, lambda at: logits(states.flatten(0, 1)[at]))

    return recall
