"""How a token follows from logits: processors, then argmax or sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from forerun.failures import UNATTRIBUTABLE, NotNumbersError
from forerun.sampling.params import SamplingParams
from forerun.sampling.probabilities import argmax_of
from forerun.sampling.seeded import SeededSampler

# What a token is sampled by; a generator of None is torch's own.
Source = SeededSampler | torch.Generator | None
_BLOCK = 256  # tokens whose probabilities are summed together


class QuickTopP(logits_process.TopPLogitsWarper):
    """Transformers' top-p without its sort of all scores, which on a CPU takes longer than a small target's layers.
    Only tokens above a floor are sorted. Those below it are left out if together they have no more than 1 - p, as those
    below (1 - p) / V always have."""

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
        """Return the smallest probability that stays, or None if only the sort can tell which of equal ones do."""
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
        self.ids, self.values = (
            torch.tensor(list(bias)),
            torch.tensor([float(each) for each in bias.values()]),
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        inside = self.ids < scores.shape[-1]
        ids, values = (
            self.ids[inside].to(scores.device),
            self.values[inside].to(scores.device, scores.dtype),
        )
        return scores.index_add(1, ids, values.expand(len(scores), -1))


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
    """A processor that forbids tokens after some texts, and knows so before a forward (`forerun.sampling.grammar`)."""

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """Return how many tokens of a chain after the tokens are allowed."""
        raise NotImplementedError


def _quickened(processor: LogitsProcessor) -> LogitsProcessor:
    if type(processor) is not logits_process.TopPLogitsWarper:
        return processor
    return QuickTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)


@dataclass(frozen=True)
class SamplingDistribution:
    """What tokens are sampled from: logits at a temperature, of the most probable tokens that have `top_p` together."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class ChainSampling:
    """How a chain is sampled from `distribution`: by `numbers` [n], float64 in [0, 1), one for each token. Without
    them, by seeded samplers of these `keys`, one for each position, in a vocabulary of `size` tokens."""

    distribution: SamplingDistribution
    numbers: Tensor | None
    keys: Sequence[int] = ()
    size: int = 0


class Drafted(NamedTuple):
    """A chain that was drafted in one call (`forerun.model.forward.FusedDraft`)."""

    tokens: list[int]
    probs: Tensor | None  # [n, V] that the tokens were sampled from, if that was by numbers
    probabilities: list[float]  # of each token


@dataclass(frozen=True)
class Sampler:
    """How a sequence's next token follows from logits: Hugging Face's processors, then argmax or sampling."""

    greedy: bool = True
    processors: LogitsProcessorList | None = None

    def __post_init__(self) -> None:
        if self.processors:
            object.__setattr__(
                self, "processors", LogitsProcessorList(map(_quickened, self.processors))
            )

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_length: int,
        vocab_size: int,
        extra: Iterable[LogitsProcessor] = (),
    ) -> Sampler:
        """Return the sampler of parameters, as transformers' `generate` has it: `extra` processors come after penalties
        and biases and before temperature, and one of a penalty's own class replaces it.

        Raises ValueError for a bias on a token that is not in the vocabulary.
        """
        found: list[LogitsProcessor] = []
        extra = list(extra)
        repetition = logits_process.RepetitionPenaltyLogitsProcessor
        if params.repetition_penalty != 1.0:
            given = next((each for each in extra if type(each) is repetition), None)
            found.append(given or repetition(float(params.repetition_penalty)))
            extra = [each for each in extra if each is not given]
        if params.presence_penalty or params.frequency_penalty:
            found.append(
                Penalties(params.presence_penalty, params.frequency_penalty, prompt_length)
            )
        if params.logit_bias:
            if max(params.logit_bias) >= vocab_size:
                raise ValueError(f"logit_bias has token ids outside 0..{vocab_size - 1}")
            found.append(LogitBias(params.logit_bias))
        found += extra
        if params.temperature > 0:
            if params.temperature != 1.0:
                found.append(logits_process.TemperatureLogitsWarper(float(params.temperature)))
            if params.top_k:
                found.append(logits_process.TopKLogitsWarper(int(params.top_k)))
            if params.top_p < 1.0:
                found.append(QuickTopP(float(params.top_p)))
            if params.min_p:
                found.append(logits_process.MinPLogitsWarper(float(params.min_p)))
        return cls(not params.temperature, LogitsProcessorList(found))

    def scores(self, logits: Tensor, prefix: Callable[[int], list[int]]) -> Tensor:
        """Return processed float32 scores [N, V] of logits [N, V]; `prefix(i)` returns the tokens before the i-th
        choice. Processors that read the prefix see rows of one length only, never padding."""
        scores = logits.float()
        if not self.processors:
            return scores
        if not self.index_free:
            scores = scores.clone()  # some of the other processors write in place
        if self.prefix_free:
            return self._processed(None, scores)
        prefixes = [prefix(i) for i in range(len(scores))]
        by_length = defaultdict(list)
        for i, tokens in enumerate(prefixes):
            by_length[len(tokens)].append(i)
        for rows in by_length.values():
            ids = torch.tensor([prefixes[i] for i in rows], device=scores.device)
            scores[rows] = self._processed(ids, scores[rows])
        return scores

    def _processed(self, ids: Tensor | None, scores: Tensor) -> Tensor:
        for processor in (
            self.processors or ()
        ):  # their list would ask each for its signature every time
            scores = processor(ids, scores)  # type: ignore[arg-type]
        return scores

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> Sequence[int]:
        """Return the beginning of a chain of point masses after the tokens that no grammar forbids.

        This is exact: the target gives a forbidden token no probability, so it is never accepted and takes nothing from
        the residual. It would not be for a token sampled from `q`, as the residual lacks `q`; such tokens are sampled
        under the same grammar."""
        for processor in self.processors or ():
            if isinstance(processor, Constraint):
                chain = chain[: processor.fitting(tokens, chain)]
        return chain

    @property
    def is_argmax(self) -> bool:
        """Whether its tokens are the argmax of the logits themselves."""
        return self.greedy and not self.processors

    @cached_property
    def distribution(self) -> SamplingDistribution | None:
        """What tokens are sampled from; None if processors do more than temperature and top-p, in this order."""
        found, last = SamplingDistribution(), ""
        for each in self.processors or ():
            if type(each) is logits_process.TemperatureLogitsWarper and not last:
                found, last = replace(found, temperature=float(each.temperature)), "temperature"
            elif type(each) is QuickTopP and last != "top-p" and each.min_tokens_to_keep == 1:
                found, last = replace(found, top_p=float(each.top_p)), "top-p"
            else:
                return None
        return None if self.greedy else found

    @property
    def prefix_free(self) -> bool:
        """Whether its processors look at the scores alone."""
        return all(type(processor) in _PREFIX_FREE for processor in self.processors or ())

    @property
    def index_free(self) -> bool:
        """Whether they also ignore which tokens scores belong to, so that a part of the vocabulary will do."""
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
    """Return the next token of each row, the processed scores [R, V], and the distributions [R, V] that tokens were
    sampled from, None if all rows are greedy.

    `prefix(r)` returns the tokens before row r's token, and `sources` are what each is sampled by. Raises RowError if a
    row's processor raised, or left no token to sample."""
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
    """Return a token sampled from a distribution [V], which a seeded sampler needs normalised.

    A generator's number goes through the inverse of the distribution function, in a tenth of the time of
    torch.multinomial, which needs a number for every entry. Raises ValueError for a distribution of NaN or of nothing.
    """
    if isinstance(source, SeededSampler):
        return source.sample(probabilities)
    device = probabilities.device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # that has no float64
    number = torch.rand((), dtype=dtype, generator=source, device=device)
    if device.type == "cpu":
        return _at(float(number), probabilities.numpy())
    below = probabilities.cumsum(-1, dtype=dtype)
    index = int(
        torch.searchsorted(below, number * below[-1], right=True)
    )  # `right` passes over probabilities of 0
    return index if index < len(probabilities) else _last(probabilities.cpu().numpy())


def _at(number: float, p: np.ndarray) -> int:
    """Return the token of p [V] at a number in [0, 1) of the distribution function. Blocks are summed first, which
    takes a sixth of the time of a sum up to every token."""
    below = np.add.reduceat(p, np.arange(0, len(p), _BLOCK), dtype=np.float64).cumsum()
    at = number * below[-1]
    block = int(below.searchsorted(at, "right"))
    if block == len(below):
        return _last(p)
    first = block * _BLOCK
    tokens = p[first : first + _BLOCK]
    rest = at - (below[block - 1] if block else 0.0)
    index = int(tokens.cumsum(dtype=np.float64).searchsorted(rest, "right"))
    return first + (index if index < len(tokens) else _last(tokens))


def _last(p: np.ndarray) -> int:
    """Return the last token that has a probability, for a number that rounding led to the very end."""
    if not p.sum() > 0:
        raise NotNumbersError(
            "no token can be sampled: scores are not numbers, or all of them are -inf"
        )
    return int(np.flatnonzero(p)[-1])
