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
from forerun.train.laws import Law, law_of
from forerun.train.texts import Texts

REMEMBERED = 5 * 2**30  # bytes of features, those of 4 million tokens of states of 640 numbers


class Known(NamedTuple):
    """What the target says about texts.

    Attributes:
        features: [B, T, d] what a head takes: the LM head's inputs, or the states below the last layer.
        states: [B, T, d] the LM head's inputs, which a head predicts.
        law: of places [n], which are numbered as if all texts were one, their distributions.
    """

    features: Tensor
    states: Tensor
    law: Callable[[Tensor], Law]


Recall = Callable[
    [Tensor], Known
]  # `features_of` of some texts by their indices [B], no wider than the longest of them


@torch.no_grad()
def features_of(judge: CausalLM, tokens: Tensor, feature: str = "head") -> Known:
    """What the target says about tokens [B, T]. For `feature` see `HiddenConfig`."""
    with judge.hearing() as heard, judge.hearing("below" if feature == "below" else "") as below:
        logits = judge.model(input_ids=tokens, use_cache=False).logits
    states, flat = heard[0].float(), logits.flatten(0, 1)
    return Known(below[0].float() if below else states, states, lambda at: law_of(lambda part: flat[at[part]], len(at)))


def judged(judge: CausalLM, texts: Texts, feature: str = "head") -> Recall:
    """What the target says about these texts. Each goes through it once, as far as REMEMBERED bytes hold what comes of
    it, and not at all where its states were kept while this target wrote it. So may its distributions have been."""
    head = copy.deepcopy(judge.head).bfloat16()  # autocast would round it anew for each product
    by_head = head_is_plain(judge, texts.take(torch.arange(1)).tokens)
    same = texts.target is not None and same_model(texts.target, judge.fingerprint)
    kept = feature == "head" and same
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
        laws = [texts.law(row) for row in rows.tolist()] if same else [None]
        if None not in laws:
            begins, length = texts.begins[rows], states.shape[1]
            ends = torch.tensor([len(each.tokens) for each in laws if each is not None], device=begins.device)
            starts = ends.cumsum(0) - ends - begins
            whole_law = Law(*(torch.cat(part).to(judge.device) for part in zip(*filter(None, laws), strict=True)))
            return Known(features, states, lambda at: whole_law.at(starts[at // length] + at % length))
        flat = states.flatten(0, 1).bfloat16()
        return Known(features, states, lambda at: law_of(lambda part: head(flat[at[part]]), len(at)))

    return recall


@torch.no_grad()
def head_is_plain(model: CausalLM, tokens: Tensor, tolerance: float = 1e-2) -> bool:
    """Whether the LM head alone gives the logits of tokens [1, T]: some models cap or scale them."""
    with model.hearing() as heard:
        logits = model.model(input_ids=tokens, use_cache=False).logits
    return torch.allclose(model.head(heard[0]).float(), logits.float(), atol=tolerance, rtol=tolerance)
