"""Losses of heads that draft from the target's hidden states, and figures of validation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.model import CausalLM
from forerun.nn.heads import HiddenDrafter
from forerun.train.judged import Known, Recall
from forerun.train.laws import cross_entropy
from forerun.train.parts import in_parts
from forerun.train.texts import Texts

if TYPE_CHECKING:
    from forerun.train.heads import HeadRecipe


def loss_of(
    drafter: HiddenDrafter,
    head: tuple[Tensor, Tensor],
    known: Known,
    part: Texts,
    embedded: Tensor | None,
    recipe: HeadRecipe,
) -> Tensor:
    """Mean loss, a scalar, over all steps of drafts from texts. `head`: the result of `head_rows` for the hot set.

    It goes backward inside: call backward once on what comes, as for `in_parts`.
    """
    weight, bias = (each.bfloat16() for each in head)  # once, and not for each product
    length, met, total = part.tokens.shape[1], part.met().flatten(), known.states.new_zeros(())
    places = met.nonzero()[:, 0]
    wanted = known.law(places).within(drafter.hot, drafter.config.vocab_size)
    number = met.cumsum(0) - 1  # of a place among those

    def loss(behind: Tensor, place: Tensor, states: Tensor, chosen: slice) -> Tensor:
        """The sum over states that stand for places, behind tokens."""
        plain, law = functional.linear(states.bfloat16(), weight, bias).float(), wanted.at(number[place[chosen]])
        informed = plain
        if drafter.informed:
            apart = plain.detach() if recipe.loss == "regression" else plain
            informed = apart + drafter.token_information(behind[chosen])
        if recipe.loss == "law":
            return cross_entropy(informed, law)
        there = known.states.flatten(0, 1)[place[chosen]]
        near = functional.smooth_l1_loss(states, there, reduction="none").mean(-1).sum()
        value = near + 0.1 * cross_entropy(plain, law)
        return value + cross_entropy(informed, law) if drafter.informed else value

    for k, drafted in enumerate(drafter.drafted(known.features, embedded, recipe.unroll), 1):
        text, at = part.met(k).nonzero(as_tuple=True)
        share = recipe.unroll * max(1, len(at))
        own = partial(loss, part.tokens[text, at + k], text * length + at + k)
        total = total + in_parts(drafted[text, at], own, share)
    return total


def embeddings_of(drafter: HiddenDrafter, judge: CausalLM, tokens: Tensor) -> Tensor:
    """The target's embeddings [B, T, d] of tokens."""
    with torch.no_grad():
        return judge.model.get_input_embeddings()(tokens).float()


@torch.no_grad()
def measure(
    drafter: HiddenDrafter,
    judge: CausalLM,
    head: tuple[Tensor, Tensor],
    texts: Texts,
    recall: Recall,
    recipe: HeadRecipe,
) -> dict[str, Any]:
    """Figures of greedy chains from every place of the output in texts.

    "survival": for each k, the share of chains whose first k tokens are the target's argmax; "without_information": the
    same without token information; "curves": see HiddenConfig.

    The tokens in between are those of the text. Where one of them is not the target's argmax, a chain is not followed
    further: survival is the product of the shares among those that are.
    """
    uses = ("survival", "without_information")
    cases: dict[str, list[list[Tensor]]] = {use: [[] for _ in range(recipe.unroll)] for use in uses}
    weight, bias = (part.float() for part in head)
    for rows in texts.ends.argsort(stable=True).split(16):
        part = texts.take(rows)
        tokens, known, met = part.tokens, recall(rows), part.met()
        argmax = torch.full_like(tokens, -1)
        places = met.flatten().nonzero()[:, 0]
        argmax[met] = known.law(places).tokens[:, 0]
        drafts = drafter.drafted(known.features, embeddings_of(drafter, judge, tokens), recipe.unroll)
        kept = argmax == tokens.roll(-1, 1)  # where the text goes on with the target's argmax
        seen = dict.fromkeys(uses, part.met(recipe.unroll))
        length = tokens.shape[1] - recipe.unroll
        for k, states in enumerate(drafts, 1):
            for use in uses:
                text, at = seen[use].nonzero(as_tuple=True)
                logits = functional.linear(states[text, at], weight, bias)
                if drafter.informed and use == "survival":
                    logits = logits + drafter.token_information(tokens[text, at + k])
                chance, best = logits.log_softmax(-1).max(-1)
                hit = drafter.hot[best] == argmax[text, at + k]
                odds = chance - torch.log1p(-chance.exp().clamp(max=1 - 1e-6))
                cases[use][k - 1].append(torch.stack([odds, hit.float()], -1))
                followed = torch.zeros_like(seen[use])
                followed[text, at] = hit
                seen[use] = followed & kept[:, k : k + length]
    curves = [_curve(torch.cat(parts)) for parts in cases["survival"]]
    shares = {
        use: [float(torch.cat(parts)[:, 1].mean().nan_to_num(0.0)) for parts in each] for use, each in cases.items()
    }
    found = {use: [round(float(share), 4) for share in np.cumprod(each)] for use, each in shares.items()}
    return found | {"curves": curves}


@torch.enable_grad()
def _curve(cases: Tensor) -> list[float]:
    """(a, b, m) of HiddenConfig's curves, by logistic regression on cases [n, 2]: log-odds, and 1 for a right token."""
    odds, hit = cases.unbind(-1)
    if not len(odds) or not 0 < hit.mean() < 1:  # nothing to fit
        return [0.0, 1.0, float(hit.mean()) if len(hit) else 0.0]
    line = torch.tensor([0.0, 1.0], device=odds.device, requires_grad=True)
    fit = torch.optim.LBFGS([line], max_iter=50, line_search_fn="strong_wolfe")

    def miss() -> Tensor:
        fit.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(line[0] + line[1] * odds, hit)
        loss.backward()
        return loss

    fit.step(miss)  # type: ignore[arg-type]
    shift, slope = line.tolist()
    return [round(shift, 4), round(max(slope, 0.05), 4), round(float(hit.mean()), 4)]  # likelier must stay likelier
