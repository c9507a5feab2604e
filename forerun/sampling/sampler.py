"""How a token follows from logits: logits processors, then argmax or sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from forerun.failures import UNATTRIBUTABLE, NotNumbersError
from forerun.sampling.params import SamplingParams
from forerun.sampling.probabilities import FloatArray, argmax_of
from forerun.sampling.seeded import SeededSampler
from forerun.sampling.thoughts import Thoughts

# Where the random number of a token comes from; None is torch's default generator.
Source = SeededSampler | torch.Generator | None
_BLOCK_TOKENS = 256  # tokens whose probabilities are summed together
_FLOOR_FACTORS = (64, 8, 1)  # most distributions have few tokens above the first floor


class QuickTopP(logits_process.TopPLogitsWarper):
    """Transformers' top-p without its sort of all scores.

    On a CPU that sort takes longer than the layers of a small target. Here only tokens above a
    floor are sorted. Tokens below it are left out if their probabilities add up to 1 - p or less.
    For the floor (1 - p) / V they always do.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V], with the filter value for tokens that are left out."""
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)
        probabilities = scores.softmax(-1).numpy()
        smallest = []
        for row in probabilities:
            kept = self._smallest_kept(row)
            if kept is None:
                return super().__call__(input_ids, scores)
            smallest.append(kept)
        filtered = np.full_like(probabilities, self.filter_value)
        np.copyto(filtered, scores.numpy(), where=probabilities >= np.array(smallest)[:, None])
        return torch.from_numpy(filtered)

    def _smallest_kept(self, probabilities: FloatArray) -> np.float32 | None:
        """Return the smallest probability [V] that is kept.

        Return None if tokens on both sides of the limit have this probability, because only the
        sort of all scores tells which of them are kept.
        """
        left_out = 1 - self.top_p
        whole = probabilities.sum(dtype=np.float64)
        for factor in _FLOOR_FACTORS:
            above = probabilities[probabilities >= factor * left_out / len(probabilities)]
            below = whole - above.sum(dtype=np.float64)
            if below <= left_out or factor == 1:
                break
        ascending = np.sort(above)
        first = int((below + ascending.cumsum(dtype=np.float64)).searchsorted(left_out, "right"))
        first = min(first, len(ascending) - self.min_tokens_to_keep)
        if first < 0 or (first > 0 and ascending[first - 1] == ascending[first]):
            return None
        smallest: np.float32 = ascending[first]
        return smallest


class Penalties(LogitsProcessor):
    """Penalties for tokens that are in the output already. The prompt does not count.

    The score of a token is lowered by `frequency` for each of its occurrences in the output, and by
    `presence` if it occurs there at all.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V] after ids [R, n]."""
        output = input_ids[:, self.prompt_length :]
        if not output.shape[1]:
            return scores
        inside = output < scores.shape[-1]  # a draft's vocabulary may have less padding
        counts = torch.zeros_like(scores).scatter_add_(1, output * inside, inside.to(scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class LogitBias(LogitsProcessor):
    """A number that is added to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids = torch.tensor(list(bias))
        self.values = torch.tensor([float(value) for value in bias.values()])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V]."""
        inside = self.ids < scores.shape[-1]
        ids = self.ids[inside].to(scores.device)
        values = self.values[inside].to(scores.device, scores.dtype)
        return scores.index_add(1, ids, values.expand(len(scores), -1))


class ThinkingBudget(LogitsProcessor):
    """Leaves only the token that closes thoughts, once they have used up their budget."""

    def __init__(self, thoughts: Thoughts, prompt_length: int) -> None:
        self.thoughts = thoughts
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V] after ids [R, n]."""
        outputs = input_ids[:, self.prompt_length :].tolist()
        over = [row for row, output in enumerate(outputs) if self._is_over(output)]
        close = self.thoughts.close_token
        if not over or close is None or close >= scores.shape[-1]:
            return scores
        limited = scores.clone()
        limited[over] = -torch.inf
        limited[over, close] = 0.0
        return limited

    def _is_over(self, output: list[int]) -> bool:
        """Return whether an output has used up its budget, and has not closed its thoughts."""
        thoughts = self.thoughts
        marks = 0 if thoughts.is_open else 1
        is_spent = len(output) - marks >= (thoughts.budget or 0)
        return is_spent and thoughts.have_begun(output) and thoughts.close_token not in output


# These compare scores and do not know which token a score belongs to.
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
# These do not read the tokens before, so they process all nodes of a draft in one call.
_PREFIX_FREE = (*_INDEX_FREE, logits_process.SuppressTokensLogitsProcessor, LogitBias)


class Constraint(LogitsProcessor):
    """A processor that can tell before a forward which tokens it forbids after a text.

    The package has one: `forerun.sampling.grammar.Grammar`.
    """

    @property
    def is_slow(self) -> bool:
        """Return whether it takes so long that drafts do not pay."""
        return False

    def is_ready(self, ids: Sequence[int], waits: bool = False) -> bool:
        """Return whether scores after `ids` can be had at once.

        Else another thread goes on to make that possible. A call does not return before it is. A
        constraint that is quick need not implement this.

        Args:
            ids: the tokens before the scores.
            waits: whether to wait for the other thread (`forerun.sampling.waits`).
        """
        return True

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """Return how many of a chain's first tokens are allowed after `tokens`."""
        raise NotImplementedError


def _quickened(processor: LogitsProcessor) -> LogitsProcessor:
    """Return QuickTopP in place of transformers' top-p, and other processors as they are."""
    if type(processor) is not logits_process.TopPLogitsWarper:
        return processor
    return QuickTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)


@dataclass(frozen=True)
class SamplingDistribution:
    """A distribution that a temperature and top-p describe.

    Attributes:
        temperature: divides the logits.
        top_p: tokens are sampled from the smallest set that has this probability.
    """

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class ChainSampling:
    """How a chain is sampled.

    Attributes:
        distribution: what its tokens are sampled from.
        numbers: [n] random numbers in [0, 1), float64, one per token; None for seeded samplers.
        keys: the key of the seeded sampler at each position.
        size: how many tokens the seeded samplers choose from.
    """

    distribution: SamplingDistribution
    numbers: Tensor | None
    keys: Sequence[int] = ()
    size: int = 0


class Drafted(NamedTuple):
    """A chain that was drafted in one call (`forerun.model.forward.FusedDraft`).

    Attributes:
        tokens: the n drafted tokens.
        probs: [n, V] the distributions that the tokens were sampled from, if random numbers were
            given; else None.
        probabilities: the probability of each token.
    """

    tokens: list[int]
    probs: Tensor | None
    probabilities: list[float]


@dataclass(frozen=True)
class Sampler:
    """How a sequence's next token follows from logits.

    Hugging Face's processors come first, then argmax or sampling.
    """

    greedy: bool = True
    processors: LogitsProcessorList | None = None

    def __post_init__(self) -> None:
        if self.processors:
            quick = LogitsProcessorList(map(_quickened, self.processors))
            object.__setattr__(self, "processors", quick)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_length: int,
        vocab_size: int,
        extra: Iterable[LogitsProcessor] = (),
    ) -> Sampler:
        """Return the sampler of parameters, with processors in the order of `generate`.

        `extra` processors come after penalties and biases and before temperature. A repetition
        penalty among them replaces the one of the parameters.

        Raises ValueError for a bias on a token that is not in the vocabulary.
        """
        processors: list[LogitsProcessor] = []
        extra = list(extra)
        if params.repetition_penalty != 1.0:
            penalty_class = logits_process.RepetitionPenaltyLogitsProcessor
            given = next((other for other in extra if type(other) is penalty_class), None)
            processors.append(given or penalty_class(float(params.repetition_penalty)))
            extra = [other for other in extra if other is not given]
        if params.presence_penalty or params.frequency_penalty:
            processors.append(
                Penalties(params.presence_penalty, params.frequency_penalty, prompt_length)
            )
        if params.logit_bias:
            if max(params.logit_bias) >= vocab_size:
                raise ValueError(f"logit_bias has token ids outside 0..{vocab_size - 1}")
            processors.append(LogitBias(params.logit_bias))
        processors += extra
        if params.temperature > 0:
            processors += _warpers(params)
        return cls(not params.temperature, LogitsProcessorList(processors))

    def scores(self, logits: Tensor, prefix: Callable[[int], list[int]]) -> Tensor:
        """Return processed float32 scores [N, V] of logits [N, V].

        `prefix(i)` returns the tokens before row i. Processors that read them are called with rows
        of equal length, so that there is no padding.
        """
        scores = logits.float()
        if not self.processors:
            return scores
        if not self.index_free:
            scores = scores.clone()  # because some of the other processors write in place
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
        # A loop, because the call of a LogitsProcessorList inspects each processor's signature.
        for processor in self.processors or ():
            scores = processor(ids, scores)
        return scores

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> Sequence[int]:
        """Return the beginning of a chain after `tokens` that no grammar forbids.

        The chain's tokens are point masses: no distribution was sampled. Cutting it is exact,
        because the target gives a forbidden token no probability, so it is never accepted and takes
        nothing from the residual. Cutting a token that was sampled from `q` would not be exact,
        because `q` is subtracted in the residual. Such tokens are sampled under the same grammar.
        """
        if self.constraint is None:
            return chain
        return chain[: self.constraint.fitting(tokens, chain)]

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint among the processors, if there is one."""
        constraints = (each for each in self.processors or () if isinstance(each, Constraint))
        return next(constraints, None)

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the logits themselves."""
        return self.greedy and not self.processors

    @cached_property
    def distribution(self) -> SamplingDistribution | None:
        """The distribution that tokens are sampled from.

        None for greedy decoding, and if there are processors besides a temperature and then top-p.
        """
        distribution = SamplingDistribution()
        left = list(self.processors or ())
        if left and type(left[0]) is logits_process.TemperatureLogitsWarper:
            distribution = replace(distribution, temperature=float(left.pop(0).temperature))
        if left and type(left[0]) is QuickTopP and left[0].min_tokens_to_keep == 1:
            distribution = replace(distribution, top_p=float(left.pop(0).top_p))
        return None if self.greedy or left else distribution

    @property
    def prefix_free(self) -> bool:
        """Whether no processor reads the tokens before."""
        return all(type(processor) in _PREFIX_FREE for processor in self.processors or ())

    @property
    def index_free(self) -> bool:
        """Whether no processor knows which tokens the scores belong to.

        The processors can then work on the scores of a part of the vocabulary.
        """
        return all(type(processor) in _INDEX_FREE for processor in self.processors or ())


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Return temperature, top-k, top-p, min-p and typical-p, in the order of `generate`."""
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(logits_process.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(logits_process.TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1.0:
        warpers.append(QuickTopP(float(params.top_p)))
    if params.min_p:
        warpers.append(logits_process.MinPLogitsWarper(float(params.min_p)))
    if params.typical_p < 1.0:
        warpers.append(logits_process.TypicalLogitsWarper(float(params.typical_p)))
    return warpers


class RowError(Exception):
    """A user's processor raised an error for one row; `__cause__` is that error."""

    def __init__(self, row: int) -> None:
        super().__init__(f"a logits processor failed for row {row}")
        self.row = row


def next_tokens(
    samplers: Sequence[Sampler],
    logits: Tensor,
    prefix: Callable[[int], list[int]],
    sources: Sequence[Source],
) -> tuple[list[int], Tensor, Tensor | None]:
    """Return the next token of each row.

    Args:
        samplers: one for each row.
        logits: [R, V].
        prefix: `prefix(row)` returns the tokens before the row's next token.
        sources: where each row's random number comes from.

    Returns:
        The tokens, the processed scores [R, V], and the distributions [R, V] that tokens were
        sampled from, which are None if all rows are greedy.

    Raises:
        RowError: a row's processor raised, left no token to sample, or is a constraint that is not
            ready.
    """
    first = samplers[0]
    if all(sampler is first for sampler in samplers) and first.prefix_free:
        scores = first.scores(logits, prefix)
    elif any(sampler.processors for sampler in samplers):
        scores = _scores_by_row(samplers, logits, prefix)
    else:
        scores = logits.float()
    argmax = argmax_of(scores).tolist() if any(sampler.greedy for sampler in samplers) else []
    if all(sampler.greedy for sampler in samplers):
        return argmax, scores, None
    probabilities = scores.softmax(-1)
    tokens = []
    for row, (sampler, source) in enumerate(zip(samplers, sources, strict=True)):
        try:
            tokens.append(argmax[row] if sampler.greedy else sample(probabilities[row], source))
        except ValueError as error:  # the processors left nothing to sample
            raise RowError(row) from error
    return tokens, scores, probabilities


def _scores_by_row(
    samplers: Sequence[Sampler], logits: Tensor, prefix: Callable[[int], list[int]]
) -> Tensor:
    """Return the processed scores [R, V] of rows with different processors.

    Raises RowError if a row's processor raised, or is a constraint that is not ready.
    """
    scores = logits.float().clone()
    for row, sampler in enumerate(samplers):
        if not sampler.processors:
            continue
        constraint = sampler.constraint
        if constraint is not None and not constraint.is_ready(prefix(row), waits=True):
            raise RowError(row)
        try:
            scores[row] = sampler.scores(logits[row : row + 1], partial(_prefix_of, prefix, row))[0]
        except UNATTRIBUTABLE:
            raise
        except BaseException as error:
            raise RowError(row) from error
    return scores


def _prefix_of(prefix: Callable[[int], list[int]], row: int, _choice: int) -> list[int]:
    return prefix(row)


def sample(probabilities: Tensor, source: Source) -> int:
    """Return a token sampled from a distribution [V].

    A seeded sampler needs it normalised. A generator's random number goes through the inverse of
    the cumulative distribution function. That takes a tenth of the time of torch.multinomial, which
    needs a random number for every entry.

    Raises ValueError for a distribution of NaN, or if no token has a probability.
    """
    if isinstance(source, SeededSampler):
        return source.sample(probabilities)
    device = probabilities.device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS lacks float64
    number = torch.rand((), dtype=dtype, generator=source, device=device)
    if device.type == "cpu":
        return _token_at(float(number), probabilities.numpy())
    below = probabilities.cumsum(-1, dtype=dtype)
    # `right` passes over tokens whose probability is 0.
    index = int(torch.searchsorted(below, number * below[-1], right=True))
    return index if index < len(probabilities) else _last_possible(probabilities.cpu().numpy())


def _token_at(number: float, p: FloatArray) -> int:
    """Return the token at which the cumulative distribution of p [V] passes a number in [0, 1).

    Blocks are summed first, which takes a sixth of the time of a sum up to every token.
    """
    starts = np.arange(0, len(p), _BLOCK_TOKENS)
    below = np.add.reduceat(p, starts, dtype=np.float64).cumsum()
    target = number * below[-1]
    block = int(below.searchsorted(target, "right"))
    if block == len(below):
        return _last_possible(p)
    first = block * _BLOCK_TOKENS
    tokens = p[first : first + _BLOCK_TOKENS]
    rest = target - (below[block - 1] if block else 0.0)
    index = int(tokens.cumsum(dtype=np.float64).searchsorted(rest, "right"))
    return first + (index if index < len(tokens) else _last_possible(tokens))


def _last_possible(p: FloatArray) -> int:
    """Return the last token that has a probability, for a number that was rounded up to the end."""
    if not p.sum() > 0:
        raise NotNumbersError(
            "no token can be sampled: scores are not numbers, or all of them are -inf"
        )
    return int(np.flatnonzero(p)[-1])
