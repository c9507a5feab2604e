"""Laws of the next token, and the acceptance rule that keeps the output's law the target's own.

The rule for chains is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318); for trees
it is applied child by child on what is left of the target's law (recursive rejection sampling).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from forerun.draft import Draft


class QuickTopP(logits_process.TopPLogitsWarper):
    """Transformers' top-p without its sort of tokens by their scores, which on a CPU takes as long as a small draft
    model's forward: probabilities alone sort ten times as fast, and tell from which one on tokens stay."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)  # type: ignore[arg-type]
        law, least = scores.softmax(-1), []
        for ascending in np.sort(law.numpy(), -1):
            first = int(ascending.cumsum(dtype=np.float64).searchsorted(1 - self.top_p, "right"))
            first = min(first, len(ascending) - self.min_tokens_to_keep)
            if first and ascending[first - 1] == ascending[first]:  # which of equals stay is for the sort to say
                return super().__call__(input_ids, scores)  # type: ignore[arg-type]
            least.append(ascending[first])
        return scores.masked_fill(law < torch.tensor(np.array(least))[:, None], self.filter_value)


# These read the scores alone, so every node of a draft can go through them at once.
_PREFIX_FREE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    QuickTopP,
)


def _quickened(processor: LogitsProcessor) -> LogitsProcessor:
    if type(processor) is not logits_process.TopPLogitsWarper:
        return processor
    return QuickTopP(processor.top_p, processor.filter_value, processor.min_tokens_to_keep)


@dataclass(frozen=True)
class Sampler:
    """How a sequence's next token follows from logits: Hugging Face's processors, then argmax or a draw."""

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
        scores = scores.clone()  # some processors write in place
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

    @property
    def likeliest(self) -> bool:
        """Whether its tokens are the likeliest ones by the logits themselves."""
        return self.greedy and not self.processors

    @property
    def prefix_free(self) -> bool:
        """Whether its processors look at the scores alone."""
        return all(type(processor) in _PREFIX_FREE for processor in self.processors or ())


def choose(
    samplers: Sequence[Sampler],
    logits: Tensor,
    prefix: Callable[[int], list[int]],
    generators: Sequence[torch.Generator | None],
) -> tuple[list[int], Tensor, Tensor | None]:
    """The next token of each row from logits [R, V], the processed scores [R, V], and the laws [R, V] that tokens were
    drawn from (None where all rows are greedy). `prefix(r)` gives the tokens before row r's choice."""
    first = samplers[0]
    if all(sampler is first for sampler in samplers) and first.prefix_free:
        scores = first.scores(logits, prefix)
    elif any(sampler.processors for sampler in samplers):
        each = [sampler.scores(logits[r : r + 1], lambda _, r=r: prefix(r)) for r, sampler in enumerate(samplers)]  # type: ignore[misc]
        scores = torch.cat([row.to(logits.device) for row in each])
    else:
        scores = logits.float()
    if all(sampler.greedy for sampler in samplers):
        return scores.argmax(-1).tolist(), scores, None
    laws = scores.softmax(-1)
    tokens = [
        int(scores[r].argmax()) if sampler.greedy else draw(laws[r], generator)
        for r, (sampler, generator) in enumerate(zip(samplers, generators, strict=True))
    ]
    return tokens, scores, laws


def draw(law: Tensor, generator: torch.Generator | None) -> int:
    """One token from a law [V], which need not be normalised.

    By the inverse of the distribution function: torch.multinomial draws a random number for every entry, which took
    ten times as long. Raises ValueError for a law of NaN or of nothing.
    """
    kind = torch.float32 if law.device.type == "mps" else torch.float64  # that has no float64
    below = law.cumsum(-1, dtype=kind)
    at = torch.rand((), dtype=kind, generator=generator, device=law.device) * below[-1]
    index = int(torch.searchsorted(below, at, right=True))  # `right` passes over entries of probability 0
    if index < len(law):
        return index
    if not float(below[-1]) > 0:
        raise ValueError("no token can be drawn: the model's scores are not numbers, or all of them are -inf")
    return int(law.nonzero()[-1])  # float32 can round up to the very end


@dataclass(frozen=True)
class Verdict:
    """The target's answer to a draft.

    Attributes:
        path: accepted nodes in order, the root first.
        token: the token behind them: a correction if a child was rejected there, else a bonus.
        tested: nodes looked at: the accepted ones and the level of the first rejection, not what is behind it.
        rejected: whether the last node of the path had children and none was accepted.
        best: the target's most likely token behind every node of the draft.
    """

    path: list[int]
    token: int
    tested: int
    rejected: bool
    best: list[int] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return len(self.path) - 1


def accept(draft: Draft, scores: Tensor, greedy: bool, generator: torch.Generator | None) -> Verdict:
    """Walks the draft with the target's processed scores [N, V] of its nodes; lossless.

    Greedy compares with the argmax itself, not with ratios of probabilities. Sampling: at a node, `r` is the
    target's law; child x with law q (one-hot for a point mass) is accepted if u * q(x) < r(x), else
    r = norm(max(r - q, 0)) for the next child; with no child left, the next token is drawn from r.
    """
    if greedy:
        return accept_greedy(draft, scores.argmax(-1).tolist())
    return _accept_sampled(draft, scores.softmax(-1), generator)


def accept_greedy(draft: Draft, best: list[int]) -> Verdict:
    """`accept` with the target's most likely token behind every node."""
    path = [0]
    while True:
        node = path[-1]
        child = next((c for c in draft.children[node] if draft.tokens[c] == best[node]), None)
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, best[node], len(path) - 1 + rejected, rejected, best)
        path.append(child)


def _accept_sampled(draft: Draft, p: Tensor, generator: torch.Generator | None) -> Verdict:
    uniforms = torch.rand(len(draft), generator=generator, device=p.device).tolist()
    path, residual = [0], p[0]
    while True:
        accepted = None
        for child in draft.children[path[-1]]:
            token = draft.tokens[child]
            q = draft.q[child - 1] if draft.q is not None and child <= draft.sampled else None
            if uniforms[child] * (1.0 if q is None else float(q[token])) < float(residual[token]):
                accepted = child
                break
            residual = _minus(residual, q, token)
        if accepted is None:
            rejected = bool(draft.children[path[-1]])
            token = draw(residual, generator)
            return Verdict(path, token, len(path) - 1 + rejected, rejected, p.argmax(-1).tolist())
        path.append(accepted)
        residual = p[accepted]


def _minus(residual: Tensor, q: Tensor | None, token: int) -> Tensor:
    """norm(max(residual - q, 0)); a missing q is the one-hot law of `token`."""
    if q is None:
        rest = residual.clone()
        rest[token] = 0.0
    else:
        rest = (residual - q).clamp_(min=0.0)
    total = float(rest.sum())
    # Equal laws leave nothing but rounding, and a rejection there has no probability: keep what there was.
    return rest / total if total > 0.0 else residual
