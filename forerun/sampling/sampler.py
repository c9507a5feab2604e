"""Distributions of the next token, and the acceptance rule that keeps the output's distribution the target's own.

The rule for chains is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). For trees it is
applied child by child to what is left of the target's distribution (recursive rejection sampling). A chain of sampled
tokens may be verified as a whole instead: block verification (Sun et al., arXiv 2403.10444), which accepts no fewer.
Sequences with a seed go by `forerun.sampling.seeded` instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from forerun.engine.draft import Draft
from forerun.failures import UNATTRIBUTABLE, NotNumbersError
from forerun.sampling.penalties import LogitBias
from forerun.sampling.probabilities import argmax_of, best_of
from forerun.sampling.seeded import SeededSampler

# What a token is sampled by; a generator of None is torch's own.
Source = SeededSampler | torch.Generator | None
_BLOCK = 256  # tokens whose probabilities are summed together


class QuickTopP(logits_process.TopPLogitsWarper):
    """Transformers' top-p without its sort of all tokens by their scores, which on a CPU takes longer than a small
    target's layers. Only tokens above a floor are sorted, and by their probabilities: those below it are left out
    where they are not too many together. Of V tokens those below (1 - p) / V never are."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)  # type: ignore[arg-type]
        probabilities, least = scores.softmax(-1).numpy(), []
        for each in probabilities:
            found = self._least(each)
            if found is None:
                return super().__call__(input_ids, scores)  # type: ignore[arg-type]
            least.append(found)
        left = np.full_like(probabilities, self.filter_value)
        np.copyto(left, scores.numpy(), where=probabilities >= np.array(least)[:, None])
        return torch.from_numpy(left)

    def _least(self, probabilities: np.ndarray) -> np.float32 | None:
        """The smallest probability that stays; None where the sort has to say which of equal ones do."""
        left_out, whole = 1 - self.top_p, probabilities.sum(dtype=np.float64)
        for times in (64, 8, 1):  # most distributions have few tokens above the first floor
            above = probabilities[probabilities >= times * left_out / len(probabilities)]
            below = whole - above.sum(dtype=np.float64)
            if below <= left_out or times == 1:
                break
        ascending = np.sort(above)
        first = int((below + ascending.cumsum(dtype=np.float64)).searchsorted(left_out, "right"))
        first = min(first, len(ascending) - self.min_tokens_to_keep)
        if first < 0 or (first > 0 and ascending[first - 1] == ascending[first]):
            return None
        return ascending[first]


# These know no tokens, only scores.
_INDEX_FREE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    QuickTopP,
)
# These read the scores alone, so every node of a draft can go through them at once.
_PREFIX_FREE = (*_INDEX_FREE, logits_process.SuppressTokensLogitsProcessor, LogitBias)


class Constraint(LogitsProcessor):
    """A processor that forbids tokens behind some texts, and can say so beforehand (`forerun.sampling.grammar`)."""

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """How many tokens of a chain behind the tokens are allowed."""
        raise NotImplementedError


def _quickened(processor: LogitsProcessor) -> LogitsProcessor:
    if type(processor) is not logits_process.TopPLogitsWarper:
        return processor
    return QuickTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)


@dataclass(frozen=True)
class SamplingDistribution:
    """What tokens are sampled from: of logits at a temperature the most probable tokens that have `top_p` of all."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Drawing:
    """How a chain is sampled: each token from `law`, by its own of the `numbers` [n] (float64, in [0, 1)), or where
    there are none by its race among the target's `size` tokens, of which `keys` has the key."""

    law: SamplingDistribution
    numbers: Tensor | None
    keys: Sequence[int] = ()
    size: int = 0


class Drafted(NamedTuple):
    """A chain that was drafted in one call (`forerun.model.causal_lm.CausalLM.chain`).

    Attributes:
        laws: [n, V] that the tokens were sampled from, where that was by numbers.
        chances: how probable each token was.
    """

    tokens: list[int]
    laws: Tensor | None
    chances: list[float]


@dataclass(frozen=True)
class Sampler:
    """How a sequence's next token follows from logits: Hugging Face's processors, then argmax or sampling."""

    greedy: bool = True
    processors: LogitsProcessorList | None = None

    def __post_init__(self) -> None:
        if self.processors:
            object.__setattr__(self, "processors", LogitsProcessorList(map(_quickened, self.processors)))

    def scores(self, logits: Tensor, prefix: Callable[[int], list[int]]) -> Tensor:
        """Processed float32 scores [N, V] of logits [N, V]; `prefix(i)` gives the tokens before the i-th choice.

        Processors that read the prefix see rows of one length only, never padding.
        """
        scores = logits.float()
        if not self.processors:
            return scores
        if not self.index_free:
            scores = scores.clone()  # some of the other processors write in place
        if self.prefix_free:
            for processor in self.processors:  # one by one: their list asks each for its signature every time
                scores = processor(None, scores)  # type: ignore[arg-type]
            return scores
        prefixes = [prefix(i) for i in range(len(scores))]
        by_length = defaultdict(list)
        for i, tokens in enumerate(prefixes):
            by_length[len(tokens)].append(i)
        for rows in by_length.values():
            ids = torch.tensor([prefixes[i] for i in rows], device=scores.device)
            scores[rows] = self.processors(ids, scores[rows])  # type: ignore[arg-type]
        return scores

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> Sequence[int]:
        """The beginning of a chain of point masses behind the tokens that no grammar forbids.

        To leave out the rest is exact: the target's law has nothing for a forbidden token, so it is never accepted and
        takes nothing from what is left of the law. For a token that was sampled from `q` this would not do, as the
        residual lacks `q`; but such tokens come from laws that went through the same grammar.
        """
        for processor in self.processors or ():
            if isinstance(processor, Constraint):
                chain = chain[: processor.fitting(tokens, chain)]
        return chain

    @property
    def is_argmax(self) -> bool:
        """Whether its tokens are the argmax of the logits themselves."""
        return self.greedy and not self.processors

    @cached_property
    def law(self) -> SamplingDistribution | None:
        """What its tokens are sampled from, where that is all that processors do."""
        warm, best = logits_process.TemperatureLogitsWarper, QuickTopP
        kinds = [type(processor) for processor in self.processors or ()]
        if self.greedy or kinds not in ([], [warm], [best], [warm, best]):
            return None
        facts = {name: value for each in self.processors or () for name, value in vars(each).items()}
        if facts.get("min_tokens_to_keep", 1) > 1:
            return None
        return SamplingDistribution(*(float(facts.get(name, 1.0)) for name in ("temperature", "top_p")))

    @property
    def prefix_free(self) -> bool:
        """Whether its processors look at the scores alone."""
        return all(type(processor) in _PREFIX_FREE for processor in self.processors or ())

    @property
    def index_free(self) -> bool:
        """Whether they look at the scores alone and not at which tokens these belong to, so that they can be given the
        scores of a part of the vocabulary."""
        return all(type(processor) in _INDEX_FREE for processor in self.processors or ())


class RowError(Exception):
    """A user's processor raised for one row; `__cause__` is what it raised."""

    def __init__(self, row: int) -> None:
        super().__init__(f"a logits processor failed for row {row}")
        self.row = row


def next_tokens(
    samplers: Sequence[Sampler],
    logits: Tensor,
    prefix: Callable[[int], list[int]],
    sources: Sequence[Source],
) -> tuple[list[int], Tensor, Tensor | None]:
    """The next token of each row.

    Args:
        logits: [R, V].
        prefix: gives the tokens before row r's token.
        sources: what each row's token is sampled by.
    Returns:
        The tokens [R], the processed scores [R, V], and the distributions [R, V] that tokens were sampled from, None
        where all rows are greedy.
    Raises:
        RowError: a row's processor raised, or left no token to sample.
    """
    first = samplers[0]
    if all(sampler is first for sampler in samplers) and first.prefix_free:
        scores = first.scores(logits, prefix)
    elif any(sampler.processors for sampler in samplers):
        scores = logits.float().clone()
        for r, sampler in enumerate(samplers):
            if sampler.processors:
                try:
                    scores[r] = sampler.scores(logits[r : r + 1], lambda _, r=r: prefix(r))[0]  # type: ignore[misc]
                except UNATTRIBUTABLE:
                    raise
                except BaseException as error:
                    raise RowError(r) from error
    else:
        scores = logits.float()
    argmax = argmax_of(scores).tolist() if any(sampler.greedy for sampler in samplers) else []
    if all(sampler.greedy for sampler in samplers):
        return argmax, scores, None
    probabilities, tokens = scores.softmax(-1), []
    for r, (sampler, source) in enumerate(zip(samplers, sources, strict=True)):
        try:
            tokens.append(argmax[r] if sampler.greedy else sample(probabilities[r], source))
        except ValueError as error:  # the processors left nothing to sample
            raise RowError(r) from error
    return tokens, scores, probabilities


def sample(probabilities: Tensor, source: Source) -> int:
    """One token from a distribution [V]. It need not be normalised where it is sampled by a generator's numbers.

    That is by the inverse of the distribution function: torch.multinomial needs a random number for every entry, which
    took ten times as long. Raises ValueError for a distribution of NaN or of nothing.
    """
    if isinstance(source, SeededSampler):
        return source.sample(probabilities)
    device = probabilities.device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # that has no float64
    number = torch.rand((), dtype=dtype, generator=source, device=device)
    if device.type == "cpu":
        return _at(float(number), probabilities.numpy())
    below = probabilities.cumsum(-1, dtype=dtype)
    index = int(torch.searchsorted(below, number * below[-1], right=True))  # `right` passes over probabilities of 0
    return index if index < len(probabilities) else _last(probabilities.cpu().numpy())


def _at(number: float, p: np.ndarray) -> int:
    """The token of p [V] at a number in [0, 1) of the distribution function. Whole blocks are summed first, which takes
    a sixth of the time of a sum up to every token."""
    below = np.add.reduceat(p, np.arange(0, len(p), _BLOCK), dtype=np.float64).cumsum()
    at = number * below[-1]
    block = int(below.searchsorted(at, "right"))
    if block == len(below):
        return _last(p)
    first = block * _BLOCK
    tokens = p[first : first + _BLOCK]
    behind = at - (below[block - 1] if block else 0.0)
    index = int(tokens.cumsum(dtype=np.float64).searchsorted(behind, "right"))
    return first + (index if index < len(tokens) else _last(tokens))


def _last(p: np.ndarray) -> int:
    """The last token that has a probability, where rounding led to the very end."""
    if not p.sum() > 0:
        raise NotNumbersError("no token can be sampled: scores are not numbers, or all of them are -inf")
    return int(np.flatnonzero(p)[-1])


@dataclass(frozen=True)
class Verdict:
    """The target's answer to a draft.

    Attributes:
        path: accepted nodes in order, the root first.
        token: the token behind them: a correction if a child was rejected there, else a bonus.
        tested: nodes looked at: the accepted ones and the level of the first rejection, not what is behind it.
        rejected: whether the last node of the path had children and none was accepted.
        argmax: the target's most probable token behind every node of the draft.
        scores: [V] the target's processed scores behind the path's last node, that of `token`. They are to be read
            before its next forward.
    """

    path: list[int]
    token: int
    tested: int
    rejected: bool
    argmax: list[int] = field(default_factory=list)
    scores: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def accepted(self) -> int:
        return len(self.path) - 1


def accept(draft: Draft, scores: Tensor, greedy: bool, generator: torch.Generator | None) -> Verdict:
    """Walks the draft with the target's processed scores [N, V] of its nodes; lossless.

    Greedy compares with the argmax itself, not with ratios of probabilities. Sampling: at a node, `r` is the target's
    distribution. A child x with distribution q (one-hot for a point mass) is accepted if u * q(x) < r(x), else
    r = norm(max(r - q, 0)) for the next child. With no child left, the next token is sampled from r.

    A draft with `block` that begins with a chain of sampled tokens is verified by blocks. Whether it went on behind a
    token may depend on the tokens up to there, as with any rule for lengths.
    """
    if greedy:
        return accept_greedy(draft, *best_of([scores]))
    return _accept_sampled(draft, scores.softmax(-1), generator)


def accept_seeded(draft: Draft, scores: Tensor, source: Callable[[int], Source]) -> Verdict:
    """Walks the draft along the tokens that the target samples, those behind depth d by `source(d)`; lossless, as what
    is drafted has no part in it."""
    argmax, path = argmax_of(scores).tolist(), [0]
    while True:
        node = path[-1]
        token = sample(scores[node].softmax(-1), source(draft.depths[node]))
        child = next((c for c in draft.children[node] if draft.tokens[c] == token), None)
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, token, len(path) - 1 + rejected, rejected, argmax)
        path.append(child)


def accept_greedy(draft: Draft, argmax: list[int], highest: list[float]) -> Verdict:
    """`accept` with the target's most probable token behind every node, and its score. Raises ValueError where the
    scores that a token is chosen by are not numbers."""
    path = [0]
    while True:
        node = path[-1]
        if isnan(highest[node]):  # infinities have an order
            raise NotNumbersError("no token can be chosen: the model's scores are not numbers")
        child = next((c for c in draft.children[node] if draft.tokens[c] == argmax[node]), None)
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, argmax[node], len(path) - 1 + rejected, rejected, argmax)
        path.append(child)


def _accept_sampled(draft: Draft, p: Tensor, generator: torch.Generator | None) -> Verdict:
    read = _read if p.device.type == "cpu" else _gathered
    u, q, p_at, argmax = read(draft, p, generator)
    path = [0]
    if draft.is_block:
        count, left = _accept_block(draft, p, u, [a / b for a, b in zip(p_at, q, strict=True)])
        path = list(range(count + 1))
        if left is not None:
            return Verdict(path, sample(left, generator), count + 1, True, argmax)
    while True:
        node, accepted = path[-1], None
        rejected: list[int] = []
        mass = 1.0  # of the target's distribution without the rejected point masses
        for child in draft.children[node]:
            if rejected and rejected[0] <= draft.sampled:
                here = float(_residual(draft, p[node], rejected)[draft.tokens[child]])
            else:
                here = p_at[child] / max(mass, 1e-30)
            if u[child] * q[child] < here:
                accepted = child
                break
            rejected.append(child)
            mass -= p_at[child]
        if accepted is None:
            token = sample(_residual(draft, p[node], rejected), generator)
            return Verdict(path, token, len(path) - 1 + bool(rejected), bool(rejected), argmax)
        path.append(accepted)


class _Numbers(NamedTuple):
    """What the walk compares, of each node.

    Attributes:
        uniform: its random number.
        q: how probable its token was where it was sampled; 1 for a point mass.
        p: how probable the target has its token.
        argmax: the target's most probable token behind it.
    """

    uniform: list[float]
    q: list[float]
    p: list[float]
    argmax: list[int]


def _read(draft: Draft, p: Tensor, generator: torch.Generator | None) -> _Numbers:
    """On a CPU numbers are read one by one, which takes a fifth of the time of so many operations on tensors."""
    uniforms, laws = torch.rand(len(draft), generator=generator), p.numpy()
    q = [1.0] * len(draft)
    if draft.q is not None:
        own = draft.q.float().numpy()
        q[1 : 1 + draft.sampled] = [float(own[i, draft.tokens[i + 1]]) for i in range(draft.sampled)]
    p_at = [float(laws[max(parent, 0), token]) for token, parent in zip(draft.tokens, draft.parents, strict=True)]
    return _Numbers(uniforms.tolist(), q, p_at, laws.argmax(-1).tolist())


def _gathered(draft: Draft, p: Tensor, generator: torch.Generator | None) -> _Numbers:
    """`_read` from a device that is waited for once. The last token comes in another transfer, and only a sibling
    behind a rejected one that was sampled needs a look at its residual."""
    tokens = torch.tensor(draft.tokens, device=p.device)
    above = torch.tensor(draft.parents, device=p.device).clamp_(min=0)
    q_of = torch.ones(len(draft), device=p.device)
    if draft.q is not None:
        own = torch.arange(1, 1 + draft.sampled, device=p.device)
        q_of[own] = draft.q[own - 1, tokens[own]].to(q_of.dtype)
    uniforms = torch.rand(len(draft), generator=generator, device=p.device)
    numbers = torch.stack([each.float() for each in (uniforms, q_of, p[above, tokens], p.argmax(-1))])
    u, q, p_at, best = numbers.tolist()
    return _Numbers(u, q, p_at, [int(token) for token in best])


def _accept_block(draft: Draft, p: Tensor, u: list[float], ratios: list[float]) -> tuple[int, Tensor | None]:
    """How many tokens of the sampled chain are accepted, and what the next one is to be sampled from, not normalised;
    None where all are (arXiv 2403.10444, Algorithm 2).

    `ratios` are p / q of each node's token. The target's hold on the first i tokens is h_i = min(h_{i-1} p / q, 1). The
    last one is accepted with the probability h_i, any other one with that of S / (S + 1 - h_i), where S is the mass of
    max(h_i p - q, 0) behind it. The longest prefix counts whose last token is accepted.
    """
    hold = [1.0]
    for ratio in ratios[1 : draft.sampled + 1]:
        hold.append(min(hold[-1] * ratio, 1.0))
    last = draft.sampled
    if u[last] < hold[last]:
        return last, None
    assert draft.q is not None
    rest = torch.tensor(hold[:last], device=p.device, dtype=p.dtype)[:, None] * p[:last]
    rest = rest.sub_(draft.q).clamp_(min=0.0)
    mass = rest.sum(-1).tolist()
    kept = (i for i in reversed(range(1, last)) if u[i] * (mass[i] + 1.0 - hold[i]) < mass[i])
    accepted = next(kept, 0)
    # Equal distributions leave nothing but rounding, and a rejection there has no probability.
    return accepted, rest[accepted] if mass[accepted] > 0.0 else p[accepted]


def _residual(draft: Draft, p: Tensor, rejected: list[int]) -> Tensor:
    """What is left of the target's distribution [V] at a node when these children were rejected one after the other:
    norm(max(p - q, 0)) each time; a point mass has the one-hot q of its token."""
    for child in rejected:
        if child <= draft.sampled:
            assert draft.q is not None
            rest = (p - draft.q[child - 1]).clamp_(min=0.0)
        else:
            rest = p.clone()
            rest[draft.tokens[child]] = 0.0
        total = rest.sum()
        # Equal distributions leave nothing but rounding, and a rejection there has no probability: keep what there was.
        p = torch.where(total > 0.0, rest / total, p)
    return p
