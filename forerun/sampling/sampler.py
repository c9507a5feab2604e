"""How a token follows from logits: logits processors, then argmax or sampling."""

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

# Where the random numbers for a token come from. None is torch's own generator.
Source = SeededSampler | torch.Generator | None
_BLOCK = 256  # tokens whose probabilities are summed together


class QuickTopP(logits_process.TopPLogitsWarper):
    """Transformers' top-p, without its sort of all scores.

    On a CPU that sort takes longer than the layers of a small target. Here only the tokens above a
    floor are sorted. The tokens below it are left out if their probabilities sum to at most 1 - p,
    which is always so for a floor of (1 - p) / V.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V] with those of the tokens that are left out masked."""
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)
        probabilities = scores.softmax(-1).numpy()
        limits = []
        for row in probabilities:
            limit = self._smallest_kept(row)
            if limit is None:
                return super().__call__(input_ids, scores)
            limits.append(limit)
        kept = np.full_like(probabilities, self.filter_value)
        np.copyto(kept, scores.numpy(), where=probabilities >= np.array(limits)[:, None])
        return torch.from_numpy(kept)

    def _smallest_kept(self, probabilities: np.ndarray) -> np.float32 | None:
        """Return the smallest probability that is kept.

        None if several tokens have it and not all are kept; transformers' sort then decides which.
        """
        left_out = 1 - self.top_p
        total = probabilities.sum(dtype=np.float64)
        # The highest floor first, because in most distributions few tokens are above it.
        for factor in (64, 8, 1):
            above = probabilities[probabilities >= factor * left_out / len(probabilities)]
            below = total - above.sum(dtype=np.float64)
            if below <= left_out or factor == 1:
                break
        ascending = np.sort(above)
        first = int((below + ascending.cumsum(dtype=np.float64)).searchsorted(left_out, "right"))
        first = min(first, len(ascending) - self.min_tokens_to_keep)
        if first < 0 or (first > 0 and ascending[first - 1] == ascending[first]):
            return None
        return ascending[first]


class Penalties(LogitsProcessor):
    """Lowers the scores of tokens that occur in the output.

    It subtracts `frequency` for each occurrence, and `presence` once. The prompt does not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V] after ids [R, n], less the penalties."""
        output = input_ids[:, self.prompt_length :]
        if not output.shape[1]:
            return scores
        inside = output < scores.shape[-1]  # a draft's vocabulary may have less padding
        counts = torch.zeros_like(scores).scatter_add_(1, output * inside, inside.to(scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class LogitBias(LogitsProcessor):
    """Adds a number to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids = torch.tensor(list(bias))
        self.values = torch.tensor([float(value) for value in bias.values()])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [R, V] with the biases added."""
        inside = self.ids < scores.shape[-1]
        ids = self.ids[inside].to(scores.device)
        values = self.values[inside].to(scores.device, scores.dtype)
        return scores.index_add(1, ids, values.expand(len(scores), -1))


# These only compare scores and do not know which token a score belongs to.
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
# These do not read the tokens before, so all nodes of a draft can pass through them at once.
_PREFIX_FREE = (*_INDEX_FREE, logits_process.SuppressTokensLogitsProcessor, LogitBias)


class Constraint(LogitsProcessor):
    """A processor that knows before a forward which tokens it will forbid after a text.

    The one in the package is `forerun.sampling.grammar.Grammar`.
    """

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """Return how many tokens of a chain may follow `tokens`."""
        raise NotImplementedError


def _quickened(processor: LogitsProcessor) -> LogitsProcessor:
    """Return QuickTopP in place of transformers' top-p."""
    if type(processor) is not logits_process.TopPLogitsWarper:
        return processor
    return QuickTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution that tokens are sampled from.

    It is the softmax of the logits at a temperature, restricted to the most probable tokens that
    together have the probability `top_p`.
    """

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class ChainSampling:
    """How the tokens of a chain are sampled.

    Attributes:
        distribution: what they are sampled from.
        numbers: [n] float64 random numbers in [0, 1), one per token. None: seeded samplers are
            used.
        keys: the key of the seeded sampler at each position.
        size: the number of tokens in the vocabulary that the seeded samplers choose from.
    """

    distribution: SamplingDistribution
    numbers: Tensor | None
    keys: Sequence[int] = ()
    size: int = 0


class Drafted(NamedTuple):
    """A chain that was drafted in one call (`forerun.model.forward.FusedDraft`).

    Attributes:
        tokens: the tokens.
        probs: [n, V] distributions that the tokens were sampled from; None unless they were sampled
            by numbers.
        probabilities: the probability of each token.
    """

    tokens: list[int]
    probs: Tensor | None
    probabilities: list[float]


@dataclass(frozen=True)
class Sampler:
    """How a sequence's next token follows from logits.

    Hugging Face's logits processors change the scores; then the argmax is taken, or a token is
    sampled.
    """

    greedy: bool = True
    processors: LogitsProcessorList | None = None

    def __post_init__(self) -> None:
        if self.processors:
            quickened = LogitsProcessorList(map(_quickened, self.processors))
            object.__setattr__(self, "processors", quickened)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_length: int,
        vocab_size: int,
        extra: Iterable[LogitsProcessor] = (),
    ) -> Sampler:
        """Return the sampler of parameters, with the processors in the order of transformers.

        As in `generate`, the `extra` processors come after penalties and biases and before the
        temperature, and an extra repetition penalty replaces that of the parameters.

        Raises ValueError for a bias on a token that is not in the vocabulary.
        """
        processors: list[LogitsProcessor] = []
        others = list(extra)
        if params.repetition_penalty != 1.0:
            penalty = logits_process.RepetitionPenaltyLogitsProcessor
            given = next((processor for processor in others if type(processor) is penalty), None)
            processors.append(given or penalty(float(params.repetition_penalty)))
            others = [processor for processor in others if processor is not given]
        if params.presence_penalty or params.frequency_penalty:
            processors.append(
                Penalties(params.presence_penalty, params.frequency_penalty, prompt_length)
            )
        if params.logit_bias:
            if max(params.logit_bias) >= vocab_size:
                raise ValueError(f"logit_bias has token ids outside 0..{vocab_size - 1}")
            processors.append(LogitBias(params.logit_bias))
        processors += others
        processors += _warpers(params)
        return cls(not params.temperature, LogitsProcessorList(processors))

    def scores(self, logits: Tensor, prefix: Callable[[int], list[int]]) -> Tensor:
        """Return the processed float32 scores [N, V] of logits [N, V].

        `prefix(i)` returns the tokens before row i. Processors that read them get rows of equal
        length, without padding.
        """
        scores = logits.float()
        if not self.processors:
            return scores
        if not self.index_free:
            scores = scores.clone()  # because some of the other processors write in place
        if self.prefix_free:
            return self._processed(None, scores)
        prefixes = [prefix(i) for i in range(len(scores))]
        rows_by_length = defaultdict(list)
        for i, tokens in enumerate(prefixes):
            rows_by_length[len(tokens)].append(i)
        for rows in rows_by_length.values():
            ids = torch.tensor([prefixes[i] for i in rows], device=scores.device)
            scores[rows] = self._processed(ids, scores[rows])
        return scores

    def _processed(self, ids: Tensor | None, scores: Tensor) -> Tensor:
        """Return scores [R, V] after all processors."""
        # One by one, because LogitsProcessorList inspects each signature at every call.
        for processor in self.processors or ():
            scores = processor(ids, scores)
        return scores

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> Sequence[int]:
        """Return the beginning of a chain of point masses that grammars allow after `tokens`.

        Cutting such a chain is exact: the target gives a forbidden token the probability 0, so it
        is never accepted and takes nothing from the residual. Cutting a token that was sampled from
        `q` would not be exact, because `q` is subtracted in the residual. Such tokens are sampled
        under the same grammar instead.
        """
        for processor in self.processors or ():
            if isinstance(processor, Constraint):
                chain = chain[: processor.fitting(tokens, chain)]
        return chain

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the logits themselves."""
        return self.greedy and not self.processors

    @cached_property
    def distribution(self) -> SamplingDistribution | None:
        """The distribution that tokens are sampled from.

        None for greedy decoding, and for processors other than a temperature and then top-p.
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
        """Whether it also does not matter which tokens the scores belong to.

        The processors can then work on the scores of a part of the vocabulary.
        """
        return all(type(processor) in _INDEX_FREE for processor in self.processors or ())


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the processors that change the distribution for sampling; none for greedy decoding."""
    if not params.temperature:
        return []
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(logits_process.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(logits_process.TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1.0:
        warpers.append(QuickTopP(float(params.top_p)))
    if params.min_p:
        warpers.append(logits_process.MinPLogitsWarper(float(params.min_p)))
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
    """Return the next token of each row, the processed scores, and the distributions.

    Scores are [R, V]. So are the distributions that the tokens were sampled from, which are None if
    all rows are greedy. `prefix(r)` returns the tokens before row r's next token, and `sources` has
    the source of randomness for each row.

    Raises RowError if a row's processor raised, or left no token to sample.
    """
    scores = _scores(samplers, logits, prefix)
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


def _scores(
    samplers: Sequence[Sampler], logits: Tensor, prefix: Callable[[int], list[int]]
) -> Tensor:
    """Return the processed scores [R, V]: of all rows at once if they share a sampler.

    Raises RowError if a row's processor raised.
    """
    first = samplers[0]
    if all(sampler is first for sampler in samplers) and first.prefix_free:
        return first.scores(logits, prefix)
    scores = logits.float()
    if any(sampler.processors for sampler in samplers):
        scores = scores.clone()
        for row, sampler in enumerate(samplers):
            if sampler.processors:
                _score_row(sampler, logits, prefix, row, scores)
    return scores


def _score_row(
    sampler: Sampler,
    logits: Tensor,
    prefix: Callable[[int], list[int]],
    row: int,
    scores: Tensor,
) -> None:
    """Write the processed scores of one row. Raises RowError if a processor raised."""
    try:
        scores[row] = sampler.scores(logits[row : row + 1], lambda _: prefix(row))[0]
    except UNATTRIBUTABLE:
        raise
    except BaseException as error:
        raise RowError(row) from error


def sample(probabilities: Tensor, source: Source) -> int:
    """Return a token sampled from a distribution [V].

    The distribution must be normalised for a seeded sampler. Otherwise one random number is put
    through the inverse of the cumulative distribution function. That takes a tenth of the time of
    torch.multinomial, which draws a number for every entry.

    Raises ValueError for a distribution of NaN, and for one that is 0 everywhere.
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


def _token_at(number: float, p: np.ndarray) -> int:
    """Return the token at which the cumulative distribution of p [V] passes a number in [0, 1).

    Blocks are summed first, which takes a sixth of the time of a sum up to every token.
    """
    below = np.add.reduceat(p, np.arange(0, len(p), _BLOCK), dtype=np.float64).cumsum()
    target = number * below[-1]
    block = int(below.searchsorted(target, "right"))
    if block == len(below):
        return _last_possible(p)
    first = block * _BLOCK
    tokens = p[first : first + _BLOCK]
    rest = target - (below[block - 1] if block else 0.0)
    index = int(tokens.cumsum(dtype=np.float64).searchsorted(rest, "right"))
    return first + (index if index < len(tokens) else _last_possible(tokens))


def _last_possible(p: np.ndarray) -> int:
    """Return the last token with a probability, for a number that was rounded up to the very end.

    Raises NotNumbersError if there is none.
    """
    if not p.sum() > 0:
        raise NotNumbersError(
            "no token can be sampled: scores are not numbers, or all of them are -inf"
        )
    return int(np.flatnonzero(p)[-1])
