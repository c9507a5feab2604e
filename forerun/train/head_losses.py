"""Losses of heads that draft from the target's hidden states, and figures of validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.model import CausalLM
from forerun.nn.heads import HiddenDrafter
from forerun.train.judged import Known, features_of
from forerun.train.texts import Texts

if TYPE_CHECKING:
    from forerun.train.heads import HeadRecipe


class Places(NamedTuple):
    """From where in texts [B, T] a draft's step is learnt, and from what.

    Attributes:
        states: [n] indices of states [B, T - k, d], as if these were one list.
        wanted: [n] numbers of the places that these states stand for, among those that the texts have met.
    """

    states: Tensor
    wanted: Tensor


def places_of(part: Texts, steps: int) -> list[Places]:
    """Those of steps k = 1 .. `steps`."""
    met = part.met()
    number = met.flatten().cumsum(0).view(met.shape) - 1
    return [
        Places(begun.flatten().nonzero()[:, 0], number[:, k:][begun])
        for k, begun in enumerate(map(part.met, range(1, steps + 1)), 1)
    ]


def loss_of(
    drafter: HiddenDrafter,
    head: tuple[Tensor, Tensor],
    known: Known,
    tokens: Tensor,
    places: Sequence[Places],
    embedded: Tensor | None,
    recipe: HeadRecipe,
) -> Tensor:
    """Mean loss, a scalar, over all steps of drafts from texts [B, T]. `known` has logits [n, V] of the places that the
    texts have met. `head`: the result of `head_rows` for the hot set."""
    weight, bias = (part.float() for part in head)
    wanted = known.logits.softmax(-1)[:, drafter.hot]
    losses = []
    for k, state in enumerate(drafter.drafted(known.features, embedded, recipe.unroll), 1):
        at, law = places[k - 1].states, wanted[places[k - 1].wanted]
        state = state.flatten(0, 1)[at]
        plain, whole = functional.linear(state, weight, bias), None
        if drafter.informed:
            information = drafter.token_information(tokens[:, k:].flatten()[at])
            whole = (plain.detach() if recipe.loss == "regression" else plain) + information
        if recipe.loss == "regression":
            near = functional.smooth_l1_loss(state, known.states[:, k:].flatten(0, 1)[at], reduction="none").mean(-1)
            losses.append(near.sum() / max(1, len(at)) + 0.1 * cross_entropy(plain, law))
            if whole is not None:
                losses[-1] = losses[-1] + cross_entropy(whole, law)
        else:
            losses.append(cross_entropy(plain if whole is None else whole, law))
    return torch.stack(losses).mean()


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over logits [n, S] with probabilities [n, S], which may sum to less than 1."""
    return -(wanted * logits.log_softmax(-1)).sum() / max(1, len(wanted))


def embeddings_of(drafter: HiddenDrafter, judge: CausalLM, tokens: Tensor) -> Tensor | None:
    """The target's embeddings [B, T, d] of tokens, for heads that need them."""
    if drafter.config.kind == "medusa":
        return None
    with torch.no_grad():
        return judge.model.get_input_embeddings()(tokens).float()


@torch.no_grad()
def measure(
    drafter: HiddenDrafter, judge: CausalLM, head: tuple[Tensor, Tensor], texts: Texts, recipe: HeadRecipe
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
        part = texts.take(rows).to(judge.device)
        tokens = part.tokens
        known = features_of(judge, tokens, drafter.config.feature)
        argmax = known.logits.argmax(-1)
        unrolled = drafter.unrolled(known.features, embeddings_of(drafter, judge, tokens), tokens, recipe.unroll)
        length = tokens.shape[1] - recipe.unroll
        kept = argmax == tokens.roll(-1, 1)  # where the text goes on with the target's argmax
        seen = dict.fromkeys(uses, part.met(recipe.unroll))
        for k, (state, information) in enumerate(unrolled, 1):
            plain = functional.linear(state, weight, bias)
            for use in uses:
                whole = plain + information if information is not None and use == "survival" else plain
                chance, at = whole[:, :length].log_softmax(-1).max(-1)
                hit = drafter.hot[at] == argmax[:, k : k + length]
                odds = chance - torch.log1p(-chance.exp().clamp(max=1 - 1e-6))
                cases[use][k - 1].append(torch.stack([odds, hit.float()], -1)[seen[use]])
                seen[use] = seen[use] & hit & kept[:, k : k + length]
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
